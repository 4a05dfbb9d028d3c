"""Runs the core beside a vLLM scheduler: feeds it events, sends its drafts off, has its verifications carried out.

Law of this file: no decision is taken here. What vLLM tells (arrivals, aborts, results) becomes events for the core;
what the core answers is carried out by `step.py` (the target) and `channel.py` (the drafter).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from typing import Any

import minedraft
from minedraft.backends.vllm import compat
from minedraft.backends.vllm.channel import Down, DrafterChannel, Late, News, Up
from minedraft.backends.vllm.core_loop import CoreLoop
from minedraft.backends.vllm.drafts import DraftBook, make_job
from minedraft.backends.vllm.limits import drafter_engine, scheduler_config
from minedraft.backends.vllm.settings import Settings
from minedraft.backends.vllm.step import Step, arrange, check, note_sampled, read_result
from minedraft.backends.vllm.waiting_room import WaitingRoom
from minedraft.journal import JournalHeader, JournalWriter
from minedraft.policy import load_policies
from minedraft.request import FinishReason, Request, RequestId, RequestOutput
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    VerifyWork,
    WorkDone,
    WorkFailed,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Counters:
    """What happened so far, for metrics and tests.

    Attributes:
        steps: verifications that vLLM ran.
        waits: `schedule()` calls that ended with nothing to verify while drafts were awaited.
        wait_s: seconds spent in `schedule()` waiting for drafts.
        strays: requests that vLLM treated otherwise than planned.
        late_drafts: draft works given up.
        drafters_lost: times that the drafter went away.
        preemptions: requests that lost their target KV by the core's decision.
        trims: requests that gave back blocks of rejected drafts.
    """

    steps: int = 0
    waits: int = 0
    wait_s: float = 0.0
    strays: int = 0
    late_drafts: int = 0
    drafters_lost: int = 0
    preemptions: int = 0
    trims: int = 0


class Conductor:
    """The core's side of a vLLM scheduler.

    Args:
        scheduler: vLLM's, made but without requests.
        settings: see there.

    Attributes:
        counters: what happened so far.

    Raises:
        VllmWorldError: settings and engine don't fit, or the drafter can't start.
        ValueError: the limits don't fit together, or a policy is unknown.
    """

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.counters = Counters()
        self._scheduler = scheduler
        self._settings = settings
        self._room = WaitingRoom()
        self._drafts = DraftBook()
        self._inbox: deque[Event] = deque()
        self._blocked: dict[RequestId, Any] = {}  # requests whose grammar is being compiled
        self._incarnations: dict[RequestId, int] = {}
        self._drafting: DraftWork | None = None
        self._planned: VerifyWork | None = None
        self._step: Step | None = None
        self._resend: dict[RequestId, None] = {}
        self._channel: DrafterChannel | None = None
        hello = None
        policies = load_policies(settings.policy_specs)
        self._with_probs = not getattr(policies.selection, "keeps_all", False)
        if settings.drafter is not None:
            engine = drafter_engine(scheduler, settings.drafter)
            self._channel = DrafterChannel(settings.drafter, engine, self._with_probs)
            hello = self._channel.wait_ready()
        try:
            config = scheduler_config(scheduler, settings, hello)
            compat.prepare(scheduler, self._room)
            sinks = [JournalWriter(settings.journal, _header(config, settings))] if settings.journal else []
        except BaseException:
            self.close()
            raise
        self._loop: CoreLoop = CoreLoop(Scheduler(config, policies), sinks)

    @property
    def core(self) -> Scheduler:
        """The core; for looking at."""
        return self._loop.core

    @property
    def drafter_pid(self) -> int | None:
        """Process id of the drafter, if it runs."""
        return None if self._channel is None else self._channel.pid

    def close(self) -> None:
        """End the drafter and the journal; a second call does nothing."""
        if self._channel is not None:
            self._channel.close()
        if hasattr(self, "_loop"):
            self._loop.close()

    # --- What vLLM tells.

    def arrived(self, request: Any) -> None:
        """VLLM has a new request."""
        if request.resumable:
            logger.error("request %s: streaming input is not supported with minedraft", request.request_id)
            compat.fail(self._scheduler, request.request_id)
            return
        self._blocked[request.request_id] = request

    def aborted(self, request_id: RequestId) -> None:
        """VLLM has ended a request that the core may know."""
        self._blocked.pop(request_id, None)
        self._inbox.append(RequestAborted(request_id))

    # --- The first half of a step.

    def plan(self) -> None:
        """Find out what to verify now, and arrange vLLM's queues for it.

        Returns once a verification is arranged, or nothing can be verified before new events come, or the bound on
        waiting is reached; in the latter two cases vLLM is left with nothing to run.
        """
        assert self._step is None, "a verification is in flight"
        if compat.is_paused(self._scheduler):
            return
        deadline = self._loop.now() + self._settings.max_wait_s
        while True:
            self._take_in()
            if self._planned is None:
                self._ask()
            if self._planned is not None:
                if self._arrange(self._planned):
                    return
                continue
            if not self._await_news(deadline):
                compat.order_running(self._scheduler, ())
                return

    def _arrange(self, work: VerifyWork) -> bool:
        """Whether the work gives vLLM anything to run; if not, it is done."""
        self._planned = None
        running = len(self._scheduler.running)
        step = arrange(self._scheduler, self._room, self._drafts, self._incarnations, work)
        self.counters.preemptions += max(0, running - len(self._scheduler.running))
        if step.expected:
            self._step = step
            return True
        step.started_s = self._loop.now()
        self._finish(step)
        return False

    def _await_news(self, deadline: float) -> bool:
        """Wait for the drafter; False if that is in vain or has been long enough."""
        if self._channel is None or not self.core.num_in_flight:
            return False
        now_s = self._loop.now()
        if now_s >= deadline:
            self.counters.waits += 1
            return False
        self._channel.wait(deadline - now_s)
        self.counters.wait_s += self._loop.now() - now_s
        return True

    def scheduled(self, output: Any) -> None:
        """VLLM has scheduled: check it, and bring the workers' block tables up to date."""
        self._room.withdraw()
        if self._resend:
            sent = [request_id for request_id in self._resend if request_id in output.num_scheduled_tokens]
            compat.resend_blocks(self._scheduler, output, sent)
            for request_id in sent:
                del self._resend[request_id]
        step = self._step
        if step is None:
            if not output.num_scheduled_tokens:
                return
            # vLLM ran what the core never planned: an empty plan lets every one of them be found a stray.
            step = self._step = Step(VerifyWork(-1, 0, (), (), (), (), (), (), (), (), (), ()))
        check(step, output.num_scheduled_tokens)
        step.started_s = self._loop.now()
        self.counters.steps += 1

    def limit(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many tokens vLLM may run of a request in this step: what reaches the plan's mark."""
        mark = None if self._step is None else self._step.marks.get(request.request_id)
        return num_new_tokens if mark is None else max(0, min(num_new_tokens, mark - num_computed_tokens))

    # --- The second half of a step.

    def sampled(self, model_output: Any) -> None:
        """The model has run; vLLM's requests are still as before."""
        if self._step is not None:
            note_sampled(self._step, model_output)

    def updated(self) -> None:
        """The step is over and vLLM's requests are up to date: tell the core, and send the next drafts off at once."""
        step, self._step = self._step, None
        if step is not None:
            self._finish(step)
        self._take_in()
        if self._planned is None:
            self._ask()

    def _finish(self, step: Step) -> None:
        ended_s = self._loop.now()
        result = read_result(step)
        self._tell_inbox()  # aborts that came while the model ran precede its result
        for request_id, why in step.strays.items():
            self.counters.strays += 1
            logger.warning("request %s %s; the core is told of it anew", request_id, why)
            self._tell(RequestAborted(request_id))
        if step.work.work_id >= 0:
            self._tell(WorkDone(step.work.work_id, result, step.started_s, ended_s))
        for request_id in step.strays:
            self._introduce_anew(request_id)
        for request in step.requests:
            if request is not None:
                self._tidy(request)

    def _tidy(self, request: Any) -> None:
        """Let go of what rejected drafts or a finished request leave behind."""
        if request.request_id not in self._scheduler.requests:
            self._drafts.drop(request.request_id)
            self._incarnations.pop(request.request_id, None)
            self._resend.pop(request.request_id, None)
        elif compat.is_running(request) and compat.trim(self._scheduler, request):
            self._resend[request.request_id] = None
            self.counters.trims += 1

    def _introduce_anew(self, request_id: RequestId) -> None:
        """Make vLLM and the core agree on a request again: it starts over, with the text that it has."""
        request = self._scheduler.requests.get(request_id)
        self._drafts.drop(request_id)
        self._incarnations.pop(request_id, None)
        if request is None:
            return
        if compat.is_running(request):
            compat.preempt(self._scheduler, request)
        self._tell_arrival(request)

    # --- Events and works.

    def _take_in(self) -> None:
        self._tell_inbox()
        ready = [request for request in self._blocked.values() if compat.can_start(self._scheduler, request)]
        for request in ready:
            del self._blocked[request.request_id]
            self._tell_arrival(request)
        if self._channel is not None:
            for news in self._channel.poll():
                self._hear(news)

    def _tell_inbox(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, RequestAborted):
                self._drafts.drop(event.request_id)
                self._incarnations.pop(event.request_id, None)
                self._resend.pop(event.request_id, None)
            self._tell(event)

    def _tell_arrival(self, request: Any) -> None:
        left = request.max_tokens - request.num_output_tokens
        self._tell(
            RequestArrived(
                Request(
                    request.request_id,
                    prompt_len=request.num_tokens,
                    max_tokens=max(1, left),
                    arrival_s=self._loop.now(),
                    priority=request.priority,
                    max_draft_tokens=compat.max_draft_tokens(request),
                )
            )
        )

    def _tell(self, event: Event) -> None:
        for output in self._loop.tell(event):
            self._check_ended(output)

    def _check_ended(self, output: RequestOutput) -> None:
        """The core ends requests for vLLM's own reasons; where it ends one by itself, the client is told."""
        if output.finish_reason is FinishReason.ERROR and output.request_id in self._scheduler.requests:
            logger.error("request %s: %s", output.request_id, output.detail)
            compat.fail(self._scheduler, output.request_id)

    def _hear(self, news: News) -> None:
        if isinstance(news, Up):
            self._tell(DrafterReady())
        elif isinstance(news, Down):
            self.counters.drafters_lost += 1
            self._drafting = None
            self._tell(DrafterLost(news.message))
        elif isinstance(news, Late):
            self.counters.late_drafts += 1
            self._drafting = None
            self._tell(WorkFailed(news.work_id, news.message))
        else:
            work, self._drafting = self._drafting, None
            assert work is not None, news.work_id
            result = self._drafts.put(work, news, self._scheduler.requests)
            origin_s = self._loop.origin_s
            self._tell(WorkDone(work.work_id, result, news.started_s - origin_s, news.ended_s - origin_s))

    def _ask(self) -> None:
        for work in self._loop.ask():
            if isinstance(work, VerifyWork):
                self._planned = work
                continue
            assert self._channel is not None
            self._drafting = work
            self._channel.submit(make_job(work, self._scheduler.requests, self._with_probs))


def _header(config: SchedulerConfig, settings: Settings) -> JournalHeader:
    return JournalHeader(
        minedraft=minedraft.__version__,
        scheduler=config.given(),
        policies=settings.policy_specs,
        extra={"world": "vllm"},
    )

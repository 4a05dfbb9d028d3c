"""Runs the core beside a vLLM scheduler: feeds it events, sends its drafts off, has its verifications carried out.

Law of this file: no decision is taken here. What vLLM tells (arrivals, aborts, results) becomes events for the core;
what the core answers is carried out by `step.py` (the target) and `channel.py` (the drafter).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import minedraft
from minedraft.backends.vllm import compat
from minedraft.backends.vllm.adapters import AdapterGate
from minedraft.backends.vllm.channel import Down, DrafterChannel, Late, News, Up
from minedraft.backends.vllm.core_loop import CoreLoop
from minedraft.backends.vllm.counters import Counters
from minedraft.backends.vllm.drafter_status import DrafterStatus, status_path
from minedraft.backends.vllm.drafts import hand_over, make_job
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.kv_view import KVView
from minedraft.backends.vllm.limits import drafter_engine, follow_engine, scheduler_config
from minedraft.backends.vllm.messages import Hello
from minedraft.backends.vllm.recording import Recording
from minedraft.backends.vllm.retelling import Retelling
from minedraft.backends.vllm.roster import Roster, Stays
from minedraft.backends.vllm.settings import KEY, DrafterSettings, Settings
from minedraft.backends.vllm.step import Step, arrange, find_strays, note_sampled, read_result, unplanned
from minedraft.backends.vllm.tails import Tails
from minedraft.backends.vllm.waiting_room import WaitingRoom
from minedraft.journal import JournalHeader
from minedraft.policy import Policies, PolicyError, load_policies
from minedraft.request import FinishReason, Request, RequestId, RequestOutput, SequenceStatus
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    RequestDisplaced,
    VerifyWork,
    WorkDone,
    WorkFailed,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_PERIOD_S = 0.1
"""Metrics are at most so old while requests run."""

_MAX_DISPLACED = 50
"""Times that vLLM may treat a request otherwise than planned without a token in between: more is a livelock."""

_MAX_STREAMS: Final = 256
"""Refused streaming inputs that are remembered; of those before, a last piece would be served as a request."""


class Conductor:
    """The core's side of a vLLM scheduler.

    Args:
        scheduler: vLLM's, made but without requests.
        settings: see there.

    Attributes:
        counters: what happened so far.
        marks: while vLLM schedules, by id of those that compute a prompt: tokens that they shall have computed then.

    Raises:
        VllmWorldError: settings and engine don't fit, or the drafter can't start.
        ValueError: the limits don't fit together, or a policy is unknown.
    """

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.counters = Counters()
        self.marks: dict[RequestId, int] = {}
        self._scheduler = scheduler
        self._settings = settings = follow_engine(scheduler, settings)
        self._room = WaitingRoom()
        self._inbox: deque[Event] = deque()
        self._blocked: dict[RequestId, Any] = {}  # requests whose grammar is being compiled
        self._held_back: dict[RequestId, Any] = {}  # who waits while vLLM lets nobody in
        self._is_closed = False  # vLLM lets nobody in
        self._may_nap = False  # the drafter sleeps when the target does
        self._gone: dict[RequestId, None] = {}  # aborted since the step was planned that is to be arranged
        self._replaced: dict[str, None] = {}  # slots whose policy has failed
        self._with_grammar: dict[RequestId, None] = {}
        self._streams: dict[RequestId, None] = {}  # refused streaming inputs, of which pieces may still come
        self._displaced: dict[RequestId, tuple[int, int]] = {}  # tokens then, and how often since without another
        self._gate = AdapterGate(compat.max_adapters(scheduler))
        self._stays = Stays()
        self._roster = Roster(scheduler, self._stays)
        self._drafting: DraftWork | None = None
        self._planned: VerifyWork | None = None
        self._step: Step | None = None
        self._told = False  # whether the core was told anything since it was asked for work
        self._hidden: list[Any] = []  # vLLM's running requests that are not shown to the `schedule()` that runs now
        self._tails = Tails(scheduler)
        self._retelling = Retelling(scheduler)
        self._channel: DrafterChannel | None = None
        self._status: DrafterStatus | None = None
        self._hello: Hello | None = None
        self._vocab_size: int | None = None  # the target's, where the drafter may know more
        policies = load_policies(settings.policy_specs)
        self._with_probs = not policies.keeps_all
        try:
            if settings.drafter is not None:
                self._start_drafter(settings.drafter)
            compat.prepare(scheduler, self._room)
            self._start_core(settings, policies)
        except BaseException:
            self.close()
            raise

    def _start_drafter(self, settings: DrafterSettings) -> None:
        config, engine = self._scheduler.vllm_config, drafter_engine(self._scheduler, settings)
        self._may_nap = bool(engine["enable_sleep_mode"])
        self._status = DrafterStatus(status_path(config.instance_id))
        self._channel = DrafterChannel(settings, engine, self._with_probs, self._status)
        self._hello = self._channel.wait_ready()
        known = compat.vocab_size(config)
        self._vocab_size = None if 0 < self._hello.vocab_size <= known else known

    def _start_core(self, settings: Settings, policies: Policies) -> None:
        config = scheduler_config(self._scheduler, settings, self._hello)
        recording: Recording | None = None
        if settings.journal:
            recording = Recording(settings.journal, _header(config, settings), self._lose_journal)
        sinks = [] if recording is None else [recording]
        self._recording = recording  # not before it is begun: a core that stays keeps its own
        self._view = KVView(self._scheduler, self._stays)
        self._report_due_s = 0.0  # on the loop's clock
        self._loop: CoreLoop = CoreLoop(Scheduler(config, policies, self._view.pool), self._view, sinks)

    def _lose_journal(self) -> None:
        self.counters.journals_lost += 1

    def restart(self, settings: Settings) -> None:
        """Put a fresh core at the side of an idle engine: other policies, mode, limits or journal, no reloading.

        Counters go on, and the drafter stays as it is: what the settings say of it is not looked at.

        Raises:
            VllmWorldError: requests are unfinished, or the journal is the one that is being written.
            ValueError: the limits don't fit together, or a policy is unknown; the core stays as it was.
        """
        self._take_in()
        self._await_ingestion()
        if self._scheduler.requests or self.core.num_unfinished or self.core.num_in_flight:
            raise VllmWorldError("minedraft can't restart beside a busy engine: let its requests end, or abort them")
        if settings.journal and settings.journal == self._settings.journal:
            raise VllmWorldError(f"{KEY}.journal is {settings.journal!r} already; name another file for the fresh core")
        settings = follow_engine(self._scheduler, settings)
        policies = load_policies(settings.policy_specs)
        old, up = self._loop, self.core.state.drafter_up
        self._start_core(settings, policies)
        old.close()
        self._settings = settings
        self._replaced.clear()
        self._with_probs = not policies.keeps_all
        if self._channel is not None:
            if not up:
                self._tell(DrafterLost("it was lost before the restart"))
            # The fresh core knows nothing of the sessions that the old one has let go of.
            self._channel.drop(old.core.state.draft_freed)

    @property
    def core(self) -> Scheduler:
        """The core; for looking at."""
        return self._loop.core

    @property
    def drafter_pid(self) -> int | None:
        """Process id of the drafter, if it runs."""
        return None if self._channel is None else self._channel.pid

    def report(self) -> dict[str, int]:
        """What is new for the metrics since the last report, see `Counters.report`; nothing if that was just now.

        Nobody looks at metrics in every step, and they would take as long as the core's part of one. Whoever looks when
        all requests have ended finds them whole.
        """
        now_s = self._loop.now()
        if now_s < self._report_due_s and self._scheduler.requests:
            return {}
        self._report_due_s = now_s + REPORT_PERIOD_S
        state = self.core.state
        return self.counters.report(state.drafter_up, state.batches.sizes(), state.num_active_batches)

    def close(self) -> None:
        """End the drafter and the journal; a second call does nothing."""
        if hasattr(self, "_loop"):
            self._loop.close()  # first: a journal must be whole even if nobody waits for the drafter's end
        if self._channel is not None:
            self._channel.close()
        if self._status is not None:
            self._status.close()

    # --- What vLLM tells.

    def arrived(self, request: Any) -> None:
        """VLLM has a new request."""
        if (reason := self._unservable(request)) is not None:
            logger.error("request %s: %s", request.request_id, reason)
            compat.fail(self._scheduler, request.request_id)
            return
        self._blocked[request.request_id] = request

    def _unservable(self, request: Any) -> str | None:
        """Why a request can't be served, if so."""
        request_id = request.request_id
        is_last_piece = request_id in self._streams  # of a stream, of which it doesn't look like one
        if request.resumable:
            self._streams[request_id] = None
            if len(self._streams) > _MAX_STREAMS:  # most clients go away, and their last piece never comes
                del self._streams[next(iter(self._streams))]
        elif is_last_piece:
            del self._streams[request_id]
        if request.resumable or is_last_piece:
            return "streaming input is not supported with minedraft"
        try:
            compat.max_draft_tokens(request)
        except VllmWorldError as error:
            return str(error)
        return None

    def aborted(self, request_id: RequestId) -> None:
        """VLLM has ended a request that the core may know."""
        self._blocked.pop(request_id, None)
        self._held_back.pop(request_id, None)
        self._inbox.append(RequestAborted(request_id))

    def lost_place(self, request_id: RequestId) -> None:
        """VLLM has preempted a request, by the core's decision or by another's."""
        compat.forget_scheduled(self._scheduler, request_id)
        self._tails.forget(request_id)
        self._stays.changed()

    def pause_changed(self) -> None:
        """VLLM was paused, or goes on. While it lets nobody in, the core shall know nobody who waits."""
        self._is_closed = compat.is_closed(self._scheduler)
        if self._channel is not None and not compat.is_in_pause(self._scheduler):
            self._channel.wake()

    def dropped(self) -> None:
        """VLLM has taken the KV of all running requests, and the prefix cache; no step is in flight.

        In a pause that is what comes of `sleep`, of which a scheduler isn't told anything else; a pause that clears the
        caches looks the same from here, and so the drafter sleeps through that too.
        """
        self._stays.clear()
        self._tails.clear()
        for request_id in self.core.state.running:  # who is yet to join has counted on the prefix cache
            if (request := self._scheduler.requests.get(request_id)) is not None:  # else its abort is in the inbox
                self._inbox.append(RequestDisplaced(request_id, request.num_tokens))
        work, self._planned = self._planned, None
        if work is not None:  # it can't run any more: it ends without having done anything
            self._tell_inbox()
            step = Step(work, [None] * len(work.request_ids))
            step.started_s = step.ended_s = self._loop.now()
            self._finish(step, {})
        if self._channel is not None and self._may_nap and compat.is_in_pause(self._scheduler):
            self._channel.sleep()

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
                self._hidden = compat.show_running(self._scheduler, [])
                return

    def _arrange(self, work: VerifyWork) -> bool:
        """Whether the work gives vLLM anything to run; if not, it is done."""
        self._planned = None
        num_running = len(self._scheduler.running)
        step = arrange(self._scheduler, self._room, self._roster, work, self._gone)
        self.counters.preemptions += num_running - len(self._scheduler.running)
        if step.expected:
            self._view.keep_prefixes()
            if self._tails:
                self._tails.take_back(step.expected)
            self._step = step
            self.marks = step.marks
            self._hidden = compat.show_running(self._scheduler, step.running)
            return True
        step.started_s = step.ended_s = self._loop.now()
        self._finish(step, {})
        return False

    def _await_news(self, deadline: float) -> bool:
        """Wait for the drafter; False if that is in vain or has been long enough."""
        if self._channel is None or not self.core.num_in_flight:
            return False
        now_s = self._loop.now()
        if now_s >= deadline:
            self.counters.empty_plans += 1
            return False
        self._channel.wait(deadline - now_s)
        self.counters.waits += 1
        self.counters.wait_s += self._loop.now() - now_s
        return True

    def _await_ingestion(self) -> None:
        """Let the drafter finish what it takes in, if nobody is there any more to need it."""
        while self._channel is not None and self.core.num_in_flight and not self.core.num_unfinished:
            self._channel.wait(self._settings.max_wait_s)  # one that doesn't answer is late, or lost
            self._take_in()

    def scheduled(self, output: Any) -> None:
        """VLLM has scheduled: check it, and bring the workers' block tables up to date."""
        self._room.withdraw()
        compat.show_again(self._scheduler, self._hidden)
        self._hidden = []
        self.marks = {}
        step, num_scheduled = self._step, output.num_scheduled_tokens
        is_planned = step is not None and num_scheduled == step.expected
        if self._tails:
            self._tails.resend(output, is_planned=is_planned)
        if step is None:
            if not num_scheduled:
                return
            step = self._step = unplanned()
        if not is_planned:
            find_strays(self._scheduler, step, num_scheduled, self._stays)
        elif self.core.state.num_active_batches > 1:  # else who runs, runs in every step, and the workers copy nothing
            for request_id in self._retelling.look(output, step.work.batch):
                self._tails.forget(request_id)
        step.started_s = self._loop.now()
        self.counters.started(self.core.state.mode)

    def limit(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many tokens vLLM may run of a request in this step: what reaches the plan's mark."""
        mark = self.marks.get(request.request_id)
        return num_new_tokens if mark is None else max(0, min(num_new_tokens, mark - num_computed_tokens))

    # --- The second half of a step.

    def sampled(self, model_output: Any) -> None:
        """The model has run; vLLM's requests are still as before."""
        if self._step is not None:
            self._step.ended_s = self._loop.now()
            note_sampled(self._step, model_output, len(self._scheduler.running))

    def updated(self, outputs: dict[int, Any]) -> None:
        """The step is over and vLLM's requests are up to date: tell the core, and send the next drafts off at once."""
        step, self._step = self._step, None
        if step is not None:
            self._finish(step, outputs)
        self._take_in()
        # Without a drafter to send off, the next step is planned when it starts, with whoever has arrived by then.
        if self._planned is None and self.core.state.speculating and not compat.is_paused(self._scheduler):
            self._ask()

    def _finish(self, step: Step, outputs: dict[int, Any]) -> None:
        self.counters.verified(step.started_s, step.ended_s, drafting=self._drafting is not None)
        num_running = len(self._scheduler.running)
        result = read_result(step, outputs, num_running)
        self._tell_inbox()  # aborts that came while the model ran precede its result
        for request_id, why in step.strays.items():
            self._displace(request_id, why)
        if step.work.work_id >= 0:
            self._tell(WorkDone(step.work.work_id, result, step.started_s, step.ended_s))
            self._cut_blocks()
        if num_running != step.num_running:
            self._forget_ended(step)

    def _cut_blocks(self) -> None:
        """Give back the blocks that the core has cut off: drafts that were rejected lay there."""
        if self._view.trimmed:
            self.counters.trims += self._tails.cut(self._view.trimmed)
            self._view.trimmed.clear()

    def _forget_ended(self, step: Step) -> None:
        for request_id in step.work.request_ids:
            if request_id not in self._scheduler.requests:
                self._forget(request_id)
                self._open_gate(request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._stays.forget(request_id)
        self._tails.forget(request_id)
        self._retelling.forget(request_id)
        compat.forget_scheduled(self._scheduler, request_id)
        self._with_grammar.pop(request_id, None)
        self._displaced.pop(request_id, None)

    def _displace(self, request_id: RequestId, why: str) -> None:
        """Make vLLM and the core agree on a request again: it waits once more, with the text that it has."""
        self.counters.strays += 1
        logger.warning("request %s %s; it loses its KV and waits again", request_id, why)
        request = self._scheduler.requests.get(request_id)
        if request is None:
            self._tell_ended(RequestAborted(request_id))
            return
        self._stays.forget(request_id)
        if compat.is_running(request):
            compat.preempt(self._scheduler, request)
        self._tell(RequestDisplaced(request_id, request.num_tokens))
        before, count = self._displaced.get(request_id, (-1, 0))
        count = count + 1 if before == request.num_tokens else 1
        self._displaced[request_id] = (request.num_tokens, count)
        if count >= _MAX_DISPLACED:
            logger.error("request %s was displaced %d times without a new token; it is given up", request_id, count)
            compat.fail(self._scheduler, request_id)

    # --- Events and works.

    def _take_in(self) -> None:
        if self._inbox:
            self._tell_inbox()
        if self._is_closed:
            self._hold_back()
        elif self._blocked or self._held_back:
            self._let_on()
        if self._channel is not None:
            for news in self._channel.poll():
                self._hear(news)

    def _let_on(self) -> None:
        """Tell the core of those that nothing but their turn keeps from running."""
        if self._held_back:
            held, self._held_back = self._held_back, {}
            for request in held.values():
                self._tell_arrival(request)
        ready = [request for request in self._blocked.values() if compat.can_start(self._scheduler, request)]
        for request in ready:
            del self._blocked[request.request_id]
            if self._gate.arrive(request.request_id, compat.adapter(request)):
                self._tell_arrival(request)

    def _hold_back(self) -> None:
        """Let the core forget who waits, until vLLM lets requests in again: it would admit them in vain."""
        if self._planned is not None or not self.core.state.waiting.num_live:
            return
        sequences = self.core.state.sequences.values()
        for request_id in [seq.request_id for seq in sequences if seq.status is not SequenceStatus.RUNNING]:
            request = self._scheduler.requests.get(request_id)
            # One that lost its KV by the core's decision runs in vLLM until the next step takes it back.
            if request is not None and not compat.is_running(request):
                self._held_back[request_id] = request
                self._tell(RequestAborted(request_id))

    def _tell_inbox(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, RequestAborted):
                self._tell_ended(event)
            else:
                self._tell(event)

    def _tell_ended(self, event: RequestAborted) -> None:
        """A request has ended outside a step's result."""
        self._forget(event.request_id)
        if self._planned is not None:
            self._gone[event.request_id] = None
        self._tell(event)
        self._open_gate(event.request_id)

    def _open_gate(self, request_id: RequestId) -> None:
        """A request has ended: those that waited for its adapter's place go on."""
        for freed_id in self._gate.leave(request_id):
            if (request := self._scheduler.requests.get(freed_id)) is not None:  # else its abort is in the inbox
                self._tell_arrival(request)

    def _tell_arrival(self, request: Any) -> None:
        if request.structured_output_request is not None:
            self._with_grammar[request.request_id] = None
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
        self._told = True
        for output in self._with_good_policies(self._loop.tell, event):
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
            self.counters.drafters_lost += not news.is_asleep
            self._drafting = None
            self._tell(DrafterLost(news.message))
        elif isinstance(news, Late):
            self.counters.late_drafts += 1
            self._drafting = None
            self._tell(WorkFailed(news.work_id, news.message))
        else:
            work, self._drafting = self._drafting, None
            assert work is not None, news.work_id
            with_grammar = bool(self._with_grammar)
            result = hand_over(self._scheduler, self._roster, work, news, with_grammar, self._vocab_size)
            origin_s = self._loop.origin_s
            started_s, ended_s = news.started_s - origin_s, news.ended_s - origin_s
            if any(work.num_draft):
                self.counters.drafted(started_s, ended_s)
            else:
                self.counters.ingested(ended_s)
            self._tell(WorkDone(work.work_id, result, started_s, ended_s))

    def _ask(self) -> None:
        """Ask for work, unless the core has heard nothing since it was asked last."""
        if not self._told:
            return
        self._told = False
        for work in self._with_good_policies(self._loop.ask):
            if isinstance(work, VerifyWork):
                self._planned = work
                self._gone.clear()
                continue
            assert self._channel is not None
            self._drafting = work
            self._channel.submit(make_job(self._scheduler, self._roster, work, self._with_probs))

    def _with_good_policies(self, verb: Callable[..., list[T]], *args: Any) -> list[T]:
        """What one of the core's two verbs answers; where a policy fails, nothing of its decision has been done."""
        while True:
            try:
                return verb(*args)
            except PolicyError as error:
                self._replace_policy(error)

    def _replace_policy(self, error: PolicyError) -> None:
        """Put the default in the place of a policy that has failed: it must not cost anybody's request.

        Raises:
            PolicyError: the settings want that, or it is the default that has failed.
        """
        slot = error.slot
        if self._settings.on_policy_error == "raise" or slot in self._replaced:
            raise error
        self._replaced[slot] = None
        self.counters.policies_replaced += 1
        defaults = follow_engine(self._scheduler, replace(self._settings, policies={})).policy_specs
        spare = getattr(load_policies(defaults), slot)
        logger.error("%s; from now on %s decides in its place", error, type(spare).__name__, exc_info=error)
        if self._recording is not None:
            self._recording.give_up(f"{slot} policy replaced")
        policies = replace(self.core.policies, **{slot: spare})
        self.core.use_policies(policies)
        self._with_probs = not policies.keeps_all


def _header(config: SchedulerConfig, settings: Settings) -> JournalHeader:
    return JournalHeader(
        minedraft=minedraft.__version__,
        scheduler=config.given(),
        policies=settings.policy_specs,
        extra={"world": "vllm", "shared_pool": True},
    )

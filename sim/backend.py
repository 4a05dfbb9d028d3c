"""`SimBackend`: the world in virtual time, on a SimPy environment.

Pull mode: `next_event` steps the environment until something is to be reported, so time passes only there,
and a user's own SimPy processes (a pause, a monitor) run in the same environment.

**Devices.** Each device group is a first-in-first-out server for one job at a time (`Device`), and so is the
host. It keeps its queue itself and schedules one `Timeout` with a callback per job, instead of a
`simpy.Resource` with a process per job. Both give the same times; the cost per job, measured on one core
(200,000 jobs, CPython 3.11, SimPy 4.1): Resource and process 13 to 17 us, a server process fed by a `Store` 7
to 12 us, Timeout and callback 1.6 to 1.8 us. The whole world needs 6 to 10 us for a plain decoding step of 7
requests, so a Resource would have more than doubled it. A user's process still can occupy a device: `yield
backend.target.occupy(seconds)`.

**Host time.** A `VerifyWork` holds the host for `round_overhead_s` before its device may start, and a work
submitted while the host is busy waits behind it there (the draft that the core submits in the same instant,
in particular). With stage times V and t and overhead o, two sub-batches on two devices then have the period
max(V, t) + o, and one batch V + t + o: the terms of the equal-k identity Delta = (V + t + o) / (max(V, t) +
o) - 1.

**Links.** With `traffic` the groups are joined by a link (`minedraft.sim.links`, which says what travels): a work for
the group across it starts when its message has arrived, and its end is told when the answer has. Times of a work are
its device's own. Which way works take is chosen once, so that a world without a link pays nothing for it.

**Truth.** The world knows what the core must not: how long each answer will be and which drafts will be
accepted. It reads a request's position off the work itself (`num_computed + num_new`), so a step that failed
or was thrown away leaves no trace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress, repeat
from operator import add, ge
from typing import Any, Final

import simpy

from minedraft.request import FinishReason, RequestId
from minedraft.sim.acceptance import AcceptanceModel
from minedraft.sim.arrivals import ArrivalStream
from minedraft.sim.cost import CostModel
from minedraft.sim.faults import Faults
from minedraft.sim.links import Lane, Traffic
from minedraft.sim.steps import CostError
from minedraft.sim.workload import SimRequest, WorkloadError
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    VerifyResult,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
    draft_result,
    verify_result,
    work_done,
)

_NO_FAULTS: Final = Faults()

LONGEST_WORK_S: Final = 1e6
"""A work of twelve days: a cost model that says so is wrong."""


def priced(duration_s: float, work: Work) -> float:
    """The seconds that a cost model says, if the clock can go by them.

    Raises:
        CostError: they are negative, no number, or beyond `LONGEST_WORK_S`.
    """
    if not 0.0 <= duration_s <= LONGEST_WORK_S:
        raise CostError(
            f"cost: {type(work).__name__} of {len(work.request_ids)} requests takes {duration_s} s, must be from 0 to "
            f"{LONGEST_WORK_S:g}; correct the cost model or its figures"
        )
    return duration_s


class _Job:
    """One job of a device: how long, and whom to tell.

    Attributes:
        num_arrived: requests that had arrived when the job was made; its entries are about these.
    """

    __slots__ = ("done", "duration_s", "num_arrived", "started_s", "work")

    def __init__(
        self, work: Work | None, duration_s: float, done: Callable[[_Job], None], num_arrived: int = 0
    ) -> None:
        self.num_arrived = num_arrived
        self.work = work
        self.duration_s = duration_s
        self.done = done
        self.started_s = math.nan

    @property
    def ended_s(self) -> float:
        """When the device was done with it."""
        return self.started_s + self.duration_s


_Step = Callable[[_Job], None]
"""What is done with a job next."""


class Device:
    """A server for one job at a time, first in first out, never interrupted."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._timeout: Any = env.timeout
        self._ended: Any = self._on_timeout  # bound once
        self._queue: deque[_Job] = deque()
        self._current: _Job | None = None
        self._timer: Any = None  # at whose timeout the current one ends

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._current is not None

    def occupy(self, duration_s: float) -> simpy.Event:
        """Take the device for a while, behind the jobs that it already has.

        Args:
            duration_s: how long, in seconds, at least 0.

        Returns:
            An event that a SimPy process can wait for; it happens when the device is free again.
        """
        released = self._env.event()
        self.submit(_Job(None, duration_s, lambda _: released.succeed()))
        return released

    def submit(self, job: _Job) -> None:
        """Run a job, or queue it."""
        if self._current is None:
            self._start(job)
        else:
            self._queue.append(job)

    def cancel(self, job: _Job) -> None:
        """Stop or unqueue a job; it is never reported. The next one starts at once."""
        if self._current is job:
            self._start_next()
        elif job in self._queue:
            self._queue.remove(job)

    def _start(self, job: _Job) -> None:
        self._current = job
        job.started_s = self._env.now
        self._timer = timer = self._timeout(job.duration_s)
        timer.callbacks.append(self._ended)

    def _start_next(self) -> None:
        if self._queue:
            self._start(self._queue.popleft())
        else:
            self._current = None

    def _on_timeout(self, timeout: simpy.Event) -> None:
        job = self._current
        if job is not None and timeout is self._timer:  # else its job was cancelled meanwhile
            self._start_next()
            job.done(job)


def new_environment() -> Any:
    """A SimPy environment for several worlds to share, at time 0."""
    return simpy.Environment()


class _Truth:
    """What the world knows of a living request.

    Attributes:
        prompt_len: tokens of its prompt.
        num_output: tokens at which it ends.
        stops: it stops by itself there; else the user's limit ends it.
        arrival_index: in the order of arrival, from 0.
    """

    __slots__ = ("arrival_index", "num_output", "prompt_len", "stops")

    def __init__(self, prompt_len: int, num_output: int, stops: bool, arrival_index: int) -> None:
        self.prompt_len = prompt_len
        self.num_output = num_output
        self.stops = stops
        self.arrival_index = arrival_index


class SimBackend:
    """A simulated world; see the module's docstring for its rules and `minedraft.backend` for the contract.

    `next_event` returns None when the environment has no more events, and also as soon as the workload is
    over, every request has ended and no work is in flight: a user's process without end doesn't keep the run
    alive.

    Args:
        workload: requests in order of arrival, pulled one at a time as simulated time gets there; or a stream that
            somebody else starts, who calls `enter`: several worlds may share it, and an environment.
        cost: seconds on the device per work.
        acceptance: how many drafts are accepted.
        colocated: the drafter runs on the target's device, one work at a time.
        drafter: the drafter's device, if it serves other worlds too; works of all of them queue there.
        drafts_on_host: there is no drafter's device: drafts are looked up on the host, beside its other work.
        traffic: what travels between the two groups, over which link; None for nothing that takes time.
        round_overhead_s: host time per `VerifyWork`, in seconds, at least 0.
        max_concurrency: a request arrives only while fewer than this many are in the system, as with `vllm
            bench serve --max-concurrency`; with all requests at once it is a closed loop, in which the next
            one arrives in the instant in which one ends. None for no limit.
        faults: what goes wrong.
        num_drafted: how many tokens a drafter comes up with, per entry of a work; None for all that are asked for.
        draft_probs: report the acceptance model's conditional rates as the drafted tokens' probabilities, for
            selection policies: a drafter whose confidence is exactly right on average.
        env: an environment to live in, for users with processes of their own; a new one by default. Only
            `next_event` may step it.

    Attributes:
        env: the SimPy environment.
        target: the target's device.
        drafter: the drafter's device; the same object as the target's if colocated, as the host if it drafts.
        host: the host, a device too.
        to_drafter: the link's lane from target to drafter; None without a link.
        to_target: the other lane.

    Raises:
        ValueError: an argument is out of range.
        WorkloadError: from here or from `next_event`, for arrivals that are not in order and for the id of a request
            that is still alive.
    """

    def __init__(
        self,
        workload: Iterable[SimRequest] | ArrivalStream,
        cost: CostModel,
        acceptance: AcceptanceModel,
        *,
        colocated: bool = False,
        drafter: Device | None = None,
        drafts_on_host: bool = False,
        traffic: Traffic | None = None,
        round_overhead_s: float = 0.0,
        max_concurrency: int | None = None,
        faults: Faults = _NO_FAULTS,
        num_drafted: Callable[[DraftWork], tuple[int, ...]] | None = None,
        draft_probs: bool = False,
        env: simpy.Environment | None = None,
    ) -> None:
        if not 0.0 <= round_overhead_s < math.inf:
            raise ValueError(f"round_overhead_s is {round_overhead_s}, must be finite and >= 0")
        if colocated + drafts_on_host + (traffic is not None) > 1:
            raise ValueError("colocated, drafts_on_host and traffic exclude each other: a link joins two device groups")
        self.env = simpy.Environment() if env is None else env
        self.target = Device(self.env)
        self.host = Device(self.env)
        if drafter is not None and (colocated or drafts_on_host):
            raise ValueError("drafter is given, but the drafter has no device of its own")
        own = drafter if drafter is not None else Device(self.env)
        self.drafter = self.target if colocated else self.host if drafts_on_host else own
        self._cost = cost
        self._acceptance = acceptance
        self._overhead_s = round_overhead_s
        self._num_drafted = num_drafted
        self._draft_probs = draft_probs
        self._events: deque[Event] = deque()
        self._num_in_flight = 0
        self._drafts: dict[int, _Job] = {}
        self._num_arrived = 0
        self._truths: dict[RequestId, _Truth] = {}
        # Per request the num_computed + num_new with which a step without drafts yields its last token.
        self._ends_at: dict[RequestId, int] = {}
        self._drafter_up = True
        self._connect(traffic)
        self._prepare()
        self._install(faults)
        if isinstance(workload, ArrivalStream):
            self._arrivals = workload
        else:
            self._arrivals = ArrivalStream(self.env, workload, max_concurrency)
            self._arrivals.start(self.enter)

    def _prepare(self) -> None:
        """What a world that is made of this one has to set up; a compiled class can't hand `**options` to its base."""

    # --- the seam

    def now(self) -> float:
        """Simulated seconds."""
        now_s: float = self.env.now
        return now_s

    def submit(self, work: Work) -> None:
        """See `Backend`."""
        self._num_in_flight += 1
        if type(work) is VerifyWork:
            duration_s = priced(self._cost.verify_s(work), work)
            job = _Job(work, duration_s, self._verify_ended, self._num_arrived)
            if self._overhead_s or self.host.busy:
                self._through_host(job, self._overhead_s)
            else:
                self._start_verify(job)
        else:
            assert type(work) is DraftWork, work
            self._submit_draft(work)

    def next_event(self) -> Event | None:
        """See `Backend` and the class docstring."""
        events, step, arrivals = self._events, self.env.step, self._arrivals
        while not events:
            if arrivals.head is None and not self._truths and not self._num_in_flight:
                return None
            try:
                step()
            except simpy.core.EmptySchedule:
                return None
        return events.popleft()

    def ready(self) -> bool:
        """Whether more happens in this very instant; see `Backend`."""
        events, env = self._events, self.env
        while not events and env.peek() <= env.now:
            env.step()
        return bool(events)

    def note_ended(self, request_id: RequestId) -> None:
        """Tell the world that the core ended a request by itself; harmless if it has ended already.

        The world sees most ends (stop, `max_tokens`, abort). It can't see a refusal or a model's context
        limit: without this call such a request counts as in the system for ever, which matters to
        `max_concurrency` and to the early end described above. Cheap enough to call for every output.
        """
        self._end(request_id)

    # --- works

    def _submit_draft(self, work: DraftWork) -> None:
        if not self._drafter_up:
            self._num_in_flight -= 1
            self._events.append(WorkFailed(work.work_id, "the drafter is down"))
            return
        job = _Job(work, priced(self._cost.draft_s(work), work), self._draft_ended)
        self._drafts[work.work_id] = job
        if self.host.busy and self.drafter is not self.host:
            self._through_host(job, 0.0)
        else:
            self._start_draft(job)

    def _through_host(self, job: _Job, duration_s: float) -> None:
        self.host.submit(_Job(job.work, duration_s, lambda _: self._to_device(job)))

    def _to_device(self, job: _Job) -> None:
        work = job.work
        if type(work) is VerifyWork:
            self._start_verify(job)
        elif work is not None and work.work_id in self._drafts:  # else the drafter was lost meanwhile
            self._start_draft(job)

    def _draft_done(self, job: _Job) -> None:
        work = job.work
        assert type(work) is DraftWork
        self._num_in_flight -= 1
        del self._drafts[work.work_id]
        if self._draft_fails is not None and next(self._draft_fails):
            self._events.append(WorkFailed(work.work_id, "injected draft failure"))
            return
        num_drafted = work.num_draft if self._num_drafted is None else self._num_drafted(work)
        probs = None
        if self._draft_probs:
            rates, truths = self._acceptance.conditional_rates, self._truths
            columns = zip(work.request_ids, num_drafted, strict=True)
            # Nobody asks for those of a request that has ended, and the model would keep what it draws for it.
            probs = tuple([rates(request_id, k) if k and request_id in truths else () for request_id, k in columns])
        self._events.append(work_done(work.work_id, draft_result(num_drafted, probs), job.started_s, job.ended_s))

    def _verify_done(self, job: _Job) -> None:
        work = job.work
        assert type(work) is VerifyWork
        self._num_in_flight -= 1
        if self._verify_fails is not None and next(self._verify_fails):
            self._events.append(WorkFailed(work.work_id, "injected verify failure"))
            return
        make = self._draft_result if any(work.num_draft) else self._plain_result
        result = make(work, job.num_arrived)
        self._events.append(work_done(work.work_id, result, job.started_s, job.ended_s))

    def _plain_result(self, work: VerifyWork, num_arrived: int) -> VerifyResult:
        """The result of a step without drafts; per entry only C loops, so that plain decoding simulates fast."""
        is_last = work.is_last
        num_entries = len(is_last)
        num_accepted = (0,) * num_entries
        num_committed = tuple(map(int, is_last)) if False in is_last else (1,) * num_entries
        ends_at = map(self._ends_at.get, work.request_ids, repeat(math.inf))
        ended = tuple(map(ge, map(add, work.num_computed, work.num_new), ends_at))
        if True not in ended:
            return verify_result(num_accepted, num_committed)
        reasons: list[FinishReason | None] = [None] * num_entries
        for i in compress(range(num_entries), ended):
            request_id = work.request_ids[i]
            if self._truths[request_id].arrival_index < num_arrived:
                reasons[i] = self._finish(request_id)
        return verify_result(num_accepted, num_committed, tuple(reasons) if any(reasons) else None)

    def _draft_result(self, work: VerifyWork, num_arrived: int) -> VerifyResult:
        """The result of a step with drafts."""
        num_accepted: list[int] = []
        num_committed: list[int] = []
        reasons: dict[int, FinishReason | None] = {}
        truths, draw = self._truths, self._acceptance.num_accepted
        # Not strict, since mypyc turns only this into a loop without iterators.
        for request_id, computed, new, k, is_last in zip(  # noqa: B905
            work.request_ids, work.num_computed, work.num_new, work.num_draft, work.is_last
        ):
            accepted, committed = 0, 1 if is_last else 0
            truth = truths.get(request_id)
            # The core ignores entries of somebody who was aborted while this ran. The id may be in use again.
            if is_last and truth is not None and truth.arrival_index < num_arrived:
                position = computed + new - truth.prompt_len
                left = truth.num_output - position
                if k:
                    accepted = draw(request_id, position, k)
                    committed = accepted + 1
                if committed >= left:
                    committed = left
                    reason = self._finish(request_id)
                    if reason is not None:
                        reasons[len(num_accepted)] = reason
            num_accepted.append(accepted)
            num_committed.append(committed)
        finish_reasons = None
        if reasons:
            finish_reasons = tuple([reasons.get(i) for i in range(len(num_accepted))])
        return verify_result(tuple(num_accepted), tuple(num_committed), finish_reasons)

    def _finish(self, request_id: RequestId) -> FinishReason | None:
        """End a request that has written all it will; the user's limit is left to the core to see."""
        stops = self._truths[request_id].stops
        self._end(request_id)
        return FinishReason.STOP if stops else None

    # --- the link

    def _connect(self, traffic: Traffic | None) -> None:
        """Choose which way works go and come back."""
        self._start_draft: _Step = self.drafter.submit
        self._draft_ended: _Step = self._draft_done
        self._start_verify: _Step = self.target.submit
        self._verify_ended: _Step = self._verify_done
        self.to_drafter: Lane | None = None
        self.to_target: Lane | None = None
        if traffic is None:
            return
        to_drafter = self.to_drafter = Lane(traffic.link)
        to_target = self.to_target = Lane(traffic.link)
        if traffic.at_drafter:
            self._start_verify = self._across(to_target, traffic.verify_work_bytes, self.target.submit)
            self._verify_ended = self._across(to_drafter, traffic.probs_bytes, self._verify_done)
            return
        self._start_draft = self._across(to_drafter, traffic.draft_work_bytes, self._if_wanted(self.drafter.submit))
        self._draft_ended = self._across(to_target, traffic.draft_bytes, self._if_wanted(self._draft_done))
        if traffic.state_size:
            self._verify_ended = self._then_send_states(to_drafter, traffic)

    def _across(self, lane: Lane, num_bytes: Callable[[Any], float], then: _Step) -> _Step:
        """A step that sends a job's message over a lane and goes on when it has arrived."""

        def send(job: _Job) -> None:
            delay_s = lane.send(self.env.now, num_bytes(job.work))
            self.env.timeout(delay_s).callbacks.append(lambda _: then(job))

        return send

    def _if_wanted(self, then: _Step) -> _Step:
        """A step for drafts, unless the drafter was lost while the message was on its way."""

        def go_on(job: _Job) -> None:
            if job.work is not None and job.work.work_id in self._drafts:
                then(job)

        return go_on

    def _then_send_states(self, lane: Lane, traffic: Traffic) -> _Step:
        """The end of a verification, and the hidden states: whatever is sent behind them arrives after them."""

        def end(job: _Job) -> None:
            self._verify_done(job)
            event = self._events[-1]
            if isinstance(event, WorkDone) and self._drafter_up:
                assert isinstance(job.work, VerifyWork)
                assert isinstance(event.result, VerifyResult)
                lane.send(self.env.now, traffic.states_bytes(job.work, event.result))

        return end

    # --- requests

    @property
    def num_present(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._truths)

    @property
    def has_events(self) -> bool:
        """Whether something happened that nobody has been told of."""
        return bool(self._events)

    @property
    def at_rest(self) -> bool:
        """Whether nobody is there and nothing is in flight or to be told."""
        return not (self._truths or self._num_in_flight or self._events)

    def serves(self, request_id: RequestId) -> bool:
        """Whether a request has arrived here and not ended."""
        return request_id in self._truths

    def enter(self, request: SimRequest, arrival_s: float | None = None) -> None:
        """Let a request arrive now.

        Args:
            request: it.
            arrival_s: what to report as its arrival, in seconds; None for what its workload says.

        Raises:
            WorkloadError: its id belongs to one that is still alive.
        """
        request_id = request.request_id
        if request_id in self._truths:
            raise WorkloadError(
                f"workload: the id of request {request_id!r} belongs to one that is still alive; give each its own id"
            )
        num_output = min(request.output_len, request.max_tokens)
        stops = request.output_len < request.max_tokens
        truth = self._truths[request_id] = _Truth(request.prompt_len, num_output, stops, self._num_arrived)
        self._ends_at[request_id] = request.prompt_len + num_output - 1
        self._num_arrived += 1
        self._events.append(RequestArrived(request.to_request(arrival_s)))
        if request.abort_after_s is not None and request.abort_after_s < math.inf:
            self.env.timeout(request.abort_after_s).callbacks.append(lambda _: self._abort(request_id, truth))

    def _abort(self, request_id: RequestId, truth: _Truth) -> None:
        if self._truths.get(request_id) is truth:  # else it has ended, and the id may be someone else's by now
            self._events.append(RequestAborted(request_id))
            self._end(request_id)

    def _end(self, request_id: RequestId) -> None:
        if self._truths.pop(request_id, None) is None:
            return
        del self._ends_at[request_id]
        self._acceptance.forget(request_id)
        self._arrivals.left()

    # --- faults

    def _install(self, faults: Faults) -> None:
        self._draft_fails = faults.coins("drafter") if faults.draft_failure_rate else None
        self._verify_fails = faults.coins("target") if faults.verify_failure_rate else None
        for outage in faults.outages:
            self._at(outage.at_s, self._lose_drafter)
            if outage.duration_s < math.inf:
                self._at(outage.at_s + outage.duration_s, self._regain_drafter)
        for pause in faults.pauses:
            device = self.target if pause.device == "target" else self.drafter
            self._at(pause.at_s, partial(device.occupy, pause.duration_s))

    def _at(self, time_s: float, action: Callable[[], object]) -> None:
        """Do something at a time, or now if that is past."""
        timeout = self.env.timeout(max(0.0, time_s - self.env.now))
        timeout.callbacks.append(lambda _: action())

    def _lose_drafter(self) -> None:
        self._drafter_up = False
        for job in self._drafts.values():
            self.drafter.cancel(job)
            self._num_in_flight -= 1
        self._drafts.clear()
        self._events.append(DrafterLost("injected outage"))

    def _regain_drafter(self) -> None:
        self._drafter_up = True
        self._events.append(DrafterReady())

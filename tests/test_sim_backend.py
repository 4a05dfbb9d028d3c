"""The world alone, driven by hand: devices, host time, arrivals, truth, faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import simpy

from minedraft.request import FinishReason
from minedraft.sim.acceptance import ConstantRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import ConstantCost
from minedraft.sim.faults import DevicePause, DrafterOutage, Faults
from minedraft.sim.steps import CostError
from minedraft.sim.workload import SimRequest
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftResult,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    VerifyResult,
    VerifyWork,
    WorkDone,
    WorkFailed,
)

COST = ConstantCost(verify_base_s=4.0, draft_base_s=3.0, prefill_s=1.0)
PROMPT = 10


def request(name: str, arrival_s: float = 0.0, output_len: int = 100, max_tokens: int = 200) -> SimRequest:
    return SimRequest(name, arrival_s, PROMPT, output_len, max_tokens)


def verify(work_id: int, done: dict[str, int], k: int = 0, last: Sequence[bool] | None = None) -> VerifyWork:
    """A verification of requests that have the given numbers of output tokens."""
    n = len(done)
    computed = tuple(PROMPT + count - 1 for count in done.values())
    is_last = (True,) * n if last is None else tuple(last)
    return VerifyWork(
        work_id, 0, tuple(done), (0,) * n, (0,) * n, computed, (1,) * n, (k,) * n, is_last, (0,) * 13, (n,), ()
    )


def draft(work_id: int, names: Sequence[str] = ("a",), k: int = 2) -> DraftWork:
    n = len(names)
    return DraftWork(work_id, 0, tuple(names), (0,) * n, (0,) * n, (9,) * n, (1,) * n, (k,) * n, ())


def world(workload: Sequence[SimRequest] = (request("a"),), alpha: float = 1.0, **options: object) -> SimBackend:
    """A world whose requests have all arrived."""
    backend = SimBackend(workload, COST, ConstantRate(alpha), **options)  # type: ignore[arg-type]
    for _ in workload:
        assert isinstance(backend.next_event(), RequestArrived)
    return backend


def drain(backend: SimBackend) -> list[Event]:
    return list(iter(backend.next_event, None))


def times(events: Sequence[Event]) -> dict[int, tuple[float, float]]:
    return {event.work_id: (event.started_s, event.ended_s) for event in events if isinstance(event, WorkDone)}


def result_of(backend: SimBackend, work: VerifyWork) -> VerifyResult:
    backend.submit(work)
    event = backend.next_event()
    assert isinstance(event, WorkDone)
    assert isinstance(event.result, VerifyResult)
    return event.result


class TestDevices:
    def test_the_groups_run_side_by_side_and_each_in_order(self) -> None:
        backend = world()
        for work in (verify(0, {"a": 1}), draft(1), verify(2, {"a": 2}), draft(3)):
            backend.submit(work)
        assert backend.now() == 0.0
        assert times(drain(backend)) == {1: (0.0, 3.0), 0: (0.0, 4.0), 3: (3.0, 6.0), 2: (4.0, 8.0)}

    def test_colocated_groups_share_one_device(self) -> None:
        backend = world(colocated=True)
        assert backend.drafter is backend.target
        backend.submit(draft(0))
        backend.submit(verify(1, {"a": 1}))
        assert times(drain(backend)) == {0: (0.0, 3.0), 1: (3.0, 7.0)}

    def test_a_process_can_occupy_a_device(self) -> None:
        env = simpy.Environment()
        released = []

        def pause() -> Iterator[simpy.Event]:
            yield env.timeout(1.0)
            yield backend.target.occupy(10.0)
            released.append(env.now)

        env.process(pause())
        backend = world(env=env)
        backend.submit(verify(0, {"a": 1}))
        first = backend.next_event()
        assert isinstance(first, WorkDone)
        assert backend.target.busy
        backend.submit(verify(1, {"a": 2}))
        # The pause queued behind the work that ran, the next work behind the pause.
        assert times([first, *drain(backend)]) == {0: (0.0, 4.0), 1: (14.0, 18.0)}
        assert released == [14.0]

    def test_a_process_without_end_does_not_keep_the_run_alive(self) -> None:
        env = simpy.Environment()

        def tick() -> Iterator[simpy.Event]:
            while True:
                yield env.timeout(0.5)

        env.process(tick())
        backend = world([request("a", output_len=1)], env=env)
        assert result_of(backend, verify(0, {"a": 0})).finish_reasons == (FinishReason.STOP,)
        assert backend.next_event() is None
        assert backend.now() == 4.0


class TestHost:
    def test_a_verify_work_holds_the_host_and_what_comes_behind(self) -> None:
        backend = world(round_overhead_s=0.5)
        backend.submit(verify(0, {"a": 1}))
        backend.submit(draft(1))
        assert times(drain(backend)) == {1: (0.5, 3.5), 0: (0.5, 4.5)}

    def test_a_draft_alone_costs_no_host_time(self) -> None:
        backend = world(round_overhead_s=0.5)
        backend.submit(draft(0))
        backend.submit(verify(1, {"a": 1}))
        assert times(drain(backend)) == {0: (0.0, 3.0), 1: (0.5, 4.5)}

    @pytest.mark.parametrize(("colocated", "period"), [(False, 4.0 + 0.5), (True, 4.0 + 3.0 + 0.5)])
    def test_round_period(self, colocated: bool, period: float) -> None:
        """Two batches that overlap take max(V, t) + o; one that drafts and then verifies V + t + o."""
        backend = world(round_overhead_s=0.5, colocated=colocated)
        starts = []
        for round_number in range(5):
            works = [verify(2 * round_number, {"a": 1}), draft(2 * round_number + 1)]
            for work in works if not colocated else works[::-1]:
                backend.submit(work)
                if colocated:
                    starts += [event.started_s for event in [backend.next_event()] if isinstance(event, WorkDone)]
            if not colocated:
                done = [backend.next_event(), backend.next_event()]
                starts += [e.started_s for e in done if isinstance(e, WorkDone) and e.work_id % 2 == 0]
        starts = starts[1::2] if colocated else starts
        assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx([period] * 4)


class TestTruth:
    def test_plain_decoding(self) -> None:
        backend = world([request("a"), request("b")])
        result = result_of(backend, verify(0, {"a": 0, "b": 5}, last=[True, False]))
        assert result == VerifyResult((0, 0), (1, 0), None)

    def test_accepted_plus_one(self) -> None:
        backend = world([request("a"), request("b")])
        assert result_of(backend, verify(0, {"a": 1, "b": 5}, k=3)) == VerifyResult((3, 3), (4, 4), None)
        backend = world(alpha=0.0)
        assert result_of(backend, verify(0, {"a": 1}, k=3)) == VerifyResult((0,), (1,), None)

    def test_stop_cuts_the_commit(self) -> None:
        backend = world([request("a", output_len=7), request("b")])
        result = result_of(backend, verify(0, {"a": 5, "b": 5}, k=3))
        assert result == VerifyResult((3, 3), (2, 4), (FinishReason.STOP, None))

    @pytest.mark.parametrize("k", [0, 2])
    def test_stop_at_the_last_token(self, k: int) -> None:
        backend = world([request("a", output_len=7), request("b")])
        result = result_of(backend, verify(0, {"b": 1, "a": 6 - k}, k=k))
        assert result == VerifyResult((k, k), (k + 1, k + 1), (None, FinishReason.STOP))

    @pytest.mark.parametrize("k", [0, 2])
    @pytest.mark.parametrize("output_len", [7, 50])
    def test_the_limit_is_left_to_the_core(self, output_len: int, k: int) -> None:
        backend = world([request("a", output_len=output_len, max_tokens=7)])
        assert result_of(backend, verify(0, {"a": 6 - k}, k=k)) == VerifyResult((k,), (k + 1,), None)
        assert backend.next_event() is None  # the world knows that it has ended

    def test_a_repeated_step_gives_the_same_result(self) -> None:
        backend = world(alpha=0.6)
        results = [result_of(backend, verify(i, {"a": 4}, k=8)) for i in range(3)]
        assert results[0] == results[1] == results[2]

    @pytest.mark.parametrize("k", [0, 2])
    def test_an_entry_of_somebody_who_left_is_harmless(self, k: int) -> None:
        backend = world([request("a"), request("b")])
        backend.note_ended("a")
        backend.note_ended("a")
        assert result_of(backend, verify(0, {"a": 3, "b": 3}, k=k)).num_committed == ((1, 1) if not k else (1, 3))

    def test_draft_probabilities(self) -> None:
        backend = world(alpha=0.25, draft_probs=True)
        backend.submit(draft(0, k=2))
        event = backend.next_event()
        assert isinstance(event, WorkDone)
        assert event.result == DraftResult((2,), ((0.25, 0.25),))
        backend = world()
        backend.submit(draft(0, k=2))
        event = backend.next_event()
        assert isinstance(event, WorkDone)
        assert event.result == DraftResult((2,), None)


class TestArrivals:
    def test_arrivals_are_on_time_whatever_the_rounding(self) -> None:
        planned = [0.1 * i + 1e-9 * i * i for i in range(2000)]
        backend = SimBackend((request(f"r{i}", at) for i, at in enumerate(planned)), COST, ConstantRate(0.5))
        for at in planned:
            event = backend.next_event()
            assert isinstance(event, RequestArrived)
            assert event.request.arrival_s == at
            assert at <= backend.now() <= at + 1e-12

    def test_the_workload_is_pulled_one_ahead(self) -> None:
        pulled = 0

        def endless() -> Iterator[SimRequest]:
            nonlocal pulled
            for pulled in itertools.count(1):
                yield request(f"r{pulled}", float(pulled))

        backend = SimBackend(endless(), COST, ConstantRate(0.5))
        for count in range(1, 50):
            backend.next_event()
            assert pulled == count + 1

    def test_closed_loop_keeps_exactly_c_in_flight(self) -> None:
        backend = SimBackend(
            (request(f"r{i}", output_len=1 + i % 3) for i in range(30)), COST, ConstantRate(0.5), max_concurrency=4
        )
        alive: dict[str, int] = {}
        ended = 0
        for work_id in itertools.count():
            while len(alive) < min(4, 30 - ended):
                event = backend.next_event()
                assert isinstance(event, RequestArrived)
                assert event.request.arrival_s == backend.now()
                alive[event.request.request_id] = 0
            if not alive:
                break
            result = result_of(backend, verify(work_id, alive))
            reasons = result.finish_reasons or (None,) * len(alive)
            for name, reason in zip(list(alive), reasons, strict=True):
                alive[name] += 1
                if reason is not None:
                    del alive[name]
                    ended += 1
        assert ended == 30
        assert backend.next_event() is None

    def test_concurrency_holds_back_an_open_load(self) -> None:
        workload = [request("a", 0.0, output_len=1), request("b", 1.0), request("c", 9.0)]
        backend = SimBackend(workload, COST, ConstantRate(0.5), max_concurrency=1)
        backend.next_event()
        result_of(backend, verify(0, {"a": 0}))  # until 4.0
        event = backend.next_event()
        assert isinstance(event, RequestArrived)
        assert event.request.arrival_s == backend.now() == 4.0
        backend.note_ended("b")
        event = backend.next_event()
        assert isinstance(event, RequestArrived)
        assert event.request.arrival_s == backend.now() == 9.0

    def test_aborts_reach_only_those_who_are_still_there(self) -> None:
        workload = [
            SimRequest("a", 0.0, PROMPT, 1, 9, abort_after_s=5.0),
            SimRequest("b", 0.0, PROMPT, 8, 9, abort_after_s=6.0),
            SimRequest("a", 4.5, PROMPT, 8, 9),  # an id that is used again
            SimRequest("z", 30.0, PROMPT, 8, 9),
        ]
        backend = SimBackend(workload, COST, ConstantRate(0.5))
        backend.next_event()
        backend.next_event()
        result_of(backend, verify(0, {"a": 0, "b": 0}))
        assert isinstance(backend.next_event(), RequestArrived)
        assert backend.next_event() == RequestAborted("b")
        assert backend.now() == 6.0
        assert isinstance(backend.next_event(), RequestArrived)
        assert backend.now() == 30.0

    @pytest.mark.parametrize("k", [0, 3])
    def test_a_late_entry_does_not_touch_who_uses_the_id_now(self, k: int) -> None:
        workload = [SimRequest("a", 0.0, PROMPT, 50, 99, abort_after_s=1.0), request("a", 2.0, output_len=5)]
        backend = SimBackend(workload, COST, ConstantRate(1.0))
        backend.next_event()
        backend.submit(verify(0, {"a": 20}, k=k))
        kinds = [type(backend.next_event()) for _ in range(3)]
        assert kinds == [RequestAborted, RequestArrived, WorkDone]
        assert result_of(backend, verify(1, {"a": 4})).finish_reasons == (FinishReason.STOP,)

    @pytest.mark.parametrize(
        ("workload", "message"),
        [
            ([request("a", 1.0), request("b", 0.5)], "'b' arrives at 0.5 s, before its predecessor at 1.0 s"),
            ([request("a"), request("a")], "'a' belongs to one that is still alive"),
        ],
    )
    def test_bad_workloads_are_refused(self, workload: list[SimRequest], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            drain(SimBackend(workload, COST, ConstantRate(0.5)))


class TestFaults:
    def test_an_outage_swallows_the_draft_in_flight(self) -> None:
        backend = world(faults=Faults(outages=(DrafterOutage(1.0, 5.0),)))
        backend.submit(draft(0))
        assert isinstance(backend.next_event(), DrafterLost)
        assert backend.now() == 1.0
        assert not backend.drafter.busy
        backend.submit(draft(1))  # the core should have known better
        assert backend.next_event() == WorkFailed(1, "the drafter is down")
        assert isinstance(backend.next_event(), DrafterReady)
        assert backend.now() == 6.0
        backend.submit(draft(2))
        assert times(drain(backend)) == {2: (6.0, 9.0)}

    def test_a_loss_on_a_shared_device_lets_the_next_work_start(self) -> None:
        backend = world(colocated=True, faults=Faults(outages=(DrafterOutage(1.0),)))
        backend.submit(draft(0))
        backend.submit(verify(1, {"a": 1}))
        assert times(drain(backend)) == {1: (1.0, 5.0)}

    def test_a_loss_removes_drafts_that_wait_for_the_host_or_the_device(self) -> None:
        backend = world(round_overhead_s=2.0, faults=Faults(outages=(DrafterOutage(1.0),)))
        backend.submit(draft(0))
        backend.submit(verify(1, {"a": 1}))
        backend.submit(draft(2))  # waits for the host
        assert times(drain(backend)) == {1: (2.0, 6.0)}
        backend = world(faults=Faults(outages=(DrafterOutage(1.0),)))
        backend.submit(draft(0))
        backend.submit(draft(1))  # waits for the device
        assert times(drain(backend)) == {}

    def test_failing_works_take_their_time_and_leave_no_trace(self) -> None:
        backend = world([request("a", output_len=1)], faults=Faults(draft_failure_rate=1.0, verify_failure_rate=1.0))
        backend.submit(draft(0))
        backend.submit(verify(1, {"a": 0}))
        assert drain(backend) == [
            WorkFailed(0, "injected draft failure"),
            WorkFailed(1, "injected verify failure"),
        ]
        assert backend.now() == 4.0

    def test_pauses(self) -> None:
        pauses = (DevicePause("target", 1.0, 10.0), DevicePause("drafter", 0.0, 2.0))
        backend = world(faults=Faults(pauses=pauses))
        backend.submit(verify(0, {"a": 1}))
        backend.submit(verify(1, {"a": 1}))
        backend.submit(draft(2))
        assert times(drain(backend)) == {0: (0.0, 4.0), 2: (2.0, 5.0), 1: (4.0, 8.0)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: world(round_overhead_s=-1.0), "round_overhead_s is -1.0"),
        (lambda: world(round_overhead_s=float("nan")), "round_overhead_s is nan"),
        (lambda: world(max_concurrency=0), "max_concurrency is 0"),
    ],
)
def test_refusals_name_the_argument(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("work", [verify(0, {"a": 1}), draft(1)])
def test_times_that_are_none_are_the_cost_models_fault(seconds: float, work: VerifyWork | DraftWork) -> None:
    class WrongCost:
        def verify_s(self, work: VerifyWork) -> float:
            return seconds

        def draft_s(self, work: DraftWork) -> float:
            return seconds

    backend = SimBackend([request("a")], WrongCost(), ConstantRate(1.0))
    backend.next_event()
    with pytest.raises(CostError, match=r"Work of 1 requests takes .* s, must be from 0 to 1e\+06"):
        backend.submit(work)

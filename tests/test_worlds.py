"""One contract, every world: what `minedraft.backend` promises holds for the simulator, a replay, threads and torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from thread_world import ThreadBackend
from toy_world import ToyDevices, ToyModel

from minedraft import Engine, FinishReason, Request, RequestOutput, Scheduler, SchedulerConfig, load_policies
from minedraft.backend import Backend
from minedraft.codec import Record
from minedraft.journal import JournalHeader, JournalWriter, Recorder, read_journal
from minedraft.replay import ReplayBackend, replay
from minedraft.sim.acceptance import ConstantRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import ConstantCost
from minedraft.sim.workload import SimRequest
from minedraft.work import DraftWork, Event, RequestArrived, Work, WorkDone

NUM_REQUESTS = 8
MAX_TOKENS = 12


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(max_batch_size=3, num_speculative_tokens=3, max_model_len=64, block_size=4)
    return Scheduler(config, load_policies({"mode": "fixed,mode=psd"}))


def shapes() -> list[tuple[str, int]]:
    return [(f"r{i}", 3 + i) for i in range(NUM_REQUESTS)]


class Watch:
    """A backend around a backend that checks the contract at every call."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.in_flight: dict[int, Work] = {}
        self.arrived: list[str] = []
        self.last_s = inner.now()
        self.promised = False

    def now(self) -> float:
        now_s = self.inner.now()
        assert now_s >= self.last_s, "time went back"
        self.last_s = now_s
        return now_s

    def submit(self, work: Work) -> None:
        assert work.work_id not in self.in_flight
        assert all(type(other) is not type(work) for other in self.in_flight.values()), "two works in one group"
        self.in_flight[work.work_id] = work
        self.inner.submit(work)

    def next_event(self) -> Event | None:
        event = self.inner.next_event()
        assert event is not None or not self.promised, "ready, but nothing came"
        self.promised = False
        if event is None:
            assert not self.in_flight, "works never came back"
        elif isinstance(event, RequestArrived):
            assert event.request.request_id not in self.arrived, "arrived twice"
            assert event.request.arrival_s <= self.inner.now() + 1e-9
            self.arrived.append(event.request.request_id)
        elif isinstance(event, WorkDone):
            work = self.in_flight.pop(event.work_id)
            result = event.result
            assert event.started_s <= event.ended_s <= self.inner.now() + 1e-6
            assert all(len(column) == len(work.request_ids) for column in result[:1])
            assert hasattr(result, "num_drafted") == isinstance(work, DraftWork)
        return event

    def ready(self) -> bool:
        self.promised = self.inner.ready()
        return self.promised


@contextmanager
def simulated(tmp_path: Path) -> Iterator[Backend]:
    requests = [SimRequest(name, 0.01 * i, n, MAX_TOKENS, MAX_TOKENS) for i, (name, n) in enumerate(shapes())]
    cost = ConstantCost(verify_base_s=0.02, draft_base_s=0.02, prefill_s=0.03)
    yield SimBackend(requests, cost, ConstantRate(0.6))


@contextmanager
def threads(tmp_path: Path) -> Iterator[Backend]:
    requests = [Request(name, n, MAX_TOKENS) for name, n in shapes()]
    backend = ThreadBackend(requests, ToyDevices(ToyModel(use_eos=False), 64))
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def replayed(tmp_path: Path) -> Iterator[Backend]:
    path = tmp_path / "source.jsonl"
    with threads(tmp_path) as source, Recorder(source, JournalWriter(path, JournalHeader("test"))) as recorder:
        Engine(make_scheduler(), recorder).run()
    journal = read_journal(path)
    records: list[Record] = list(journal)
    yield ReplayBackend(records, journal.start_s)


@contextmanager
def torch_processes(tmp_path: Path) -> Iterator[Backend]:
    """Real models in real processes, pinned to a core each."""
    from minedraft.backends.torch.backend import TorchBackend
    from minedraft.backends.torch.request import TorchRequest
    from minedraft.backends.torch.surgery import make_noisy_copy, make_tiny_llama

    make_tiny_llama(tmp_path / "target", seed=1, vocab_size=64)
    make_noisy_copy(tmp_path / "target", tmp_path / "draft", 0.05)
    requests = [
        TorchRequest(name, tuple(3 + (5 * i + 7 * j) % 60 for j in range(n)), MAX_TOKENS, ignore_eos=True)
        for i, (name, n) in enumerate(shapes())
    ]
    cores = sorted(os.sched_getaffinity(0))
    devices = {"target_device": f"cpu:{cores[0]}", "draft_device": f"cpu:{cores[-1]}"}
    with TorchBackend(tmp_path / "target", tmp_path / "draft", requests, **devices) as backend:
        yield backend


WORLDS: dict[str, Callable[[Path], AbstractContextManager[Backend]]] = {
    "simulated": simulated,
    "threads": threads,
    "replayed": replayed,
    "torch": torch_processes,
}


def check(outputs: list[RequestOutput]) -> None:
    assert sorted(output.request_id for output in outputs) == [f"r{i}" for i in range(NUM_REQUESTS)]
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    assert all(output.num_output_tokens == MAX_TOKENS for output in outputs)


TORCH = pytest.param("torch", marks=pytest.mark.slow)


@pytest.mark.parametrize("world", ["simulated", "threads", "replayed", TORCH])
def test_the_contract(world: str, tmp_path: Path) -> None:
    with WORLDS[world](tmp_path) as backend:
        watch = Watch(backend)
        scheduler = make_scheduler()
        check(Engine(scheduler, watch).run())
        assert len(watch.arrived) == NUM_REQUESTS
        assert watch.next_event() is None  # and stays so
        assert not scheduler.num_unfinished
        assert not scheduler.num_in_flight


@pytest.mark.parametrize("world", ["simulated", "threads", TORCH])
def test_e7_a_recorded_run_replays_to_the_same_decisions(world: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with WORLDS[world](tmp_path) as backend, Recorder(backend, JournalWriter(path, JournalHeader("t"))) as recorder:
        check(Engine(make_scheduler(), recorder).run())
    report = replay(read_journal(path), make_scheduler())
    assert report.first_difference is None
    assert report.num_decisions > 10


def test_what_happens_at_one_moment_is_told_before_the_core_decides() -> None:
    """All requests of an offline batch are known before the first step is planned."""
    requests = [SimRequest(name, 0.0, n, MAX_TOKENS, MAX_TOKENS) for name, n in shapes()]
    watch = Watch(SimBackend(requests, ConstantCost(verify_base_s=0.02, prefill_s=0.03), ConstantRate(0.6)))
    engine = Engine(make_scheduler(), watch)
    while not watch.in_flight:
        engine.step()
        for work in engine.scheduler.schedule(watch.now()):
            watch.submit(work)
    assert len(watch.arrived) == NUM_REQUESTS
    assert len(next(iter(watch.in_flight.values())).request_ids) == 3

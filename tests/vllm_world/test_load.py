"""Loads far beyond the running limit: finishes and refills at every phase, and a drafter that fails again and again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import Engine, Job, make_load, minedraft_options, plain_ids, renamed, watch_chunks

NUM_REQUESTS = 300
NUM_ROWS = 16
LIMITS = {"max_num_seqs": NUM_ROWS, "num_gpu_blocks_override": 73}
EOS = 2


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return [job._replace(ignore_eos=False) for job in make_load(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(models: Path, jobs: list[Job]) -> dict[str, list[int]]:
    """Stock vLLM's texts."""
    with Engine(models / "target", **LIMITS) as engine:
        return engine.run(jobs)


@pytest.fixture(scope="module")
def engine(models: Path, expected: dict[str, list[int]]) -> Iterator[Engine]:
    assert expected  # made before: two engines in one process share vLLM's globals
    drafter = {"restart_backoff_s": 0.01, "max_restarts": 1000, "deadline_s": 0.5, "hang_timeout_s": 60.0}
    options = minedraft_options(models / "noisy", mode="psd", drafter=drafter)
    with Engine(models / "target", **LIMITS, **options) as engine:
        yield engine


class Watch:
    """Looks at the core and at vLLM before each step, and asserts what must hold there.

    Attributes:
        longest_gap: steps in a row in which some request was ready to be verified and was not.
        most_uneven: largest difference in size of the sub-batches while requests waited.
        num_mixed: steps that carried prompt chunks and drafts.
        joined: for each request that joined a sub-batch, how many more requests that one had than the smallest.
    """

    def __init__(self, engine: Engine) -> None:
        self.longest_gap = self.most_uneven = self.num_mixed = 0
        self.joined: list[int] = []
        self._engine = engine
        self._gaps: dict[str, int] = {}
        self._schedule = engine.scheduler.schedule
        self._manager = engine.conductor.core.state.batches
        self._assign = self._manager.assign
        self._num_finished = 0
        engine.scheduler.schedule = self._watched_schedule
        self._manager.assign = self._watched_assign

    def stop(self) -> None:
        del self._engine.scheduler.schedule
        del self._manager.assign

    def look(self, _: int) -> None:
        self._engine.check_blocks()
        state = self._engine.conductor.core.state
        sizes = state.batches.sizes()
        uneven = max(sizes) - min(sizes)
        if state.waiting.num_live:
            # Whoever ended in the last step left a hole at most; what was there before has been filled.
            assert uneven <= 1 + state.num_finished - self._num_finished, sizes
            self.most_uneven = max(self.most_uneven, uneven)
        self._num_finished = state.num_finished

    def _watched_assign(self, seq: Any, index: int) -> None:
        sizes = self._manager.sizes()
        self.joined.append(sizes[index] - min(sizes))
        self._assign(seq, index)

    def _watched_schedule(self, *args: Any, **options: Any) -> Any:
        ready = [
            request.request_id
            for request in self._engine.scheduler.running
            if request.num_computed_tokens >= request.num_prompt_tokens
        ]
        output = self._schedule(*args, **options)
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return output
        self._gaps = {name: self._gaps.get(name, 0) + 1 for name in ready if name not in scheduled}
        self.longest_gap = max(self.longest_gap, *self._gaps.values(), 0)
        drafted = output.scheduled_spec_decode_tokens
        chunks = [name for name, count in scheduled.items() if name not in drafted and count > 1]
        self.num_mixed += bool(drafted and chunks)
        return output


def test_many_requests_through_few_rows(engine: Engine, jobs: list[Job], expected: dict[str, list[int]]) -> None:
    watch = Watch(engine)
    chunks = watch_chunks(engine)
    try:
        texts = engine.run(renamed(jobs, "a"), per_step=3, on_step=watch.look)
    finally:
        watch.stop()
    assert plain_ids(texts, "a") == expected
    engine.check_rest()
    assert engine.conductor.counters.strays == 0
    state = engine.conductor.core.state
    assert 0.2 < state.num_accepted_tokens / state.num_draft_tokens < 0.95
    assert watch.num_mixed > 20
    assert watch.longest_gap <= 3
    assert len(watch.joined) >= NUM_REQUESTS
    assert max(watch.joined) == 0, "a request joined a sub-batch that wasn't the smallest"
    # The load is what it claims to be.
    ended = [name for name, text in texts.items() if text[-1] == EOS and chunks[name][-1] > 1]
    assert len(ended) > 4, "no EOS within a block of accepted drafts"
    assert sum(len(text) == 1 for text in texts.values()) > 5
    tails = [name for name, parts in chunks.items() if len(parts) > 1 and parts[-1] == 1]
    assert len(tails) > 20, "no request whose last verification yields one token"


def test_drafter_fails_at_random(engine: Engine, jobs: list[Job], expected: dict[str, list[int]]) -> None:
    """Killed or stopped at random steps, going on or started anew meanwhile: every request gets its whole text."""
    chosen = jobs[:200]
    faults = Faults(engine, random.Random(1))
    try:
        texts = engine.run(renamed(chosen, "b"), per_step=2, on_step=faults.strike)
    finally:
        faults.let_go()
    assert plain_ids(texts, "b") == {job.request_id: expected[job.request_id] for job in chosen}
    engine.check_rest()
    assert engine.conductor.counters.strays == 0
    assert faults.num_kills >= 2
    assert faults.num_stops >= 2
    engine.await_drafts()
    lost = engine.conductor.counters.drafters_lost
    again = renamed(chosen[:40], "c")
    texts = plain_ids(engine.run(again), "c")
    assert texts == {job.request_id: expected[job.request_id] for job in chosen[:40]}
    assert engine.conductor.counters.drafters_lost == lost
    engine.check_rest()


def test_drafter_dies_while_nobody_runs(engine: Engine, jobs: list[Job], expected: dict[str, list[int]]) -> None:
    """The core thinks that the drafter is up when the next requests come."""
    engine.await_drafts()
    os.kill(engine.conductor.drafter_pid, signal.SIGKILL)
    texts = plain_ids(engine.run(renamed(jobs[:40], "d")), "d")
    assert texts == {job.request_id: expected[job.request_id] for job in jobs[:40]}
    engine.await_drafts()
    engine.check_rest()


class Faults:
    """Kills or stops the drafter some random number of steps after it has come (back), lets it go on some steps later.

    Once some steps have gone without it, those that follow are slowed down: it is back long before the load has ended.
    """

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.num_kills = self.num_stops = 0
        self._engine = engine
        self._rng = rng
        self._wait = rng.randint(5, 15)
        self._num_away = 0
        self._stopped: int | None = None

    def strike(self, step: int) -> None:
        if step % 5 == 0:
            self._engine.check_blocks()
        if self._wait:
            pid = self._engine.conductor.drafter_pid
            if self._stopped is None and (not self._engine.conductor.core.state.drafter_up or pid is None):
                self._num_away += 1
                if self._num_away > 10:
                    time.sleep(1.0)
            else:
                self._num_away = 0
                self._wait -= 1
            return
        if self._stopped is not None:
            self.let_go()
        else:
            self._hit()
        self._wait = self._rng.randint(3, 12)

    def _hit(self) -> None:
        pid = self._engine.conductor.drafter_pid
        if pid is None:
            return
        if self.num_stops > self.num_kills or (self._rng.random() < 0.3 and self.num_stops):
            self.num_kills += 1
            os.kill(pid, signal.SIGKILL)
        else:
            self.num_stops += 1
            self._stopped = pid
            os.kill(pid, signal.SIGSTOP)

    def let_go(self) -> None:
        if self._stopped is not None and self._engine.conductor.drafter_pid == self._stopped:
            os.kill(self._stopped, signal.SIGCONT)
        self._stopped = None

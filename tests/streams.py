"""Streams for tests: a toy world that does everything the contract of the seam allows, and Hypothesis strategies."""

from __future__ import annotations

import heapq
import random

from hypothesis import strategies as st

from minedraft import Scheduler, SchedulerConfig, load_policies
from minedraft.codec import Asked, Record
from minedraft.engine import Engine
from minedraft.journal import Recorder
from minedraft.request import FinishReason, Request
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftResult,
    DraftWork,
    RequestAborted,
    RequestArrived,
    RequestDisplaced,
    VerifyResult,
    VerifyWork,
    WorkDone,
    WorkFailed,
)


class ToyWorld:
    """Random durations and acceptance; with `faults`, also aborts, failed works and drafter losses."""

    def __init__(self, seed, num_requests=12, faults=True, max_prompt=60, max_tokens=30):
        self.rng = rng = random.Random(seed)
        self.faults = faults
        self.now_s = 0.0
        self.heap = []
        self.count = 0
        self.busy_until_s = {VerifyWork: 0.0, DraftWork: 0.0}
        self.drafts_in_flight = {}
        self.drafter_up = False
        self.push(rng.choice([0.0, 0.05]), DrafterReady())
        time_s = 0.0
        for i in range(num_requests):
            time_s += rng.choice([0.0, rng.expovariate(20.0)])
            request = Request(
                f"r{i}",
                rng.randint(1, max_prompt),
                rng.randint(1, max_tokens),
                arrival_s=time_s - rng.choice([0.0, 0.001]) if time_s > 0.001 else time_s,
                max_draft_tokens=rng.choice([None, None, None, 0, 2]),
            )
            self.push(time_s, RequestArrived(request))
            if faults and rng.random() < 0.2:
                self.push(time_s + rng.expovariate(5.0), RequestAborted(request.request_id))
        if faults:
            for _ in range(rng.randint(0, 2)):
                lost_s = rng.uniform(0.0, 1.0)
                self.push(lost_s, DrafterLost("gone"))
                self.push(lost_s + rng.uniform(0.0, 0.5), DrafterReady())

    def push(self, time_s, event):
        self.count += 1
        heapq.heappush(self.heap, (time_s, self.count, event))

    def now(self):
        return self.now_s

    def submit(self, work):
        rng = self.rng
        kind = type(work)
        start_s = max(self.now_s, self.busy_until_s[kind]) + rng.choice([0.0, 0.001])
        end_s = start_s + rng.choice([0.0, rng.uniform(0.001, 0.03)])
        self.busy_until_s[kind] = end_s
        if kind is DraftWork:
            self.drafts_in_flight[work.work_id] = None
        if self.faults and rng.random() < 0.04:
            self.push(end_s, WorkFailed(work.work_id, "bad luck"))
            return
        result = self.verify(work) if kind is VerifyWork else self.draft(work)
        self.push(end_s + rng.choice([0.0, 0.002]), WorkDone(work.work_id, result, start_s, end_s))

    def draft(self, work):
        drafted = tuple(k if self.rng.random() < 0.9 else self.rng.randint(0, k) for k in work.num_draft)
        return DraftResult(drafted, tuple((0.5,) * n for n in drafted))

    def verify(self, work):
        accepted, committed, reasons = [], [], []
        for k, last in zip(work.num_draft, work.is_last, strict=True):
            accepted.append(self.rng.randint(0, k))
            committed.append(accepted[-1] + 1 if last else 0)
            reasons.append(None)
            if last and self.rng.random() < 0.03:
                committed[-1] = self.rng.randint(1, committed[-1])
                reasons[-1] = FinishReason.STOP
        ends = tuple(reasons) if any(reasons) or self.rng.random() < 0.1 else None
        return VerifyResult(tuple(accepted), tuple(committed), ends)

    def ready(self):
        if not self.heap or isinstance(self.heap[0][2], DrafterLost | DrafterReady):
            return False
        return self.heap[0][0] <= self.now_s

    def next_event(self):
        while self.heap:
            time_s, _, event = heapq.heappop(self.heap)
            if isinstance(event, DrafterReady) and self.drafter_up:
                continue
            if isinstance(event, DrafterLost) and not self.drafter_up:
                continue
            self.now_s = time_s
            if isinstance(event, DrafterReady):
                self.drafter_up = True
            elif isinstance(event, DrafterLost):
                self.drafter_up = False
                self.busy_until_s[DraftWork] = time_s
                self.drafts_in_flight.clear()  # late results may still come, and are ignored
            return event
        return None


class Tape:
    """A sink that keeps everything."""

    def __init__(self):
        self.start_s = None
        self.records = []
        self.num_closed = 0

    def on_start(self, now_s):
        self.start_s = now_s

    def on_asked(self, now_s):
        self.records.append(Record(now_s, Asked()))

    def on_submit(self, now_s, work):
        self.records.append(Record(now_s, work))

    def on_event(self, now_s, event):
        self.records.append(Record(now_s, event))

    def close(self):
        self.num_closed += 1


def small_config(**changes):
    """Tight pools, so that preemption happens."""
    values = {
        "num_batches": 2,
        "max_batch_size": 4,
        "num_speculative_tokens": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 96,
        "block_size": 4,
        "num_target_blocks": 40,
        "num_draft_blocks": 40,
    }
    return SchedulerConfig(**{**values, **changes})


def make_scheduler(mode="psd", **changes):
    return Scheduler(small_config(**changes), load_policies({"mode": f"fixed,mode={mode}"}))


def run(world, *sinks, mode="psd", **changes):
    """Run a toy world to its end; returns what the engine returned, per turn."""
    with Recorder(world, *sinks) as recorder:
        engine = Engine(make_scheduler(mode, **changes), recorder)
        turns = []
        while (outputs := engine.step()) is not None:
            turns.append(outputs)
            for sink in sinks:
                if outputs and hasattr(sink, "on_outputs"):
                    sink.on_outputs(outputs)
    return turns


# ------------------------------------------------------------------ strategies

ids = st.text(max_size=6)
times = st.floats(allow_nan=False)
ints = st.integers(min_value=0, max_value=1 << 40)
reasons = st.sampled_from(list(FinishReason))


def columns(*elements):
    """Tuples of one length, one per element strategy."""
    return st.lists(st.tuples(*elements), max_size=5).map(
        lambda rows: tuple(zip(*rows, strict=True)) if rows else ((),) * len(elements)
    )


def freed():
    return st.lists(st.tuples(ids, ints), max_size=3).map(tuple)


draft_works = st.builds(
    lambda work_id, batch, cols, gone: DraftWork(work_id, batch, *cols, gone),
    ints,
    ints,
    columns(ids, ints, ints, ints, ints, ints),
    freed(),
)
verify_works = st.builds(
    lambda work_id, batch, cols, zero, sizes, gone: VerifyWork(work_id, batch, *cols, zero, sizes, gone),
    ints,
    ints,
    columns(ids, ints, ints, ints, ints, ints, st.booleans()),
    st.lists(ints, max_size=13).map(tuple),
    st.lists(ints, max_size=3).map(tuple),
    freed(),
)
draft_results = st.builds(
    DraftResult,
    st.lists(ints, max_size=4).map(tuple),
    st.none() | st.lists(st.lists(times, max_size=3).map(tuple), max_size=4).map(tuple),
)
verify_results = st.builds(
    VerifyResult,
    st.lists(ints, max_size=4).map(tuple),
    st.lists(ints, max_size=4).map(tuple),
    st.none() | st.lists(st.none() | reasons, max_size=4).map(tuple),
)
requests = st.builds(
    Request,
    ids,
    st.integers(1, 1 << 30),
    st.integers(1, 1 << 30),
    times,
    st.integers(-5, 5),
    st.none() | st.integers(0, 9),
)
events = st.one_of(
    st.builds(RequestArrived, requests),
    st.builds(RequestAborted, ids),
    st.builds(RequestDisplaced, ids, ints),
    st.builds(WorkDone, ints, draft_results | verify_results, times, times),
    st.builds(WorkFailed, ints, st.text(max_size=20)),
    st.builds(DrafterLost, st.text(max_size=20)),
    st.just(DrafterReady()),
)
items = st.one_of(draft_works, verify_works, events)

"""Cost of `schedule` + `update` per scheduled request, and as a ratio to a plain loop over slotted objects.

Run: python tests/benchmarks/bench_core.py [--compiled]

With --compiled every figure is taken of both builds in turn (see `minedraft compile`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from minedraft import Request, Scheduler, SchedulerConfig, load_policies
from minedraft.work import DraftResult, DraftWork, RequestArrived, VerifyResult, WorkDone

NUM_RUNNING = 256
NUM_ROUNDS = 200


class Slotted:
    __slots__ = ("a", "b", "c", "d")

    def __init__(self) -> None:
        self.a = self.b = self.c = self.d = 0


def plain_loop() -> float:
    """Seconds per object of a loop that touches four attributes of as many objects."""
    objects = [Slotted() for _ in range(NUM_RUNNING)]
    start = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        for item in objects:
            item.a += 1
            item.b += item.a
            item.c = item.b
            item.d += 1
    return (time.perf_counter() - start) / (NUM_ROUNDS * NUM_RUNNING)


def make(mode: str) -> Scheduler:
    num_batches = 2 if mode == "psd" else 1
    config = SchedulerConfig(
        num_batches=num_batches,
        max_batch_size=NUM_RUNNING // num_batches,
        num_speculative_tokens=4,
        max_model_len=16384,
        num_draft_blocks=0 if mode == "ar" else 65536,
    )
    scheduler = Scheduler(config, load_policies({"mode": f"fixed,mode={mode}"}))
    for i in range(NUM_RUNNING):
        scheduler.update(RequestArrived(Request(str(i), 64, 8192)), 0.0)
    return scheduler


def run(mode: str) -> tuple[float, int]:
    """Seconds per (request, verification) and how many of those."""
    scheduler = make(mode)
    clock = time.perf_counter
    spent = 0.0
    entries = 0
    queue: list[object] = []
    warm_up = 10
    for step in range(NUM_ROUNDS + warm_up):
        start = clock()
        works = scheduler.schedule(0.0)
        if step >= warm_up:
            spent += clock() - start
        queue.extend(works)
        work = queue.pop(0)
        if isinstance(work, DraftWork):
            event = WorkDone(work.work_id, DraftResult(work.num_draft), 0.0, 0.0)
        else:
            accepted = tuple([min(2, k) for k in work.num_draft])
            committed = tuple([a + 1 if last else 0 for a, last in zip(accepted, work.is_last, strict=True)])
            event = WorkDone(work.work_id, VerifyResult(accepted, committed), 0.0, 0.0)
            if step >= warm_up:
                entries += len(work.request_ids)
        start = clock()
        scheduler.update(event, 0.0)
        if step >= warm_up:
            spent += clock() - start
    return spent / entries, entries


def best(function: Callable[[], float]) -> float:
    return min(function() for _ in range(5))


MODES = ("ar", "sd", "psd")


def one_process() -> dict[str, float]:
    """Seconds per object of the plain loop and per request of every mode, the best of a few each."""
    costs = {"loop": best(plain_loop)}
    for mode in MODES:
        costs[mode] = best(lambda mode=mode: run(mode)[0])
    return costs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true", help="measure a compiled build as well")
    parser.add_argument("--best-of", type=int, default=3, help="processes per build, in turn")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_process()))
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from compiled_copy import builds

    costs: dict[str, dict[str, float]] = {}
    with builds(options.compiled) as environments:
        for build in list(environments) * options.best_of:
            command = [sys.executable, __file__, "--one"]
            done = subprocess.run(command, env=environments[build], capture_output=True, text=True, check=True)
            got = json.loads(done.stdout)
            costs[build] = {name: min(cost, costs.get(build, got)[name]) for name, cost in got.items()}
    loop = min(got["loop"] for got in costs.values())
    print(f"plain loop, 4 attributes of {NUM_RUNNING} slotted objects: {loop * 1e6:.3f} us per object")
    for mode in MODES:
        for build, got in costs.items():
            gain = "" if build == "plain" else f", {costs['plain'][mode] / got[mode]:.1f} x as fast as plain"
            print(
                f"{mode:>4} {build:>8}: {got[mode] * 1e6:.3f} us per scheduled request, "
                f"{got[mode] / loop:.1f} x the plain loop{gain}"
            )


if __name__ == "__main__":
    main()

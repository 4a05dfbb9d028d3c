"""Speed and memory of simulated serving: 512 prompt + 20 output tokens, Poisson 20 req/s, metrics on.

Run: python tests/benchmarks/bench_simulate.py [--requests 10000 100000] [--mode ar psd] [--compiled]

Every case runs in a process of its own, so that its peak memory is its own; it is the same for 1000000 requests as for
100000 (`--requests 100000 300000 1000000 --mode ar --best-of 1`). The number of steps per request, which is
what a step-by-step simulator pays for, follows from the step time: three targets are shown. With --compiled every
figure is taken of both builds in turn (see `minedraft compile`). Drafts are accepted at a rate that each request draws
for itself (Beta, mean 0.7), k = 4.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
from minedraft.journal import Recorder
from minedraft.metrics import MetricsCollector
from minedraft.sim.acceptance import BetaRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import LinearCost
from minedraft.sim.workload import FixedLength, Poisson, SyntheticWorkload

COSTS = {
    # The paper's target (Qwen3-32B on four L40, eager mode): V = 48.6 ms at 16 rows with 3 drafts each.
    "49 ms steps": LinearCost(
        verify_base_s=0.045,
        verify_per_seq_s=2e-4,
        prefill_base_s=0.045,
        prefill_per_token_s=4e-5,
        draft_base_s=0.0165,
        draft_per_seq_s=5e-6,
    ),
    # A 32B-class target on four GPUs: about 25 ms a decode step, 0.045 ms a prompt token.
    "25 ms steps": LinearCost(
        verify_base_s=0.025,
        verify_per_seq_s=1e-4,
        prefill_base_s=0.025,
        prefill_per_token_s=2e-5,
        draft_base_s=0.004,
        draft_per_seq_s=2e-5,
    ),
    # An 8B-class target on one H100: about 7 ms a decode step, 0.021 ms a token.
    "7 ms steps": LinearCost(
        verify_base_s=0.0071,
        verify_per_token_s=2.1e-5,
        prefill_base_s=0.0071,
        prefill_per_token_s=2.1e-5,
        draft_base_s=0.001,
        draft_per_seq_s=5e-6,
    ),
}


def run(case: str, mode: str, count: int) -> dict[str, float]:
    num_batches = 2 if mode == "psd" else 1
    config = SchedulerConfig(
        num_batches=num_batches,
        max_batch_size=256 // num_batches,
        num_speculative_tokens=4,
        num_draft_blocks=0 if mode == "ar" else 65536,
    )
    workload = SyntheticWorkload(Poisson(20.0), FixedLength(512), FixedLength(20), num_requests=count)
    start = time.perf_counter()
    cpu = time.process_time()
    backend = SimBackend(workload, COSTS[case], BetaRate(0.7, 4.0))
    metrics = MetricsCollector()
    scheduler = Scheduler(config, load_policies({"mode": f"fixed,mode={mode}"}))
    done = sum(1 for _ in Engine(scheduler, Recorder(backend, metrics)).outputs())
    summary = metrics.summarize()
    assert done == summary.completed == count
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "steps": summary.rounds,
    }


def measure(environment: dict[str, str], case: str, mode: str, count: int) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--one", case, mode, str(count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    got: dict[str, float] = json.loads(done.stdout)
    return got


def report(case: str, mode: str, count: int, best: dict[str, dict[str, float]]) -> None:
    """A line per build."""
    for build, got in best.items():
        gain = "" if build == "plain" else f", {best['plain']['cpu_s'] / got['cpu_s']:.1f} x plain per CPU second"
        print(
            f"{case:>12} {mode:>4} {build:>8} {count:>7} requests: {count / got['wall_s']:>8,.0f} per wall second "
            f"({count / got['cpu_s']:,.0f} per CPU second), {got['rss_mb']:.0f} MB peak, "
            f"{got['steps'] / count:.2f} steps per request{gain}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--mode", nargs="*", default=["ar", "psd"])
    parser.add_argument("--best-of", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="measure a compiled build as well")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, mode, count = options.one
        print(json.dumps(run(case, mode, int(count))))
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from compiled_copy import builds

    with builds(options.compiled) as environments:
        for case in COSTS:
            for mode in options.mode:
                for count in options.requests:
                    runs: dict[str, list[dict[str, float]]] = {build: [] for build in environments}
                    # The best of a few, the builds in turn: what else runs on the machine only ever adds.
                    for build in list(environments) * options.best_of:
                        runs[build].append(measure(environments[build], case, mode, count))
                    fastest = {build: min(got, key=lambda run: run["wall_s"]) for build, got in runs.items()}
                    report(case, mode, count, fastest)


if __name__ == "__main__":
    main()

"""Speed and memory of simulated serving: 512 prompt + 20 output tokens, Poisson 20 req/s, metrics on.

Run: python tests/benchmarks/bench_simulate.py [--requests 10000 100000] [--mode ar psd]

Every case runs in a process of its own, so that its peak memory is its own. The number of steps per request, which is
what a step-by-step simulator pays for, follows from the step time: three targets are shown.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
from minedraft.journal import Recorder
from minedraft.metrics import MetricsCollector
from minedraft.sim.acceptance import ConstantRate
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
    backend = SimBackend(workload, COSTS[case], ConstantRate(0.7))
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--mode", nargs="*", default=["ar", "psd"])
    parser.add_argument("--best-of", type=int, default=3)
    parser.add_argument("--one", nargs=3)
    options = parser.parse_args()
    if options.one:
        case, mode, count = options.one
        print(json.dumps(run(case, mode, int(count))))
        return
    for case in COSTS:
        for mode in options.mode:
            for count in options.requests:
                command = [sys.executable, __file__, "--one", case, mode, str(count)]
                # The best of a few: what else runs on the machine only ever adds.
                runs = [
                    subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(options.best_of)
                ]
                got = min((json.loads(done.stdout) for done in runs), key=lambda run: run["wall_s"])
                print(
                    f"{case:>12} {mode:>4} {count:>7} requests: {count / got['wall_s']:>8,.0f} per wall second "
                    f"({count / got['cpu_s']:,.0f} per CPU second), {got['rss_mb']:.0f} MB peak, "
                    f"{got['steps'] / count:.2f} steps per request"
                )


if __name__ == "__main__":
    main()

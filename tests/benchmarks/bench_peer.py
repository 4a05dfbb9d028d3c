"""minedraft beside its fastest peer, on the same work in the same run; and how its time grows with the requests.

Run: python tests/benchmarks/bench_peer.py --peer-python /path/to/python [--compiled] [--requests 10000] [--best-of 3]

The peer is the mocker of `ai-dynamo` 1.6.1 (github.com/ai-dynamo/dynamo, Apache-2.0), a simulator of vLLM written in
Rust. It needs an environment of its own:

    python -m venv VENV
    VENV/bin/pip install --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
    VENV/bin/pip install pydantic msgspec numpy

Without --peer-python only minedraft is measured. With --compiled minedraft is measured twice (see `minedraft compile`).
Every measurement is a process of its own, they take turns, and the best of a few counts: whatever else runs on the
machine only ever adds. Imports are not timed, the summary of the run is.

Both simulate the same service: one replica, 512 + 20 tokens, Poisson arrivals at 20 requests/s, at most 256 sequences
and 8192 tokens a step, and the peer's own step times, which minedraft is given as a cost model. Their latencies are
printed: where the two agree, the two did the same work.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_simulate import COSTS

PROMPT, OUTPUT, RATE = 512, 20, 20.0

PEER = """
import json, resource, sys, time
from dynamo.replay import run_synthetic_trace_replay
start = time.perf_counter()
report = run_synthetic_trace_replay({prompt}, {output}, {count}, request_rate={rate}, capture_planner_details=False)
wall_s = time.perf_counter() - start
summary = report.summary
names = ("completed_requests", "mean_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms")
found = {{name: summary[name] for name in names}}
found["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"wall_s": wall_s, **found}}))
"""

WHAT = """
What each of them does for its time:
  minedraft  asks one Python core, the one that also drives torch and vLLM, for every step; every policy is a Python
             object that may be replaced; sub-batches, a drafter, acceptance per request, paged pools of both models.
  peer       a scheduler rewritten in Rust: paged blocks with prefix caching, chunked prefill, preemption, several
             workers and routers; speculation is one speed-up factor: no drafter, no acceptance, no policy from outside.
Where the peer stays ahead: plain serving (ar), by the ratio above; prefix caching; several workers behind a router that
knows their caches. What it can't be asked: sd or psd with a drafter and random acceptance, or a policy of one's own.
"""


@dataclass(frozen=True)
class PeerSteps:
    """The peer's own default step times (dynamo, lib/mocker): polynomials in prompt tokens and in the use of the KV.

    A step takes 16.5 ms + 15.2 us per prompt token + 0.42 ns per such token squared, if it has any, and 5.74 ms + 54 ms
    p - 25.7 ms p^2 if it decodes, where p is the share of the KV blocks in use. What both print shows whether it is so.
    """

    num_blocks: int = 16_384
    block_size: int = 64

    def verify_s(self, work: Any) -> float:
        """Seconds of a step."""
        num_new, drafts = work.num_new, sum(work.num_draft)
        num_entries, total = len(num_new), sum(num_new)
        ms = 0.0
        num_decoding = num_new.count(1)
        if num_decoding:
            used = (sum(work.num_computed) + total + drafts) / (self.block_size * self.num_blocks)
            ms = 5.74 + 54.01 * used - 25.74 * used * used
        if num_decoding < num_entries:
            prompt = total - num_decoding
            ms += 16.50142 + 1.518344e-2 * prompt + 4.209989e-7 * prompt * prompt
        return ms / 1000.0

    def draft_s(self, work: Any) -> float:
        """A drafter of a fiftieth of the target's size, for psd, which the peer doesn't have."""
        return 0.0005 * max(work.num_draft, default=0) + 0.0005


def minedraft_run(mode: str, count: int) -> dict[str, float]:
    """The same service, timed as the peer is."""
    from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
    from minedraft.journal import Recorder
    from minedraft.metrics import MetricsCollector
    from minedraft.sim.acceptance import BetaRate
    from minedraft.sim.backend import SimBackend
    from minedraft.sim.workload import FixedLength, Poisson, SyntheticWorkload

    num_batches = 2 if mode == "psd" else 1
    config = SchedulerConfig(
        num_batches=num_batches,
        max_batch_size=256 // num_batches,
        num_speculative_tokens=4,
        max_num_batched_tokens=8192,
        num_draft_blocks=0 if mode == "ar" else 65536,
    )
    start = time.perf_counter()
    workload = SyntheticWorkload(Poisson(RATE), FixedLength(PROMPT), FixedLength(OUTPUT), num_requests=count, seed=42)
    metrics = MetricsCollector()
    backend = SimBackend(workload, PeerSteps(), BetaRate(0.7, 4.0))
    engine = Engine(Scheduler(config, load_policies({"mode": f"fixed,mode={mode}"})), Recorder(backend, metrics))
    while engine.step() is not None:
        pass
    summary = metrics.summarize()
    return {
        "wall_s": time.perf_counter() - start,
        "completed_requests": summary.completed,
        "mean_ttft_ms": summary.ttft.mean,
        "mean_tpot_ms": summary.tpot.mean,
        "mean_e2e_latency_ms": summary.e2el.mean,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def growth_run(count: int) -> dict[str, float]:
    """Llama-3.1-70B on four H100, 512 + 128 tokens at 10 requests/s: where another simulator grew like n squared."""
    from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
    from minedraft.journal import Recorder
    from minedraft.metrics import MetricsCollector
    from minedraft.sim.acceptance import ConstantRate
    from minedraft.sim.backend import SimBackend
    from minedraft.sim.device_group import DeviceGroup
    from minedraft.sim.gpus import load_gpu
    from minedraft.sim.models import load_model
    from minedraft.sim.roofline import Roofline
    from minedraft.sim.steps import StepCost
    from minedraft.sim.workload import FixedLength, Poisson, SyntheticWorkload

    cost = StepCost(Roofline(DeviceGroup(load_model("llama-3.1-70b"), load_gpu("h100"), 4)))
    workload = SyntheticWorkload(Poisson(10.0), FixedLength(512), FixedLength(128), num_requests=count, seed=1)
    start, cpu = time.perf_counter(), time.process_time()
    metrics = MetricsCollector()
    core = Scheduler(SchedulerConfig(max_batch_size=256, num_draft_blocks=0), load_policies({"mode": "fixed,mode=ar"}))
    engine = Engine(core, Recorder(SimBackend(workload, cost, ConstantRate(0.0)), metrics))
    num_turns = 0
    while engine.step() is not None:
        num_turns += 1
    summary = metrics.summarize()
    assert summary.completed == count
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "turns": num_turns,
        "running": summary.mean_running_requests,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measured(command: list[str], environment: dict[str, str] | None = None) -> dict[str, float]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def fastest(runs: Iterable[dict[str, float]]) -> dict[str, float]:
    return min(runs, key=lambda run: run["wall_s"])


def compare(peer_python: str | None, environments: dict[str, dict[str, str]], count: int, best_of: int) -> None:
    """Requests per wall second of everybody, in turn."""
    script = PEER.format(prompt=PROMPT, output=OUTPUT, count=count, rate=RATE)
    commands: dict[str, tuple[list[str], dict[str, str] | None]] = {}
    if peer_python is not None:
        commands["peer"] = ([peer_python, "-c", script], None)
    for build, environment in environments.items():
        for mode in ("ar", "psd"):
            command = [sys.executable, __file__, "--one", mode, str(count)]
            commands[f"minedraft {mode}, {build}"] = (command, environment)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for name in list(commands) * best_of:
        runs[name].append(measured(*commands[name]))
    best = {name: fastest(got) for name, got in runs.items()}
    print(f"{count} requests of {PROMPT} + {OUTPUT} tokens, {RATE:g} requests/s, best of {best_of}")
    for name, got in best.items():
        assert got["completed_requests"] == count, name
        speed = count / got["wall_s"]
        ratio = f", {best['peer']['wall_s'] / got['wall_s']:.2f} x the peer" if "peer" in best else ""
        print(
            f"{name:>24}: {speed:>8,.0f} requests per wall second{ratio}, {got['rss_mb']:.0f} MB; "
            f"mean TTFT {got['mean_ttft_ms']:.1f}, TPOT {got['mean_tpot_ms']:.2f}, "
            f"E2EL {got['mean_e2e_latency_ms']:.1f} ms",
            flush=True,
        )
    print(WHAT)


def other_steps(environments: dict[str, dict[str, str]], count: int, best_of: int) -> None:
    """The works of bench_simulate.py, whose step times the peer can't be given; they say how many steps a run has."""
    script = str(Path(__file__).with_name("bench_simulate.py"))
    for case in COSTS:
        for mode in ("ar", "psd"):
            command = [sys.executable, script, "--one", case, mode, str(count)]
            runs: dict[str, list[dict[str, float]]] = {build: [] for build in environments}
            for build in list(environments) * best_of:
                runs[build].append(measured(command, environments[build]))
            for build, got in runs.items():
                best = fastest(got)
                print(
                    f"{case:>12} {mode:>4} {build:>8}: {count / best['wall_s']:>8,.0f} requests per wall second, "
                    f"{best['steps'] / count:.2f} steps per request",
                    flush=True,
                )


def show_growth(environments: dict[str, dict[str, str]], count: int, best_of: int) -> None:
    """Time and memory at n, 2 n and 4 n requests."""
    print("Llama-3.1-70B on four H100 (roofline), 512 + 128 tokens, 10 requests/s, ar: time at n, 2 n, 4 n requests")
    for build, environment in environments.items():
        counts = (count, 2 * count, 4 * count)
        runs: dict[int, list[dict[str, float]]] = {number: [] for number in counts}
        for number in counts * best_of:
            runs[number].append(measured([sys.executable, __file__, "--one", "growth", str(number)], environment))
        best = {number: min(got, key=lambda run: run["cpu_s"]) for number, got in runs.items()}
        for number, got in best.items():
            print(
                f"{build:>10} {number:>7}: {got['wall_s']:.2f} s, {1e6 * got['cpu_s'] / number:.0f} us of CPU and "
                f"{got['turns'] / number:.2f} turns of the loop per request, {got['running']:.1f} running, "
                f"{got['rss_mb']:.0f} MB; {got['cpu_s'] / best[count]['cpu_s']:.2f} x the time of n",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="an interpreter that has ai-dynamo 1.6.1")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--growth", type=int, default=1000, help="n of the growth part; 0 leaves it out")
    parser.add_argument("--best-of", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="measure a compiled build as well")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, count = options.one
        print(json.dumps(growth_run(int(count)) if what == "growth" else minedraft_run(what, int(count))))
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from compiled_copy import builds

    with builds(options.compiled) as environments:
        compare(options.peer_python, environments, options.requests, options.best_of)
        other_steps(environments, options.requests, options.best_of)
        if options.growth:
            show_growth(environments, options.growth, options.best_of)


if __name__ == "__main__":
    main()

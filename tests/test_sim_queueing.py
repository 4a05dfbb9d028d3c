"""What holds of any run, whatever its figures: Lindley's recursion, Little's law, scale, work conservation."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest

from minedraft.commands.simulate import new_collector, simulate
from minedraft.config import parse_config
from minedraft.engine import Engine
from minedraft.journal import Recorder
from minedraft.scheduler import Scheduler
from minedraft.summary import Summary
from minedraft.work import DraftResult, Event, VerifyResult, Work, WorkDone

MODES = ("ar", "sd", "psd", "pearl", "pearl-minedraft")
ARRIVALS: dict[str, dict[str, Any]] = {
    "poisson": {"kind": "poisson", "rate": 4.0},
    "gamma": {"kind": "gamma", "rate": 3.0, "cv": 4.0},
    "on-off": {"kind": "on-off", "rate": 3.0, "on_s": 1.0, "off_s": 4.0},
    "at-once": {"kind": "at-once"},
}
LINEAR: dict[str, Any] = {
    "kind": "linear",
    "verify_base_s": 0.02,
    "verify_per_token_s": 2e-4,
    "verify_per_context_token_s": 1e-6,
    "prefill_base_s": 0.02,
    "prefill_per_token_s": 1e-4,
    "draft_base_s": 0.005,
    "draft_per_token_s": 1e-5,
    "draft_prefill_base_s": 0.004,
    "draft_prefill_per_token_s": 1e-5,
}
TREE: dict[str, Any] = {
    "seed": 7,
    "scheduler": {"max_batch_size": 4, "max_num_batched_tokens": 128, "num_target_blocks": 80, "num_draft_blocks": 60},
    "workload": {
        "num_requests": 40,
        "prompt_lens": {"kind": "lognormal", "mean": 100, "p50": 60, "max_tokens": 300},
        "output_lens": {"kind": "lognormal", "mean": 40, "p50": 25, "max_tokens": 150},
    },
    "cost": LINEAR,
    "acceptance": {"mean": 0.6, "concentration": 3.0},
}


def tree(mode: str, arrivals: str, **tables: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(TREE) | {"mode": mode}
    made["workload"]["arrivals"] = ARRIVALS[arrivals]
    for name, fields in tables.items():
        made[name] = {**made.get(name, {}), **fields}
    return made


def run(table: dict[str, Any]) -> tuple[Summary, dict[str, list[Any]]]:
    """Figures, and the lists per request."""
    config = parse_config(table)
    collector = new_collector(config, keep_all=True)
    outcome = simulate(config, collector, label=None)
    assert outcome.error is None
    return outcome.summary, collector.detailed()


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "on-off"])
def test_one_row_of_constant_service_is_lindleys_queue(arrivals: str) -> None:
    """W' = max(0, W + S - gap): with one request at a time and constant steps every wait is known from the arrivals."""
    prefill_s, step_s, output_len = 0.05, 0.02, 10
    table = tree("ar", arrivals, scheduler={"max_batch_size": 1, "num_target_blocks": 1000})
    table["workload"] |= {"output_lens": output_len, "prompt_lens": 64, "num_requests": 400}
    table["cost"] = {"kind": "constant", "verify_base_s": step_s, "prefill_s": prefill_s}
    summary, requests = run(table)
    service_s = prefill_s + (output_len - 1) * step_s
    waits_s = [0.0]
    for before_s, now_s in pairwise(requests["start_times"]):
        waits_s.append(max(0.0, waits_s[-1] + service_s - (now_s - before_s)))
    assert requests["queue_times"] == pytest.approx(waits_s, abs=1e-9)
    assert summary.service.mean == pytest.approx(1e3 * service_s)
    assert summary.target_utilisation == pytest.approx(400 * service_s / summary.duration)
    assert max(waits_s) > 2 * service_s


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arrivals", ["poisson", "gamma"])
def test_littles_law(mode: str, arrivals: str) -> None:
    """L = lambda W over a whole run, with L counted from arrivals and ends."""
    summary, requests = run(tree(mode, arrivals))
    starts_s = requests["start_times"]
    ends_s = [start_s + taken_s for start_s, taken_s in zip(starts_s, requests["latencies"], strict=True)]
    steps = sorted([(at_s, 1) for at_s in starts_s] + [(at_s, -1) for at_s in ends_s])
    present, area = 0, 0.0
    for (now_s, change), (next_s, _) in pairwise(steps):
        present += change
        area += present * (next_s - now_s)
    assert summary.failed == 0
    mean_present = area / summary.duration
    assert mean_present == pytest.approx(summary.request_throughput * summary.e2el.mean / 1e3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arrivals", ["gamma", "on-off", "at-once"])
def test_in_a_world_twice_as_slow_everything_takes_twice_as_long(mode: str, arrivals: str) -> None:
    """No time is hidden anywhere in the core: counts and shares stay, times double, rates halve."""
    table = tree(mode, arrivals, devices={"round_overhead_s": 0.004})
    slow = copy.deepcopy(table)
    slow["cost"] = {name: value if name == "kind" else 2.0 * value for name, value in LINEAR.items()}
    slow["devices"]["round_overhead_s"] *= 2.0
    for name, factor in (("rate", 0.5), ("on_s", 2.0), ("off_s", 2.0)):
        if name in slow["workload"]["arrivals"]:
            slow["workload"]["arrivals"] = slow["workload"]["arrivals"] | {
                name: factor * slow["workload"]["arrivals"][name]
            }
    (before, _), (after, _) = run(table), run(slow)
    for name in ("ttft", "tpot", "itl", "e2el", "queue", "service"):
        for one, other in zip(_points(before, name), _points(after, name), strict=True):
            assert other == pytest.approx(2.0 * one, rel=1e-6)
    assert after.output_throughput == pytest.approx(before.output_throughput / 2.0)
    for name in ("makespan", "duration", "mean_verify_ms", "mean_draft_ms"):
        assert getattr(after, name) == pytest.approx(2.0 * getattr(before, name))
    for name in ("target_utilisation", "draft_utilisation", "overlapped_draft_share", "decode_verify_share"):
        assert getattr(after, name) == pytest.approx(getattr(before, name))
    for name in ("completed", "rounds", "spec_decode_accepted_tokens", "num_preemptions", "zero_draft_causes"):
        assert getattr(after, name) == getattr(before, name)


def _points(summary: Summary, name: str) -> list[float]:
    stats = getattr(summary, name)
    return [stats.mean, stats.std, *stats.percentiles.values()]


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_speculation_of_no_drafts_is_plain_decoding(arrivals: str) -> None:
    """To the last bit, with the drafter elsewhere."""
    plain, plain_requests = run(tree("ar", arrivals))
    none = {"scheduler": TREE["scheduler"] | {"num_speculative_tokens": 0}, "devices": {"colocated": False}}
    summary, requests = run(tree("sd", arrivals, **none))
    assert requests == plain_requests
    assert (summary.rounds, summary.target_utilisation) == (plain.rounds, plain.target_utilisation)


class Watching:
    """A sink that keeps when the devices were busy."""

    def __init__(self) -> None:
        self.spans_s: list[tuple[float, float]] = []

    def on_start(self, now_s: float) -> None: ...

    def on_asked(self, now_s: float) -> None: ...

    def on_submit(self, now_s: float, work: Work) -> None: ...

    def on_event(self, now_s: float, event: Event) -> None:
        if isinstance(event, WorkDone) and isinstance(event.result, VerifyResult | DraftResult):
            self.spans_s.append((event.started_s, event.ended_s))

    def close(self) -> None: ...


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_no_moment_in_which_somebody_waits_and_nothing_runs(mode: str, arrivals: str) -> None:
    """I17, from outside: without host time the busy time of the devices covers the time in which requests are there."""
    config = parse_config(tree(mode, arrivals))
    collector, watching = new_collector(config, keep_all=True), Watching()
    recorder = Recorder(config.build_world(), collector, watching)
    for _ in Engine(Scheduler(config.scheduler_config(), config.build_policies()), recorder).outputs():
        pass
    requests = collector.detailed()
    stays_s = zip(requests["start_times"], requests["latencies"], strict=True)
    present_s = _merged([(start_s, start_s + taken_s) for start_s, taken_s in stays_s])
    busy_s = _merged(watching.spans_s)
    for start_s, end_s in present_s:
        covering = [span for span in busy_s if span[0] <= start_s + 1e-9 and end_s <= span[1] + 1e-9]
        assert covering, (start_s, end_s)


def _merged(spans_s: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans; what touches is one."""
    found: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans_s):
        if found and start_s <= found[-1][1] + 1e-9:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((start_s, end_s))
    return found

"""Kinds of load that serving sees, and their generators: idle times, bursts, long contexts, mixes, closed loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from minedraft.commands.many_runs import run_once
from minedraft.commands.simulate import new_collector
from minedraft.config import RunConfig, load_config
from minedraft.config_tree import Override
from minedraft.engine import Engine
from minedraft.journal import Recorder
from minedraft.scheduler import Scheduler
from minedraft.sim.mixed_lengths import MixtureLength
from minedraft.sim.on_off import OnOff
from minedraft.sim.workload import Arrivals, FixedLength, Gamma, LognormalLength, random_stream
from minedraft.steady_state import still_growing
from minedraft.summary import Summary
from minedraft.work import Event, VerifyResult, VerifyWork, Work, WorkDone

H100S = {
    "kind": "roofline",
    "target": {"model": "qwen3-32b", "gpu": "h100", "tp": 4},
    "draft": {"model": "qwen3-0.6b", "gpu": "h100"},
}


def config(mode: str, **settings: Any) -> RunConfig:
    """Settings by dotted key, with __ for the dots."""
    overrides = [Override(key.replace("__", "."), value, key) for key, value in settings.items()]
    return load_config(None, [Override("mode", mode, "mode"), *overrides])


def figures(mode: str, **settings: Any) -> Summary:
    summary = run_once(config(mode, **settings)).summary
    assert summary.failed == 0
    return summary


# --- generators


def gaps(arrivals: Arrivals, number: int, seed: int = 1) -> np.ndarray:
    times = np.fromiter(itertools.islice(arrivals.times_s(random_stream(seed, "arrivals")), number), float)
    assert (np.diff(times) >= 0.0).all()
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Gamma(2.0, 13.0), 13.0),
        (OnOff(2.0, 5.0, 15.0), OnOff(2.0, 5.0, 15.0).cv),
        (OnOff(0.5, 2.0, 2.0), OnOff(0.5, 2.0, 2.0).cv),
        (OnOff(2.0, 1.0, 0.0), 1.0),
    ],
    ids=["gamma-13", "on-off", "on-off-slow", "always-on"],
)
def test_rate_and_variation_of_bursts(arrivals: Gamma | OnOff, cv: float) -> None:
    found = gaps(arrivals, 300_000)
    # With gaps of this cv their mean has the relative error cv / sqrt(n).
    assert found.mean() * arrivals.rate == pytest.approx(1.0, abs=4 * cv / math.sqrt(len(found)))
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.08)


def test_cv_of_on_off_arrivals_by_hand() -> None:
    # While on 8/s, on for 5 s, off for 15 s: 1 + 2 * 8 * (1/5) / (1/5 + 1/15)^2 = 46.
    assert OnOff(2.0, 5.0, 15.0).cv == pytest.approx(math.sqrt(46.0))


def test_on_off_arrivals_begin_in_the_long_run_state() -> None:
    """The first second holds as many arrivals as any other, on average over seeds."""
    early = [int((gaps(OnOff(4.0, 2.0, 6.0), 60, seed).cumsum() < 1.0).sum()) for seed in range(3000)]
    # The variance of the number in one second is below 40: the source is on for a quarter of the time, then at 16/s.
    assert np.mean(early) == pytest.approx(4.0, abs=4 * math.sqrt(40.0 / 3000))


def test_another_rate_moves_arrivals_only_within_the_same_phases() -> None:
    slow, fast = (gaps(OnOff(rate, 5.0, 20.0), 40_000).cumsum() for rate in (5.0, 10.0))
    silences = [(a, b) for a, b in itertools.pairwise(fast) if b - a > 15.0]
    assert len(silences) > 10
    for start_s, end_s in silences:
        assert not ((slow > start_s + 1.0) & (slow < end_s - 1.0)).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OnOff(0.0, 1.0, 1.0), "OnOff.rate is 0.0"),
        (lambda: OnOff(1.0, math.inf, 1.0), "OnOff.on_s is inf"),
        (lambda: OnOff(1.0, 1.0, -1.0), "OnOff.off_s is -1.0"),
        (lambda: OnOff(1e-320, 1.0, 1.0), "OnOff.rate is 1e-320"),
        (lambda: OnOff(1.0, 1e-300, 1.0), "OnOff.on_s is 1e-300"),
        (lambda: OnOff(1.0, 1.0, 1e300), r"OnOff.off_s is 1e\+300"),
        (lambda: OnOff(10.0, 1e-6, 1e-6), 'make them longer, or use kind = "poisson"'),
        (lambda: MixtureLength(()), "MixtureLength.parts is empty"),
        (lambda: MixtureLength(((0.0, FixedLength(1)),)), r"MixtureLength.parts\[0\] is weighted 0.0"),
        (lambda: MixtureLength(((1.0, FixedLength(1)), (math.nan, FixedLength(1)))), r"parts\[1\] is weighted nan"),
    ],
)
def test_refusals_name_the_field(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mixture_has_its_shares_and_the_statistics_of_its_parts() -> None:
    lengths = MixtureLength(((3.0, FixedLength(200)), (1.0, LognormalLength(8000, p50=6000, min_tokens=300))))
    values = np.fromiter(itertools.islice(lengths.values(random_stream(2, "prompt_lens")), 80_000), int)
    short = values == 200
    assert short.mean() == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 80_000))
    assert values[~short].mean() == pytest.approx(8000, rel=0.03)
    assert np.median(values[~short]) == pytest.approx(6000, rel=0.03)


def test_parts_of_a_mixture_have_luck_of_their_own() -> None:
    long = LognormalLength(8000, p50=6000)
    pairs = [MixtureLength(((1.0, short), (1.0, long))) for short in (FixedLength(1), LognormalLength(2, p50=1))]
    one, other = ([v for v in itertools.islice(m.values(random_stream(0, "x")), 500) if v > 400] for m in pairs)
    assert one == other


def test_one_part_of_a_mixture_alone_is_always_chosen() -> None:
    lengths = MixtureLength(((0.1, FixedLength(7)),))
    assert set(itertools.islice(lengths.values(random_stream(0, "x")), 5000)) == {7}


def test_mixtures_can_be_written_in_a_configuration() -> None:
    run = config(
        "ar",
        workload__prompt_lens={
            "parts": [{"weight": 1.0, "length": 5}, {"weight": 1.0, "length": {"mean": 9, "p50": 9}}]
        },
        workload__arrivals={"kind": "on-off", "rate": 4.0, "on_s": 1.0, "off_s": 3.0},
    )
    assert {request.prompt_len for request in run.build_workload()} == {5, 9}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("prompt_lens", {"parts": []}, "workload.prompt_lens.parts: is empty"),
        ("prompt_lens", {"parts": [{"weight": 1.0}]}, r"workload.prompt_lens.parts\[0\].length: is missing"),
        ("output_lens", {"parts": [{"weight": -1.0, "length": 3}]}, r"workload.output_lens.parts\[0\]: is weighted -1"),
        ("output_lens", {"parts": [{"weight": 1.0, "length": {"mean": 3}}]}, r"parts\[0\]: is unusable: Lognormal"),
        ("arrivals", {"kind": "on-off", "rate": 1.0, "on_s": 0.0, "off_s": 1.0}, "workload.arrivals.on_s: is 0.0"),
        ("arrivals", {"kind": "onoff", "rate": 1.0}, "did you mean 'on-off'"),
    ],
)
def test_bad_generators_are_refused_by_field(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config("ar", **{f"workload__{key}": value})


# --- light load


@pytest.mark.parametrize("cost", [{"kind": "paper"}, H100S], ids=["paper", "roofline"])
def test_at_light_load_psd_is_sd_and_says_that_a_batch_is_empty(cost: dict[str, Any]) -> None:
    load = {"workload__num_requests": 80, "workload__output_lens": 48, "cost": cost}
    load["workload__arrivals"] = {"kind": "poisson", "rate": 0.03}
    sd, psd = figures("sd", **load), figures("psd", **load)
    assert psd.mean_running_requests < 1.2
    assert psd.empty_batch_share > 0.8
    assert sd.empty_batch_share == 0.0
    # The same rounds one after the other; two requests that meet don't wait for each other's drafts in psd.
    assert psd.tpot.mean == pytest.approx(sd.tpot.mean, rel=0.02)
    assert psd.e2el.mean == pytest.approx(sd.e2el.mean, rel=0.02)
    assert not still_growing([psd.backlog_by_tenth])


def test_a_single_client_never_fills_the_second_batch() -> None:
    load = {"workload__num_requests": 20, "workload__arrivals": {"kind": "closed-loop", "concurrency": 1}}
    psd = figures("psd", **load, workload__output_lens=16)
    assert psd.empty_batch_share == 1.0
    assert psd.overlapped_draft_share == 0.0
    pair = figures("psd", **load | {"workload__arrivals": {"kind": "closed-loop", "concurrency": 2}})
    assert pair.empty_batch_share < 0.1


# --- bursts


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@pytest.mark.parametrize(
    "arrivals",
    [{"kind": "gamma", "rate": 1.0, "cv": 13.0}, {"kind": "on-off", "rate": 1.0, "on_s": 2.0, "off_s": 58.0}],
    ids=["gamma-13", "on-off"],
)
def test_bursts_are_served_and_show_in_the_tail(mode: str, arrivals: dict[str, Any]) -> None:
    load = {"workload__num_requests": 200, "workload__output_lens": 48, "cost": H100S}
    smooth = figures(mode, **load, workload__arrivals={"kind": "poisson", "rate": 1.0})
    bursty = figures(mode, **load, workload__arrivals=arrivals)
    assert bursty.completed == 200
    assert bursty.mean_running_requests > 2 * smooth.mean_running_requests
    assert bursty.ttft.percentiles[99] > 1.2 * smooth.ttft.percentiles[99]
    assert bursty.target_utilisation < smooth.target_utilisation, "steps are shared more, and most of the time is idle"
    assert not still_growing([smooth.backlog_by_tenth])


def test_code_traffic_with_its_published_burstiness_runs_in_every_mode() -> None:
    for mode in ("ar", "sd", "psd"):
        found = figures(mode, workload={"kind": "azure-code-like", "num_requests": 400}, cost=H100S)
        assert found.max_running_requests == (32 if mode == "psd" else 16)
        assert found.queue.percentiles[99] > 10 * found.mean_verify_ms


# --- long contexts


class Widest:
    """Notes the largest verification, and when chunks of a request were committed."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seen_s: dict[str, list[float]] = {}
        self._works: dict[int, VerifyWork] = {}

    def on_start(self, now_s: float) -> None: ...
    def on_asked(self, now_s: float) -> None: ...
    def on_decisions(self, *_: Any) -> None: ...
    def close(self) -> None: ...

    def on_submit(self, now_s: float, work: Work) -> None:
        if isinstance(work, VerifyWork):
            self.num_tokens = max(self.num_tokens, sum(work.num_new) + sum(work.num_draft))
            self._works[work.work_id] = work

    def on_event(self, now_s: float, event: Event) -> None:
        if isinstance(event, WorkDone) and isinstance(event.result, VerifyResult):
            work = self._works.pop(event.work_id)
            for request_id, number in zip(work.request_ids, event.result.num_committed, strict=True):
                if number:
                    self.seen_s.setdefault(str(request_id), []).append(now_s)


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_long_prompts_come_in_chunks_between_which_others_go_on(mode: str) -> None:
    """One prompt of 128k tokens among short requests that decode."""
    run = config(
        mode,
        workload__num_requests=40,
        workload__arrivals={"kind": "poisson", "rate": 1.0},
        workload__prompt_lens={"parts": [{"weight": 0.95, "length": 100}, {"weight": 0.05, "length": 131072}]},
        workload__output_lens=200,
        cost=H100S,
        seed=3,
    )
    longest = {r.request_id for r in run.build_workload() if r.prompt_len > 1000}
    assert 0 < len(longest) < 5
    widest, collector, world = Widest(), new_collector(run), run.build_world()
    with Recorder(world, collector, widest) as recorder:
        engine = Engine(Scheduler(run.scheduler_config(), run.build_policies()), recorder)
        while (ended := engine.step()) is not None:
            collector.on_outputs(ended)
    summary = collector.summarize()
    assert summary.completed == 40
    assert summary.num_preemptions == 0
    assert widest.num_tokens <= run.scheduler.max_num_batched_tokens
    slowest_s = summary.ttft.percentiles[99] / 1000
    assert slowest_s > 5.0, "the long prompt takes many steps"
    pauses_s = [max(np.diff(seen)) for name, seen in widest.seen_s.items() if name not in longest and len(seen) > 1]
    assert max(pauses_s) < slowest_s / 4, "nobody who decodes waits for a whole long prompt"


def test_the_price_of_a_context_grows_faster_than_its_length() -> None:
    load = {"workload__num_requests": 1, "workload__output_lens": 32, "cost": H100S}
    short, long = (figures("ar", **load, workload__prompt_lens=n) for n in (32_768, 131_072))
    assert 4.0 < long.ttft.mean / short.ttft.mean < 16.0, "between linear and quadratic in the prompt"
    assert short.tpot.mean < long.tpot.mean < 4.0 * short.tpot.mean, "decoding reads the KV cache, and the weights"


def test_contexts_beyond_the_pool_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.num_target_blocks"):
        config("ar", workload__prompt_lens=131_072, scheduler__num_target_blocks=4096)


# --- mixed lengths


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_mixed_lengths_show_in_the_tail_and_leave_the_median(mode: str) -> None:
    load = {"workload__num_requests": 120, "workload__arrivals": {"kind": "poisson", "rate": 0.5}}
    load |= {"workload__output_lens": 32, "cost": H100S}
    parts = [{"weight": 0.95, "length": 200}, {"weight": 0.05, "length": 32_768}]
    mixed = figures(mode, **load, workload__prompt_lens={"parts": parts})
    short = figures(mode, **load, workload__prompt_lens=200)
    assert mixed.total_input_tokens > 5 * short.total_input_tokens
    assert mixed.ttft.median < 2 * short.ttft.median
    assert mixed.ttft.percentiles[99] > 20 * short.ttft.percentiles[99]


# --- closed loops


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_throughput_of_a_closed_loop_grows_with_its_clients_up_to_the_limit(mode: str) -> None:
    limit = 32 if mode == "psd" else 16
    found = {
        clients: figures(
            mode,
            workload__num_requests=8 * limit,
            workload__output_lens=32,
            workload__arrivals={"kind": "closed-loop", "concurrency": clients},
        )
        for clients in (limit // 4, limit // 2, limit, 2 * limit)
    }
    rates = [one.output_throughput for one in found.values()]
    assert rates[0] < 0.6 * rates[1] < 0.36 * rates[2]
    assert rates[3] == pytest.approx(rates[2], rel=0.05), "more clients only wait"
    assert found[2 * limit].queue.mean > 10 * found[limit].queue.mean
    assert [one.max_running_requests for one in found.values()] == [limit // 4, limit // 2, limit, limit]
    assert not any(still_growing([one.backlog_by_tenth]) for one in found.values())

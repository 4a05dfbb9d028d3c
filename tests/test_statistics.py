"""Intervals over seeds, paired comparisons, and whether a queue kept growing."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft.config import load_config
from minedraft.config_tree import Override
from minedraft.statistics import Estimate, check_intervals, mean_estimate, pairing, ratio_estimate
from minedraft.steady_state import NUM_PARTS, backlog_by_tenth, still_growing
from minedraft.theory.extra import MissingTheoryExtraError

VALUES = st.lists(st.floats(0.01, 1e6), min_size=2, max_size=12)


# --- intervals


def test_a_known_interval() -> None:
    # Ten values with mean 5.5 and sample variance 55 / 6; t(9, 0.975) = 2.262157 (any table).
    found = mean_estimate([float(i) for i in range(1, 11)])
    assert found.value == 5.5
    assert found.half_width == pytest.approx(2.262157 * math.sqrt(55 / 6 / 10), rel=1e-6)
    assert mean_estimate([1.0, 2.0, 4.0], 0.99).half_width == pytest.approx(9.924843 * math.sqrt(7 / 9), rel=1e-6)


def test_one_value_has_no_interval_and_decides_nothing() -> None:
    found = mean_estimate([3.0])
    assert found == Estimate(3.0, None, None, 1)
    assert found.half_width is None
    assert not found.excludes(0.0)


def test_values_that_never_vary_have_an_interval_without_width() -> None:
    found = mean_estimate([0.1] * 7)
    assert found.low == found.high == found.value == pytest.approx(0.1)
    assert found.excludes(0.0)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("num_seeds", [3, 10])
def test_intervals_cover_the_true_mean_as_often_as_they_say(num_seeds: int, confidence: float) -> None:
    """Per-seed values as runs give them: means of 50 exponential latencies, whose true mean is 1."""
    rng = np.random.default_rng(5)
    repeats = 4000
    means = rng.exponential(1.0, (repeats, num_seeds, 50)).mean(axis=2)
    covered = sum(not mean_estimate(row, confidence).excludes(1.0) for row in means.tolist()) / repeats
    # Three standard errors of a share, and a point for the skew that is left in such means.
    assert covered == pytest.approx(confidence, abs=3 * math.sqrt(confidence * (1 - confidence) / repeats) + 0.01)


@pytest.mark.slow
def test_intervals_of_simulated_runs_cover_the_closed_form() -> None:
    """A closed loop of one client: nobody waits, so the mean latency is (mean length - 1) steps after the prompt's."""
    from minedraft.commands.many_runs import run_once
    from minedraft.commands.repeated import with_seed

    setting = {
        "mode": "ar",
        "workload.num_requests": 15,
        "workload.arrivals": {"kind": "closed-loop", "concurrency": 1},
        "workload.output_lens": {"parts": [{"weight": 0.5, "length": 3}, {"weight": 0.5, "length": 13}]},
        "cost": {"kind": "constant", "verify_base_s": 0.02, "draft_base_s": 0.01, "prefill_s": 0.05},
    }
    config = load_config(None, [Override(key, value, key) for key, value in setting.items()])
    true_ms = 50.0 + 7 * 20.0  # 8 tokens on average, the first with the prompt
    num_seeds, repeats = 5, 120
    covered = 0
    for repeat in range(repeats):
        seeds = range(repeat * num_seeds, (repeat + 1) * num_seeds)
        values = [run_once(with_seed(config, seed)).summary.e2el.mean for seed in seeds]
        covered += not mean_estimate(values).excludes(true_ms)
    assert covered / repeats == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / repeats))


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from minedraft import statistics

    statistics._t.cache_clear()
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(MissingTheoryExtraError, match=r"minedraft\[theory\]"):
        check_intervals()
    assert mean_estimate([3.0]).value == 3.0, "a single run needs no scipy"


# --- pairs


def test_pairing_by_hand() -> None:
    found = pairing([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert found.difference.value == 2.0
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.0)
    assert found.ratio.low == pytest.approx(2.0)
    assert found.ratio.excludes(1.0)
    assert not found.difference.excludes(0.0)  # 2 ± 2.48: the difference varies, the ratio doesn't
    assert found.correlation == pytest.approx(1.0)
    assert found.seeds_saved == pytest.approx((1.0 + 4.0) / 1.0)


def test_equal_variants_do_not_differ() -> None:
    found = pairing([1.0, 5.0, 2.0], [1.0, 5.0, 2.0])
    assert found.difference.low == found.difference.high == 0.0
    assert not found.difference.excludes(0.0)
    assert found.ratio is not None
    assert not found.ratio.excludes(1.0)
    assert found.seeds_saved is None


@pytest.mark.parametrize("a", [[0.0, 1.0], [1.0, -1.0]])
def test_no_ratio_to_zero(a: list[float]) -> None:
    assert ratio_estimate(a, [1.0, 1.0]) is None
    assert ratio_estimate([1.0, 1.0], a) is None


def test_pairs_need_the_same_seeds() -> None:
    with pytest.raises(ValueError, match="2 and 3 values"):
        pairing([1.0, 2.0], [1.0, 2.0, 3.0])


@given(pairs=st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.01, 1e6)), min_size=2, max_size=12))
@settings(max_examples=200, deadline=None)
def test_it_does_not_matter_which_is_the_baseline(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    forth, back = pairing(a, b), pairing(b, a)
    assert forth.difference.value == pytest.approx(-back.difference.value)
    assert forth.difference.excludes(0.0) == back.difference.excludes(0.0)
    assert forth.ratio is not None
    assert back.ratio is not None
    assert forth.ratio.value == pytest.approx(1.0 / back.ratio.value)
    assert forth.ratio.low is not None
    assert forth.ratio.low <= forth.ratio.value * (1 + 1e-12)


def test_a_common_cause_makes_the_paired_interval_narrow() -> None:
    rng = np.random.default_rng(3)
    luck = rng.normal(10.0, 3.0, 12)
    a, b = luck + rng.normal(0.0, 0.1, 12), luck + 0.5 + rng.normal(0.0, 0.1, 12)
    found = pairing(a.tolist(), b.tolist())
    unpaired = math.hypot(*(mean_estimate(x.tolist()).half_width or math.inf for x in (a, b)))
    assert found.difference.half_width is not None
    assert found.difference.half_width < unpaired / 10
    assert found.difference.excludes(0.0)
    assert found.correlation is not None
    assert found.correlation > 0.99
    # By the formula: how many times as many independent seeds give the same width.
    assert found.seeds_saved == pytest.approx((unpaired / found.difference.half_width) ** 2, rel=1e-6)


def test_independent_luck_saves_nothing() -> None:
    rng = np.random.default_rng(4)
    found = pairing(rng.normal(5.0, 1.0, 4000).tolist(), rng.normal(5.0, 1.0, 4000).tolist())
    assert found.seeds_saved == pytest.approx(1.0, abs=0.1)


# --- steady state


def queue(rng: np.random.Generator, load: float, number: int, servers: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and departures of a first-in-first-out queue with exponential gaps and services."""
    arrival_s = rng.exponential(1.0 / (load * servers), number).cumsum()
    free_s = [0.0] * servers
    end_s = np.empty(number)
    for i, service_s in enumerate(rng.exponential(1.0, number)):
        server = free_s.index(min(free_s))
        free_s[server] = end_s[i] = max(free_s[server], arrival_s[i]) + service_s
    return arrival_s, end_s


def test_backlog_by_hand() -> None:
    arrival_s = np.arange(20.0)
    assert backlog_by_tenth(arrival_s, arrival_s + 1.0) == (0.0,) * 10, "who leaves as the next arrives is gone"
    assert backlog_by_tenth(arrival_s, arrival_s + 1.5) == (0.5, *(1.0,) * 9)
    nobody_leaves = backlog_by_tenth(arrival_s, np.full(20, np.nan))
    assert nobody_leaves == tuple([2.0 * i + 0.5 for i in range(10)])
    assert still_growing([nobody_leaves])


def test_an_offline_batch_and_a_handful_have_no_load() -> None:
    assert backlog_by_tenth(np.zeros(50), np.arange(50.0)) == ()
    assert backlog_by_tenth(np.arange(9.0), np.arange(9.0) + 1.0) == ()
    assert not still_growing([(), ()])


def test_requests_refused_on_arrival_are_no_backlog() -> None:
    arrival_s = np.arange(20.0)
    assert backlog_by_tenth(arrival_s, arrival_s) == (0.0,) * 10


@pytest.mark.parametrize("servers", [1, 16])
@pytest.mark.parametrize(("load", "least", "most"), [(0.3, 0.0, 0.04), (0.6, 0.0, 0.05), (1.3, 0.97, 1.0), (2, 1, 1)])
def test_growth_is_seen_under_overload_and_not_at_light_load(
    load: float, least: float, most: float, servers: int
) -> None:
    rng = np.random.default_rng(11)
    repeats = 150
    seen = sum(still_growing([backlog_by_tenth(*queue(rng, load, 400, servers))]) for _ in range(repeats)) / repeats
    assert least <= seen <= most


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("servers", [16, 32])
def test_a_run_of_a_few_service_times_is_judged_by_what_lies_behind_the_filling(servers: int, is_fixed: bool) -> None:
    def seen(load: float, number: int, repeats: int = 60) -> float:
        rng = np.random.default_rng(14)
        flagged = 0
        for _ in range(repeats):
            arrival_s, start_s, end_s = started_queue(rng, load, number, servers, is_fixed)
            flagged += still_growing(
                [backlog_by_tenth(arrival_s, end_s)],
                filling_share=1.0 / (arrival_s[-1] - arrival_s[0]),
                waiting_share=float((start_s - arrival_s).mean()),
            )
        return flagged / repeats

    for load in (0.2, 0.4, 0.6, 0.8):
        assert max(seen(load, number) for number in (20, 60, 100, 200)) <= 0.15, load
    assert min(seen(load, 200) for load in (2.0, 3.0)) >= 0.98


def started_queue(
    rng: np.random.Generator, load: float, number: int, servers: int, is_fixed: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `queue`, with the starts of service too, and services that may all last one second."""
    arrival_s = rng.exponential(1.0 / (load * servers), number).cumsum()
    service_s = np.ones(number) if is_fixed else rng.exponential(1.0, number)
    free_s = [0.0] * servers
    start_s = np.empty(number)
    for i in range(number):
        server = free_s.index(min(free_s))
        start_s[i] = max(free_s[server], arrival_s[i])
        free_s[server] = start_s[i] + service_s[i]
    return arrival_s, start_s, start_s + service_s


def test_bursts_alone_are_no_growth() -> None:
    rng = np.random.default_rng(12)
    flagged = 0
    for _ in range(200):
        arrival_s = rng.gamma(13.0**-2, 13.0**2, 500).cumsum()  # one request/s with CV 13
        flagged += still_growing([backlog_by_tenth(arrival_s, arrival_s + 3.0)])
    assert flagged <= 0.05 * 200


def test_seeds_are_judged_together() -> None:
    """A trend that single runs drown in noise stands out in their mean."""
    rng = np.random.default_rng(13)
    trend = np.linspace(10.0, 30.0, NUM_PARTS)
    runs = [tuple((trend + rng.normal(0.0, 12.0, NUM_PARTS)).tolist()) for _ in range(40)]
    assert sum(still_growing([run]) for run in runs) < 30
    assert still_growing(runs)

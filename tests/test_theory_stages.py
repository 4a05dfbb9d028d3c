"""Stage times: gains, jitter, fairness, best k and the star, against brute force, integrals and queueing models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import integrate, stats

from minedraft.sim.cost import PAPER_MEDIANS
from minedraft.theory.draft_length import best_draft_length, draft_cost_ends, reduction_at_best
from minedraft.theory.fairness import (
    break_even_draft_range,
    break_even_gain,
    break_even_sequential_s,
    per_device_gain,
    per_device_reduction,
    psd_over_sd_2m,
    request_period_s,
)
from minedraft.theory.jitter import expected_max_lognormal, expected_max_of_samples, gain_with_jitter
from minedraft.theory.stages import (
    StageLines,
    StageTimes,
    decode_s,
    psd_makespan_s,
    reduction_of_gain,
    sd_makespan_s,
)
from minedraft.theory.star import Star, best_num_replicas, break_even_num_replicas
from minedraft.theory.tokens import constant_rates, geometric_tokens

seconds = st.floats(1e-3, 1.0)
overheads = st.sampled_from([0.0, 0.0277]) | st.floats(0.0, 0.5)
stage_times = st.builds(StageTimes, seconds, st.just(0.0) | seconds, overheads)
devices = st.tuples(st.integers(1, 8), st.integers(0, 3))


# --- the gain at equal k


@pytest.mark.parametrize(
    ("drafter", "k", "gain"),
    [
        ("qwen3-0.6b", 3, 0.980),
        ("qwen3-1.7b", 3, 0.995),
        ("qwen3-4b", 3, 0.770),
        ("qwen3-0.6b", 4, 0.797),
        ("qwen3-1.7b", 4, 0.771),
        ("qwen3-4b", 4, 0.604),
    ],
)
def test_t8_gain_with_the_published_medians(drafter: str, k: int, gain: float) -> None:
    medians = PAPER_MEDIANS[drafter][k]
    assert StageTimes(medians.verify_s, medians.draft_s).gain == pytest.approx(gain, abs=0.002)


@given(stages=stage_times)
def test_gain_has_its_bounds(stages: StageTimes) -> None:
    assert -1e-12 <= stages.gain <= 1.0
    assert stages.psd_s <= stages.sd_s <= 2.0 * stages.psd_s
    assert reduction_of_gain(stages.gain) == pytest.approx(1.0 - stages.psd_s / stages.sd_s)
    assert reduction_of_gain(stages.gain) <= 0.5
    balanced = StageTimes(stages.verify_s, stages.verify_s, stages.overhead_s)
    assert stages.gain <= balanced.gain + 1e-12


def test_lines_are_straight_but_nothing_is_drafted_at_zero() -> None:
    lines = StageLines(0.050, 0.001, 0.002, 0.010, 0.005)
    assert lines.at(0) == StageTimes(0.050, 0.0, 0.005)
    third = lines.at(3)
    assert (third.verify_s, third.draft_s, third.overhead_s) == pytest.approx((0.053, 0.032, 0.005))


@given(stages=stage_times, more=st.floats(0.001, 1.0))
def test_overhead_lowers_the_gain(stages: StageTimes, more: float) -> None:
    assert StageTimes(stages.verify_s, stages.draft_s, stages.overhead_s + more).gain <= stages.gain + 1e-12


def pipeline_s(num_steps: int, stages: StageTimes) -> float:
    """Two batches by turns, event by event: a batch is drafted, waits for the host and the target, and is verified."""
    drafted_s, verified_s = [0.0, 0.0], [0.0, 0.0]
    drafter_free_s = target_free_s = verify_starts_s = 0.0
    for step in range(num_steps):
        batch = step % 2
        # The drafter gets its next work from the same host call that starts the verification beside it.
        begins_s = max(drafter_free_s, verified_s[batch], verify_starts_s)
        drafted_s[batch] = drafter_free_s = begins_s + stages.draft_s
        verify_starts_s = max(drafted_s[batch], target_free_s) + stages.overhead_s
        verified_s[batch] = target_free_s = verify_starts_s + stages.verify_s
    return target_free_s


@given(stages=stage_times, num_steps=st.integers(1, 30))
def test_makespans_event_by_event(stages: StageTimes, num_steps: int) -> None:
    assert psd_makespan_s(num_steps, stages) == pytest.approx(pipeline_s(num_steps, stages))
    assert sd_makespan_s(num_steps, stages) == pytest.approx(sum([stages.sd_s] * num_steps))
    # What the paper leaves out is at most one step of each stage.
    left_out_s = psd_makespan_s(num_steps, stages) - num_steps * stages.psd_s
    assert left_out_s == pytest.approx(min(stages.verify_s, stages.draft_s))


def test_makespan_of_nothing() -> None:
    stages = StageTimes(1.0, 2.0)
    assert psd_makespan_s(0, stages) == sd_makespan_s(0, stages) == 0.0


def test_decode_time() -> None:
    stages = StageTimes(0.05, 0.04, 0.01)
    assert decode_s(1000, 16 * 2.5, stages.sd_s) == pytest.approx(2.5)
    assert decode_s(1000, 16 * 2.5, stages.psd_s) == pytest.approx(1.5)


# --- jitter


@pytest.mark.parametrize(("cv", "ratio"), [(0.05, 1.945), (0.10, 1.893), (0.20, 1.800), (0.30, 1.718)])
def test_t10_jitter_at_balance(cv: float, ratio: float) -> None:
    assert 1.0 + gain_with_jitter(1.0, cv, 1.0, cv, 0.0) == pytest.approx(ratio, abs=0.001)
    variance = math.log1p(cv * cv)
    draws = np.random.default_rng(1).lognormal(-variance / 2.0, math.sqrt(variance), (2, 400_000))
    assert 2.0 / draws.max(axis=0).mean() == pytest.approx(ratio, abs=0.01)


@given(mean=st.floats(0.1, 10.0), cv=st.floats(0.02, 1.5), other_cv=st.floats(0.02, 1.5))
def test_expected_max_is_the_integral(mean: float, cv: float, other_cv: float) -> None:
    def law(mean: float, cv: float) -> Any:
        variance = math.log1p(cv * cv)
        return stats.lognorm(s=math.sqrt(variance), scale=mean * math.exp(-variance / 2.0))

    x, y = law(mean, cv), law(1.0, other_cv)
    # E[max] = integral of P(max > z), in the variable ln z.
    zs = np.linspace(-12.0, 12.0, 20_001)
    expected = float(integrate.simpson(np.exp(zs) * (1.0 - x.cdf(np.exp(zs)) * y.cdf(np.exp(zs))), x=zs))
    assert expected_max_lognormal(mean, cv, 1.0, other_cv) == pytest.approx(expected, rel=1e-4)


@given(mean=st.floats(0.0, 10.0), cv=st.floats(0.0, 2.0), other_mean=st.floats(0.0, 10.0), other_cv=st.floats(0.0, 2.0))
def test_expected_max_has_its_bounds(mean: float, cv: float, other_mean: float, other_cv: float) -> None:
    value = expected_max_lognormal(mean, cv, other_mean, other_cv)
    assert max(mean, other_mean) - 1e-9 <= value <= mean + other_mean + 1e-9
    assert value == pytest.approx(expected_max_lognormal(other_mean, other_cv, mean, cv), abs=1e-9)
    assert expected_max_lognormal(mean, 0.0, other_mean, 0.0) == max(mean, other_mean)


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=12), st.lists(st.floats(0.0, 9.0), min_size=1, max_size=12))
def test_expected_max_of_samples_is_the_mean_over_all_pairs(first: list[float], second: list[float]) -> None:
    pairs = [max(x, y) for x, y in itertools.product(first, second)]
    assert expected_max_of_samples(first, second) == pytest.approx(sum(pairs) / len(pairs))


# --- fairness


@pytest.mark.parametrize(
    ("value", "expected"),
    [(per_device_gain(0.7568, 4, 1), 0.4055), (per_device_reduction(0.3951, 4, 1), 0.2438),
     (per_device_reduction(0.1834, 4, 1), -0.0208)],
)  # fmt: skip
def test_t12_figures_per_device(value: float, expected: float) -> None:
    """The paper's Qwen3-1.7B gains per GPU, from its largest and smallest: 40.55 %, 24.38 % and -2.08 %."""
    assert value == pytest.approx(expected, abs=0.0005)


@given(stages=stage_times, counts=devices)
def test_per_device_forms_agree(stages: StageTimes, counts: tuple[int, int]) -> None:
    gain = per_device_gain(stages.gain, *counts)
    assert per_device_reduction(reduction_of_gain(stages.gain), *counts) == pytest.approx(reduction_of_gain(gain))
    assert per_device_gain(break_even_gain(*counts), *counts) == pytest.approx(0.0, abs=1e-12)


@given(verify_s=seconds, overhead_s=overheads, counts=devices)
def test_break_even_draft_range_by_brute_force(verify_s: float, overhead_s: float, counts: tuple[int, int]) -> None:
    found = break_even_draft_range(verify_s, overhead_s, *counts)
    for draft_s in np.geomspace(verify_s / 50.0, verify_s * 50.0, 300):
        gain = per_device_gain(StageTimes(verify_s, float(draft_s), overhead_s).gain, *counts)
        if abs(gain) > 1e-9:
            assert (gain > 0.0) == (found is not None and found[0] < draft_s < found[1])


def test_break_even_with_the_papers_devices() -> None:
    assert break_even_gain(4, 1) == 0.25
    assert reduction_of_gain(0.25) == pytest.approx(0.2)
    assert break_even_draft_range(0.05, 0.0, 4, 1) == pytest.approx((0.0125, 0.2))
    assert break_even_draft_range(0.05, 0.0, 1, 1) == pytest.approx((0.05, 0.05))
    assert break_even_draft_range(0.05, 0.01, 1, 1) is None


@given(at_m=stage_times, at_2m=stage_times)
def test_t11_against_a_sequential_batch_of_2m(at_m: StageTimes, at_2m: StageTimes) -> None:
    at_2m = StageTimes(at_2m.verify_s, at_2m.draft_s, at_m.overhead_s)
    ratio = psd_over_sd_2m(at_m, at_2m)
    # The same from tokens per second: m requests per step against 2m.
    assert ratio == pytest.approx((1.0 / at_m.psd_s) / (2.0 / at_2m.sd_s))
    assume(abs(ratio - 1.0) > 1e-9)
    assert (ratio > 1.0) == (at_2m.verify_s + at_2m.draft_s > break_even_sequential_s(at_m))


@given(stages=stage_times)
def test_t11_psd_never_beats_2m_if_times_do_not_grow(stages: StageTimes) -> None:
    assert psd_over_sd_2m(stages, stages) <= 1.0 + 1e-12
    assert psd_over_sd_2m(stages, stages) == pytest.approx((1.0 + stages.gain) / 2.0)


@given(base=seconds, slope=seconds, draft_m=seconds, draft_2m=seconds, m=st.integers(1, 64))
def test_t11_straight_verification(base: float, slope: float, draft_m: float, draft_2m: float, m: int) -> None:
    """With V(b) = v0 + v1 b at least as long as t(m) and o = 0, PSD wins if and only if t(2m) > v0."""
    at_m, at_2m = StageTimes(base + slope * m, draft_m), StageTimes(base + slope * 2 * m, draft_2m)
    assume(at_m.verify_s >= draft_m and abs(draft_2m - base) > 1e-9)
    assert (psd_over_sd_2m(at_m, at_2m) > 1.0) == (draft_2m > base)


@given(stages=stage_times)
def test_t11_a_requests_own_rounds_are_never_closer_together(stages: StageTimes) -> None:
    sequential_s, parallel_s = request_period_s(stages)
    assert parallel_s >= sequential_s - 1e-12


# --- each mode's own best k


@pytest.mark.parametrize(("alpha", "cost"), [(0.5, 0.231), (0.6, 0.136), (0.7, 0.085), (0.8, 0.049), (0.9, 0.021)])
def test_t9_least_draft_cost_for_37_percent(alpha: float, cost: float) -> None:
    ends = draft_cost_ends(alpha, 0.37)
    assert ends is not None
    assert ends[0] == pytest.approx(cost, rel=0.03)
    # A finer search finds nothing below the first end and nothing beyond the second, and both are reached.
    for c in np.geomspace(1e-4, 10.0, 5000):
        if not ends[0] * (1 - 1e-9) <= c <= ends[1] * (1 + 1e-9):
            assert reduction_at_best(alpha, float(c)) < 0.37
    assert [reduction_at_best(alpha, end) for end in ends] == pytest.approx([0.37, 0.37], abs=1e-6)


def test_t9_if_both_modes_must_speculate() -> None:
    """At large costs both draft one token and the ratio is 1 + 1/c, whatever alpha."""
    ends = draft_cost_ends(0.7, 1.0 - 1.0 / 1.59, least=1)
    assert ends is not None
    assert ends[1] == pytest.approx(1.0 / 0.59, rel=1e-6)


def test_between_the_ends_the_saving_may_dip() -> None:
    ends = draft_cost_ends(0.5, 0.37)
    assert ends is not None
    assert ends[0] < 0.26 < ends[1]
    assert reduction_at_best(0.5, 0.26) < 0.37


def test_no_draft_cost_is_enough_at_low_acceptance() -> None:
    assert draft_cost_ends(0.1, 0.37) is None


@pytest.mark.parametrize(
    ("alpha", "cost", "saved"),
    [
        (0.7, 0.02, 0.173),
        (0.7, 0.05, 0.294),
        (0.7, 0.1, 0.394),
        (0.7, 0.2, 0.462),
        (0.7, 0.333, 0.481),
        (0.8, 0.1, 0.460),
    ],
)
def test_saving_at_best_k(alpha: float, cost: float, saved: float) -> None:
    assert reduction_at_best(alpha, cost) == pytest.approx(saved, abs=0.001)


@given(alpha=st.floats(0.0, 0.97), cost=st.floats(0.005, 3.0), least=st.integers(0, 2))
def test_saving_at_best_k_by_brute_force(alpha: float, cost: float, least: int) -> None:
    ks = range(least, 400)
    sequential = min((1.0 + cost * k) / geometric_tokens(alpha, k) for k in ks)
    parallel = min(max(1.0, cost * k) / geometric_tokens(alpha, k) for k in ks)
    assert reduction_at_best(alpha, cost, least=least) == pytest.approx(1.0 - parallel / sequential, abs=1e-9)
    assert -1e-12 <= reduction_at_best(alpha, cost, least=least) <= 0.5 + 1e-12


def test_best_draft_length() -> None:
    lines = StageLines(0.050, 0.001, 0.002, 0.010, 0.005)
    rates = constant_rates(0.7, 12)
    best = best_draft_length(rates, lambda k: lines.at(k).sd_s)
    per_token = [lines.at(k).sd_s / geometric_tokens(0.7, k) for k in range(13)]
    assert best.num_draft == per_token.index(min(per_token))
    assert best.seconds_per_token == pytest.approx(min(per_token))
    assert best_draft_length(rates, lambda k: lines.at(k).psd_s).num_draft > best.num_draft


def test_best_draft_length_may_be_zero() -> None:
    lines = StageLines(0.050, draft_per_draft_s=0.100)
    assert best_draft_length([0.5, 0.25], lambda k: lines.at(k).sd_s).num_draft == 0
    assert best_draft_length([0.5, 0.25], lambda k: lines.at(k).sd_s, least=1).num_draft == 1


# --- the star


def star_periods_s(
    num_replicas: int, draw: Callable[[], tuple[float, float]], overhead_s: float, num_rounds: int = 400
) -> list[float]:
    """A queueing simulation: n replicas, one drafter, first come, first served.

    Returns:
        A replica's mean round, per replica, over the second half of its rounds.
    """
    env = simpy.Environment()
    drafter = simpy.Resource(env)
    starts_s: list[list[float]] = [[] for _ in range(num_replicas)]

    def draft(draft_s: float) -> Iterator[simpy.Event]:
        with drafter.request() as turn:
            yield turn
            yield env.timeout(draft_s)

    def replica(index: int) -> Iterator[simpy.Event]:
        for _ in range(num_rounds):
            yield env.timeout(overhead_s)
            starts_s[index].append(env.now)
            verify_s, draft_s = draw()
            yield env.timeout(verify_s) & env.process(draft(draft_s))

    for index in range(num_replicas):
        env.process(replica(index))
    env.run()
    half = num_rounds // 2
    return [(times[-1] - times[half]) / (num_rounds - 1 - half) for times in starts_s]


@pytest.mark.parametrize("draft_s", [0.004, 0.0114, 0.03, 0.06, 0.09])
@pytest.mark.parametrize("overhead_s", [0.0, 0.012])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 8])
def test_star_round_is_exact_without_noise(draft_s: float, overhead_s: float, num_replicas: int) -> None:
    stages = StageTimes(0.060, draft_s, overhead_s)
    periods_s = star_periods_s(num_replicas, lambda: (stages.verify_s, stages.draft_s), overhead_s)
    expected_s = Star(stages, num_replicas, 4, 1).step_s
    assert periods_s == pytest.approx([expected_s] * num_replicas, rel=1e-6)


@pytest.mark.parametrize(("num_replicas", "least_excess"), [(2, -0.01), (4, 0.02), (8, -0.01)])
def test_star_round_is_the_least_with_noise(num_replicas: int, least_excess: float) -> None:
    """Queueing costs most where the drafter is just full, n = 4; the 1 % is for the luck of the draws."""
    rng, variance = np.random.default_rng(3), math.log1p(0.3**2)

    def draw() -> tuple[float, float]:
        verify, draft = rng.lognormal(-variance / 2.0, math.sqrt(variance), 2)
        return 0.060 * float(verify), 0.015 * float(draft)

    mean_s = float(np.mean(star_periods_s(num_replicas, draw, 0.0, num_rounds=3000)))
    assert mean_s / Star(StageTimes(0.060, 0.015), num_replicas, 4, 1).step_s - 1.0 > least_excess


def test_star_turns_a_loss_into_a_gain() -> None:
    """A drafter that takes 0.19 V: a loss per device with a drafter for each target, a gain with one for three."""
    stages = StageTimes(0.060, 0.0114)
    per_device = [Star(stages, n, 4, 1).per_device_gain for n in range(1, 9)]
    assert per_device[0] == pytest.approx(-0.05, abs=0.01)
    assert per_device[2] == pytest.approx(0.10, abs=0.005)
    assert break_even_num_replicas(stages, 4, 1) == 2
    assert best_num_replicas(stages, 4, 1) == 5


@given(stages=stage_times, counts=devices)
def test_star_by_brute_force(stages: StageTimes, counts: tuple[int, int]) -> None:
    gains = [Star(stages, n, *counts).per_device_gain for n in range(1, 401)]
    best, even = best_num_replicas(stages, *counts), break_even_num_replicas(stages, *counts)
    if best is not None and best <= 400:
        assert gains[best - 1] == pytest.approx(max(gains), abs=1e-9)
    else:
        assert gains == sorted(gains)
    paying = [n for n, gain in enumerate(gains, 1) if gain >= -1e-12]
    assert paying[:1] == ([even] if even is not None and even <= 400 else [])


@given(stages=stage_times, counts=devices, n=st.integers(1, 40))
def test_star_of_one_is_psd_and_shares_no_more_than_there_is(
    stages: StageTimes, counts: tuple[int, int], n: int
) -> None:
    star, one = Star(stages, n, *counts), Star(stages, 1, *counts)
    assert one.step_s == stages.psd_s
    assert one.per_device_gain == pytest.approx(per_device_gain(stages.gain, *counts))
    assert star.step_s >= one.step_s
    assert 0.0 <= star.drafter_utilisation <= 1.0
    assert star.num_devices == n * counts[0] + counts[1]


# --- refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StageTimes(0.0, 0.1), "verify_s is 0.0, must be finite and > 0"),
        (lambda: StageTimes(0.1, -0.1), "draft_s is -0.1, must be finite and >= 0"),
        (lambda: StageTimes(0.1, 0.1, float("inf")), "overhead_s is inf"),
        (lambda: StageTimes(float("nan"), 0.1), "verify_s is nan"),
        (lambda: decode_s(10, 0.0, 0.1), "tokens_per_step is 0.0"),
        (lambda: reduction_of_gain(-1.0), "gain is -1.0"),
        (lambda: per_device_gain(0.5, 0, 1), "target_devices is 0"),
        (lambda: per_device_reduction(0.5, 4, -1), "draft_devices is -1"),
        (lambda: Star(StageTimes(0.1, 0.1), 0, 4, 1), "num_replicas is 0"),
        (lambda: expected_max_lognormal(1.0, -0.1, 1.0, 0.1), "cv is -0.1"),
        (lambda: expected_max_of_samples([], [1.0]), "a sample is empty"),
        (lambda: best_draft_length([0.5], lambda _: 1.0, least=2), "least is 2"),
        (lambda: reduction_at_best(1.0, 0.1), "alpha is 1.0"),
        (lambda: reduction_at_best(0.5, 0.0), "draft_cost is 0.0"),
        (lambda: draft_cost_ends(0.5, 0.5), "reduction is 0.5"),
    ],
)
def test_refusals_name_the_argument(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

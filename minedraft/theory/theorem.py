"""The model of Theorem 1 of the paper (arXiv 2603.18016v1, section 4 and appendix A), its exact ratio, and the error.

The model: a round submits a fixed number of drafts whatever time t it spends on drafting, more time makes better
drafts, and the share accepted is f(t) = 1 - e^(-alpha t), with V constant. So T_SD = min_t R (t + V) / f(t) and
T_PSD = min_t R max(V, t) / f(t). All that matters is x = alpha V; y is alpha t.

**Theorem 1 is false as stated.** It says T_SD > 1.59 T_PSD ("at least 37 %" less time) for all x >= 1.68. At x = 10 the
exact ratio is 1.361, and it falls to 1 as x grows. The proof bounds the ratio by 1 + ln(1 + x) / x from below, which is
right (`proven_bound`), and takes that function's value at the left end, x = 1.68, for its minimum; but the function
falls, so 1.587 is its maximum there. In fact the ratio is at least 1.59 for 0.188 <= x <= 5.211 and nowhere else
(`range_of_ratio`), and exactly 2, the "naive upper bound" of 50 %, at x = 1.2564 (`peak`).
"""

from __future__ import annotations

import math

from minedraft.theory.extra import brentq, lambert_w_minus_1

CLAIMED_RATIO = 1.59
"""What Theorem 1 claims for T_SD / T_PSD."""

LARGEST_X = 700.0
"""Beyond it e^(-x) underflows; the ratio is 1 + ln(x) / x to first order there."""


def claimed_from() -> float:
    """Where Theorem 1 starts: x = -W_{-1}(-1 / (2e)) - 1 = 1.678347, from 2 (x + 1) = e^x in its proof."""
    return -lambert_w_minus_1(-1.0 / (2.0 * math.e)) - 1.0


def best_sd_drafting(x: float) -> float:
    """y* = alpha t* of SD: -W_{-1}(-e^(-(x + 1))) - (x + 1), the root of e^y = 1 + x + y (Lemma 1).

    The paper brackets it, ln(1 + x) < y* < ln(2 (1 + x)), and goes on with the bracket; this is the value itself.

    Raises:
        ValueError: x isn't in (0, `LARGEST_X`].
    """
    _check(x)
    return -lambert_w_minus_1(-math.exp(-(x + 1.0))) - (x + 1.0)


def sd_time(x: float) -> float:
    """The time alpha T_SD / R at SD's best drafting time: 1 + x + y*.

    Lemma 1 gives only a lower bound, (ln(1 + x) + x) / (1 - 1 / (2 (x + 1))). At the optimum (x + y) / (1 - e^-y) is
    e^y*, by e^y* = 1 + x + y*.
    """
    return 1.0 + x + best_sd_drafting(x)


def psd_time(x: float) -> float:
    """The time alpha T_PSD / R: x / (1 - e^-x), at t* = V (Lemma 2).

    The paper's reason isn't enough; t* = V because f is concave with f(0) >= 0: then V / f(t) falls up to V, and
    t / f(t) doesn't fall beyond.
    """
    _check(x)
    return x / -math.expm1(-x)


def ratio(x: float) -> float:
    """T_SD / T_PSD exactly, each at its own best drafting time: (1 + x + y*) (1 - e^-x) / x.

    1 for x -> 0, 2 at `peak`, and back to 1 like 1 + ln(x) / x for large x.
    """
    return sd_time(x) / psd_time(x)


def reduction(x: float) -> float:
    """The share of time that PSD saves: 1 - 1 / ratio."""
    return 1.0 - 1.0 / ratio(x)


def proven_bound(x: float) -> float:
    """1 + ln(1 + x) / x: below the ratio for every x from `claimed_from` on. This much of the proof holds."""
    _check(x)
    return 1.0 + math.log1p(x) / x


def peak() -> float:
    """The x of the largest ratio, which is 2: -W_{-1}(-1 / (2 sqrt(e))) - 1/2 = 1.256431, from e^x = 1 + 2x.

    With t = V, SD takes 2V where PSD takes V, so the ratio is at most 2 for any concave f; here SD's own best t is V.
    """
    return -lambert_w_minus_1(-0.5 / math.sqrt(math.e)) - 0.5


def range_of_ratio(least: float = CLAIMED_RATIO) -> tuple[float, float]:
    """All x at which the ratio is `least` or more: both ends of the interval around `peak`.

    Args:
        least: in [1.02, 2); for a share of time saved, 1 / (1 - share).

    Raises:
        ValueError: `least` is out of range.
    """
    if not 1.02 <= least < 2.0:
        raise ValueError(f"least is {least}, must be in [1.02, 2)")
    top = peak()

    def beyond(log_x: float) -> float:
        return ratio(math.exp(log_x)) - least

    # The outer ends, ratio(1e-6) = 1.001 and ratio(700) = 1.0108, bracket a root for every `least` above the second.
    low = brentq(beyond, math.log(1e-6), math.log(top))
    high = brentq(beyond, math.log(top), math.log(LARGEST_X))
    return math.exp(low), math.exp(high)


def best_sd_drafting_with_bonus(x: float, num_draft: int) -> float:
    """y* of SD where a round also yields the target's own token: tokens per request 1 + k f(t).

    Theorem 1 drops that token, though the paper's throughput G has it. From (1 + k) e^y = k (1 + x + y),
    y* = -W_{-1}(-(1 + 1/k) e^(-(x + 1))) - (x + 1); 0 for x <= 1/k, where drafting no longer pays.
    """
    _check(x)
    if num_draft < 1:
        raise ValueError(f"num_draft is {num_draft}, must be >= 1")
    if x <= 1.0 / num_draft:
        return 0.0
    return -lambert_w_minus_1(-(1.0 + 1.0 / num_draft) * math.exp(-(x + 1.0))) - (x + 1.0)


def ratio_with_bonus(x: float, num_draft: int) -> float:
    """T_SD / T_PSD with the target's own token, 1 + k f(t) tokens per request and round; PSD's best t is V still.

    Tends to `ratio` as k grows. Its maximum is 1.692, 1.902, 1.974 for k = 1, 2, 3.
    """
    y = best_sd_drafting_with_bonus(x, num_draft)
    sequential = (x + y) / (1.0 - num_draft * math.expm1(-y))
    parallel = x / (1.0 - num_draft * math.expm1(-x))
    return sequential / parallel


def _check(x: float) -> None:
    if not 0.0 < x <= LARGEST_X:
        raise ValueError(f"alpha V is {x}, must be in (0, {LARGEST_X:g}]")

"""Random stage times: a round of PSD takes E[max(V, t)], which is more than max(E[V], E[t]).

With two batches the roles swap only when both stages are done, so every round waits for the slower one, and the mean
round is E[max(V, t)] exactly, for independent V and t. (With three batches and more the drafter may run ahead, and the
mean lies between the two.) SD pays E[V] + E[t] either way. The paper names this as a reason why the gain stays below
its bound (appendix, FAQ 1) and gives no formula.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist

_STANDARD_NORMAL = NormalDist()


def expected_max_lognormal(mean: float, cv: float, other_mean: float, other_cv: float) -> float:
    """E[max(X, Y)] of independent lognormal X and Y, exactly.

    With s^2 = ln(1 + cv^2), d = ln(median X / median Y) and h^2 = s_x^2 + s_y^2, it is
    E[X] Phi((d + s_x^2) / h) + E[Y] Phi((s_y^2 - d) / h).

    Args:
        mean: E[X], at least 0.
        cv: coefficient of variation of X (standard deviation / mean), at least 0.
        other_mean: E[Y].
        other_cv: that of Y.

    Raises:
        ValueError: an argument is negative or infinite.
    """
    for name, value in (("mean", mean), ("cv", cv), ("other_mean", other_mean), ("other_cv", other_cv)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, must be finite and >= 0")
    variance, other_variance = math.log1p(cv * cv), math.log1p(other_cv * other_cv)
    spread = math.sqrt(variance + other_variance)
    if not spread or not mean or not other_mean:
        return max(mean, other_mean)
    medians = math.log(mean / other_mean) - (variance - other_variance) / 2.0
    above = _STANDARD_NORMAL.cdf((medians + variance) / spread)
    below = _STANDARD_NORMAL.cdf((other_variance - medians) / spread)
    return mean * above + other_mean * below


def expected_max_of_samples(first: Sequence[float], second: Sequence[float]) -> float:
    """Mean of max(x, y) over all pairs of two samples: E[max(V, t)] of measured, independent stage times.

    Raises:
        ValueError: a sample is empty.
    """
    if not first or not second:
        raise ValueError("a sample is empty; give at least one time per stage")
    ordered = sorted(second)
    before = [0.0, *accumulate(ordered)]
    total = 0.0
    for value in first:
        below = bisect_right(ordered, value)
        total += value * below + (before[-1] - before[below])
    return total / (len(first) * len(ordered))


def gain_with_jitter(verify_s: float, verify_cv: float, draft_s: float, draft_cv: float, overhead_s: float) -> float:
    """`StageTimes.gain` for independent lognormal stage times: (E[V] + E[t] + o) / (E[max(V, t)] + o) - 1."""
    longest_s = expected_max_lognormal(verify_s, verify_cv, draft_s, draft_cv)
    return (verify_s + draft_s + overhead_s) / (longest_s + overhead_s) - 1.0

"""Figures over several seeds: intervals of means, and paired comparisons of two variants under the same seeds.

Every seed is one independent repetition, so the per-seed values of a figure (a throughput, a mean, a 99th percentile of
that run) are independent and alike, and the interval of their mean is Student's. Within a run nothing is assumed:
requests that share a queue are not independent, and no figure here is an interval over requests.

Variants that ran under the same seeds saw the same arrivals, lengths and acceptance luck (common random numbers, e.g.
Law, *Simulation Modeling and Analysis*, ch. 11), so what is compared is the pair under each seed. The *difference* is
the mean of b - a. The *ratio* is the geometric mean of b / a, a paired interval of log b - log a: it says the same
whichever of the two is the baseline, and one seed in which a queue exploded does not carry it away.

Law of this file: pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from minedraft.run_data import Floats
from minedraft.theory.extra import student_t_quantile

DEFAULT_CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval.

    Attributes:
        value: the mean (a geometric one for ratios).
        low: lower end of the interval; None if fewer than two values were there.
        high: upper end, likewise.
        num_values: how many there were.
    """

    value: float
    low: float | None
    high: float | None
    num_values: int

    @property
    def half_width(self) -> float | None:
        """Half the length of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2.0

    def excludes(self, value: float) -> bool:
        """Whether there is an interval, and the value lies outside of it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Pairing:
    """What is known of b against a over the seeds that both have.

    Attributes:
        difference: mean of b - a.
        ratio: geometric mean of b / a; None unless all values are positive.
        correlation: of a and b over the seeds; None with fewer than three seeds, or if one of them never varies.
        seeds_saved: variance of b - a with independent seeds / with these: how many times as many runs it would take
            to know the difference as well without common random numbers. Below 1 they did harm. None as above, and
            if the difference never varies.
    """

    difference: Estimate
    ratio: Estimate | None
    correlation: float | None
    seeds_saved: float | None


def mean_estimate(values: Sequence[float], confidence: float = DEFAULT_CONFIDENCE) -> Estimate:
    """The mean of independent values with Student's interval.

    Args:
        values: at least one.
        confidence: chance that such an interval holds the true mean, in (0, 1).

    Raises:
        MissingTheoryExtraError: scipy isn't there and an interval is due.
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return Estimate(mean, None, None, len(array))
    half = _t(len(array) - 1, confidence) * _std(array) / math.sqrt(len(array))
    return Estimate(mean, mean - half, mean + half, len(array))


def pairing(a: Sequence[float], b: Sequence[float], confidence: float = DEFAULT_CONFIDENCE) -> Pairing:
    """Compare b with the baseline a.

    Args:
        a: a figure of the baseline, one value per seed.
        b: the same figure of another variant, under the same seeds in the same order.
        confidence: of the intervals, in (0, 1).

    Raises:
        ValueError: a and b differ in length.
        MissingTheoryExtraError: see `mean_estimate`.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values can't be paired")
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    correlation, saved = _common_luck(first, second)
    return Pairing(
        mean_estimate((second - first).tolist(), confidence), ratio_estimate(a, b, confidence), correlation, saved
    )


def ratio_estimate(a: Sequence[float], b: Sequence[float], confidence: float = DEFAULT_CONFIDENCE) -> Estimate | None:
    """The geometric mean of b / a with its interval; None unless all values are positive. See `pairing`."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not ((first > 0.0).all() and (second > 0.0).all()):
        return None
    logs = mean_estimate((np.log(second) - np.log(first)).tolist(), confidence)
    low, high = [None if end is None else _exp(end) for end in (logs.low, logs.high)]
    return Estimate(math.exp(logs.value), low, high, logs.num_values)


def _exp(value: float) -> float:
    """exp, or the largest float where that is out of reach: with two seeds an interval can span any range."""
    return math.exp(min(value, 709.0))


def _common_luck(a: Floats, b: Floats) -> tuple[float | None, float | None]:
    """Correlation and `Pairing.seeds_saved`."""
    if len(a) < 3 or not _std(a) or not _std(b):
        return None, None
    of_difference = _std(b - a) ** 2
    correlation = float(np.corrcoef(a, b)[0, 1])
    return correlation, (_std(a) ** 2 + _std(b) ** 2) / of_difference if of_difference else None


def _std(values: Floats) -> float:
    """Standard deviation of the sample; exactly 0.0 if all values are equal, which the formula misses by rounding."""
    return 0.0 if (values == values[0]).all() else float(values.std(ddof=1))


def check_intervals() -> None:
    """Find out before the runs, not after them, that no interval can be computed.

    Raises:
        MissingTheoryExtraError: scipy isn't there.
    """
    _t(1, DEFAULT_CONFIDENCE)


@lru_cache(maxsize=64)
def _t(degrees: int, confidence: float) -> float:
    """Half an interval in units of the standard error."""
    return student_t_quantile(degrees, 0.5 + confidence / 2.0)

"""Latencies of any number of requests in a fixed amount of memory (`Histogram`)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from minedraft.run_data import PERCENTILES, Floats, LatencyStats

LOWEST_S: Final = 1e-6  # anything shorter counts as no time at all
HIGHEST_S: Final = 1e7  # four months; longer values share the last bin
GROWTH: Final = 1.001  # from one edge of a bin to the next
NUM_BINS: Final = 2 + math.ceil(math.log(HIGHEST_S / LOWEST_S) / math.log(GROWTH))

PERCENTILE_ERROR: Final = math.sqrt(GROWTH) - 1.0
"""Largest relative error of a percentile of values between `LOWEST_S` and `HIGHEST_S`: half a bin."""


class Histogram:
    """Counts in bins whose edges grow by a tenth of a percent, from a microsecond on: 240 KB for any run.

    Mean and standard deviation are exact but for rounding; a percentile is within `PERCENTILE_ERROR` of the exact one,
    since both values that it lies between are.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BINS, dtype=np.int64)
        self._num = 0
        self._mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean
        self._least = math.inf
        self._most = -math.inf

    def add(self, values_s: Floats) -> None:
        """Take values in seconds, in any order."""
        num = values_s.size
        if not num:
            return
        bins = np.ceil(np.log(np.maximum(values_s, LOWEST_S) / LOWEST_S) * (1.0 / math.log(GROWTH))).astype(np.int64)
        self._counts += np.bincount(np.minimum(bins, NUM_BINS - 1), minlength=NUM_BINS)
        # Chan's update: sums of squares would lose the variance of long runs to rounding.
        mean = float(values_s.mean())
        delta, total = mean - self._mean, self._num + num
        self._squares += float(((values_s - mean) ** 2).sum()) + delta * delta * self._num * num / total
        self._mean += delta * num / total
        self._num = total
        self._least = min(self._least, float(values_s.min()))
        self._most = max(self._most, float(values_s.max()))

    def stats(self) -> LatencyStats:
        """Statistics of all values so far; all 0.0 if there are none."""
        if not self._num:
            return LatencyStats.of_seconds(np.empty(0))
        ranks = np.array(PERCENTILES) / 100.0 * (self._num - 1)
        below = np.floor(ranks)
        low, high = self._ranked_s(below), self._ranked_s(np.ceil(ranks))
        points = (low + (high - low) * (ranks - below)) * 1000.0
        percentiles = {p: float(point) for p, point in zip(PERCENTILES, points, strict=True)}
        std = math.sqrt(self._squares / self._num)
        return LatencyStats(self._mean * 1000.0, percentiles[50], std * 1000.0, percentiles)

    def _ranked_s(self, ranks: Floats) -> Floats:
        """The values of these ranks from 0, each as the middle of its bin."""
        bins = np.searchsorted(self._counts.cumsum(), ranks, side="right")
        middles = np.where(bins, LOWEST_S * GROWTH ** (bins - 0.5), 0.0)
        return np.clip(middles, self._least, self._most)

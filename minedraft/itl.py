"""Inter-token latencies of a run: kept one by one, or as a histogram of bounded size."""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np

from minedraft.run_data import PERCENTILES, Bools, Floats, Ints, LatencyStats


class GapStore(Protocol):
    """Collects gaps between the chunks of requests."""

    def add(self, gaps_s: Floats, owners: Ints) -> None:
        """Take gaps in seconds, and for each the row of its request."""
        ...

    def stats(self, wanted: Bools) -> LatencyStats:
        """Statistics over the gaps of the requests whose rows are wanted."""
        ...


class GapList:
    """Every gap, in eight bytes: seconds as float32 (relative error 6e-8) and its request."""

    def __init__(self) -> None:
        self._gaps: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
        self._owners: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []

    def add(self, gaps_s: Floats, owners: Ints) -> None:
        """See `GapStore`."""
        self._gaps.append(gaps_s.astype(np.float32))
        self._owners.append(owners.astype(np.int32))

    def stats(self, wanted: Bools) -> LatencyStats:
        """See `GapStore`."""
        gaps, owners = self._columns()
        return LatencyStats.of_seconds(gaps[wanted[owners]])

    def per_request(self, num_requests: int) -> list[list[float]]:
        """The gaps of each row in order, in seconds: `itls` of `--save-detailed`."""
        gaps, owners = self._columns()
        order = np.argsort(owners, kind="stable")
        ends = np.bincount(owners, minlength=num_requests).cumsum()
        return [part.tolist() for part in np.split(gaps[order], ends[:-1])]

    def _columns(self) -> tuple[Floats, Ints]:
        if not self._gaps:
            return np.empty(0), np.empty(0, dtype=np.int64)
        return np.concatenate(self._gaps).astype(np.float64), np.concatenate(self._owners).astype(np.int64)


LOWEST_S: Final = 1e-6
HIGHEST_S: Final = 1e4
GROWTH: Final = 1.01


class GapHistogram:
    """Gaps in bins whose edges grow by one percent, from a microsecond to three hours: 18 KB for any run.

    Mean and standard deviation are exact; a percentile is within one percent of the gap of that rank. It can't
    tell requests apart, so gaps of requests that were aborted later are in it too.
    """

    def __init__(self) -> None:
        self._scale = 1.0 / math.log(GROWTH)
        self._counts = np.zeros(int(math.log(HIGHEST_S / LOWEST_S) * self._scale) + 1, dtype=np.int64)
        self._num = 0
        self._mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean

    def add(self, gaps_s: Floats, owners: Ints) -> None:
        """See `GapStore`; `owners` is ignored."""
        if not gaps_s.size:
            return
        bins = (np.log(np.maximum(gaps_s, LOWEST_S) / LOWEST_S) * self._scale).astype(np.int64)
        self._counts += np.bincount(np.minimum(bins, len(self._counts) - 1), minlength=len(self._counts))
        # Chan's update: sums of squares would lose the variance of long runs to rounding.
        num, mean = gaps_s.size, float(gaps_s.mean())
        delta, total = mean - self._mean, self._num + num
        self._squares += float(((gaps_s - mean) ** 2).sum()) + delta * delta * self._num * num / total
        self._mean += delta * num / total
        self._num = total

    def stats(self, wanted: Bools) -> LatencyStats:
        """See `GapStore`; covers every gap, wanted or not."""
        if not self._num:
            return LatencyStats.of_seconds(np.empty(0))
        ranks = np.array(PERCENTILES) / 100.0 * (self._num - 1)
        bins = np.searchsorted(self._counts.cumsum(), ranks, side="right")
        points = LOWEST_S * np.exp((bins + 0.5) / self._scale) * 1000.0
        percentiles = {p: float(value) for p, value in zip(PERCENTILES, points, strict=True)}
        std = math.sqrt(self._squares / self._num)
        return LatencyStats(self._mean * 1000.0, percentiles[50], std * 1000.0, percentiles)

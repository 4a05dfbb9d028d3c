"""Limits that a good request keeps (`Slo`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minedraft.run_data import Floats


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps, in milliseconds; None is no limit. As vLLM's `--goodput`."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def num_good(self, ttft_s: Floats, tpot_s: Floats, e2el_s: Floats) -> int:
        """How many requests keep all limits; NaN, which a request has that lacks a latency, keeps every limit."""
        good = np.ones(len(e2el_s), dtype=np.bool_)
        for limit_ms, values_s in ((self.ttft_ms, ttft_s), (self.tpot_ms, tpot_s), (self.e2el_ms, e2el_s)):
            if limit_ms is not None:
                good &= ~(values_s * 1000.0 > limit_ms)
        return int(good.sum())

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.histogram import HIGHEST_S, LOWEST_S, PERCENTILE_ERROR, Histogram
from minedraft.run_data import PERCENTILES, LatencyStats

SHORTEST_MS = 1000 * LOWEST_S  # no longer than no time at all


def filled(values, parts=3):
    histogram = Histogram()
    for part in np.array_split(np.array(values, dtype=np.float64), parts):
        histogram.add(part)
    return histogram


@given(st.lists(st.one_of(st.just(0.0), st.floats(LOWEST_S, HIGHEST_S)), min_size=1, max_size=50))
def test_every_percentile_is_as_near_as_it_says(values):
    exact, stats = LatencyStats.of_seconds(np.array(values)), filled(values).stats()
    assert stats.mean == pytest.approx(exact.mean, rel=1e-9)
    assert stats.std == pytest.approx(exact.std, rel=1e-6, abs=1e-6 * exact.mean)
    assert stats.median == stats.percentiles[50]
    for p in PERCENTILES:
        assert stats.percentiles[p] == pytest.approx(
            exact.percentiles[p], rel=1.0001 * PERCENTILE_ERROR, abs=SHORTEST_MS
        )


def test_a_known_distribution():
    values = np.random.default_rng(5).lognormal(-3.0, 1.0, 200_000)
    stats = filled(values, parts=40).stats()
    for p in PERCENTILES:
        assert stats.percentiles[p] == pytest.approx(1000 * np.percentile(values, p), rel=PERCENTILE_ERROR)


def test_values_that_are_all_alike_are_exact():
    stats = filled([0.0123] * 9).stats()
    assert stats.median == stats.percentiles[99] == 12.3
    assert stats.std == pytest.approx(0.0, abs=1e-9)


def test_what_is_out_of_range():
    stats = filled([0.0, 1e-9, 1e9]).stats()
    assert stats.mean == pytest.approx(1e12 / 3)
    assert stats.median == pytest.approx(0.0, abs=1e-6)
    assert stats.percentiles[99] > 1e6


def test_nothing_is_zero():
    for histogram in (Histogram(), filled([])):
        assert histogram.stats() == LatencyStats.of_seconds(np.empty(0))

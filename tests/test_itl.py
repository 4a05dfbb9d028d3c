from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.itl import GapHistogram, GapList
from minedraft.run_data import PERCENTILES


def fill(store, gaps, parts=3):
    for part in np.array_split(np.array(gaps, dtype=np.float64), parts):
        store.add(part, np.ones(len(part), dtype=np.int64))
    return store


EVERYBODY = np.ones(4, dtype=np.bool_)


@given(st.lists(st.floats(2e-6, 5e3), min_size=1, max_size=50))
def test_a_histogram_is_within_one_percent_of_the_gap_of_that_rank(gaps):
    stats = fill(GapHistogram(), gaps).stats(EVERYBODY)
    assert stats.mean == pytest.approx(1000 * np.mean(gaps), rel=1e-9)
    assert stats.std == pytest.approx(1000 * np.std(gaps), rel=1e-6, abs=1e-6)
    for p in PERCENTILES:
        exact = np.percentile(gaps, p, method="lower") * 1000
        assert stats.percentiles[p] == pytest.approx(exact, rel=0.0101)


def test_a_histogram_takes_what_is_out_of_range():
    stats = fill(GapHistogram(), [0.0, 1e9]).stats(EVERYBODY)
    assert stats.mean == pytest.approx(1000 * 5e8)
    assert 0 < stats.median < 0.01


def test_empty_stores_say_zero():
    for store in (GapHistogram(), GapList(), fill(GapHistogram(), []), fill(GapList(), [])):
        stats = store.stats(EVERYBODY)
        assert stats.mean == stats.median == stats.std == stats.percentiles[99] == 0.0


def test_a_list_leaves_out_unwanted_requests_and_keeps_order():
    gaps = GapList()
    gaps.add(np.array([0.1, 0.2, 0.9]), np.array([1, 3, 2]))
    gaps.add(np.array([0.3, 0.8]), np.array([3, 2]))
    wanted = np.array([False, True, False, True])
    assert gaps.stats(wanted).mean == pytest.approx(200.0)
    assert gaps.per_request(4)[0] == []
    assert gaps.per_request(4)[3] == pytest.approx([0.2, 0.3])

from __future__ import annotations

import numpy as np
import pytest

from minedraft.itl import GapList


def filled() -> GapList:
    gaps = GapList()
    gaps.add(np.array([0.1, 0.2, 0.9]), np.array([1, 3, 2]))
    gaps.add(np.array([0.3, 0.8]), np.array([3, 2]))
    return gaps


def test_it_leaves_out_unwanted_requests_and_keeps_order():
    gaps = filled()
    assert len(gaps) == 5
    assert gaps.of(np.array([False, True, False, True])) == pytest.approx([0.1, 0.2, 0.3])
    assert gaps.per_request(4)[0] == []
    assert gaps.per_request(4)[3] == pytest.approx([0.2, 0.3])


def test_requests_go_and_the_others_get_new_rows():
    gaps = filled()
    gaps.keep(np.array([0, 0, 1, 2]))
    assert len(gaps) == 4
    assert gaps.per_request(3) == [[], pytest.approx([0.9, 0.8]), pytest.approx([0.2, 0.3])]
    gaps.keep(np.array([0, 0, 0]))
    assert len(gaps) == len(gaps.of(np.ones(1, dtype=np.bool_))) == 0


def test_nothing():
    gaps = GapList()
    gaps.keep(np.zeros(1, dtype=np.int64))
    assert gaps.of(np.ones(4, dtype=np.bool_)).size == 0
    assert gaps.per_request(2) == [[], []]

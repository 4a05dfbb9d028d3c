from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.intervals import BusyTime, length_s, part_after, part_before, union

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)


def points(pairs):
    """The unit cells that integer spans cover."""
    return {cell for start, end in pairs for cell in range(start, end)}


def array(pairs):
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


@given(spans)
def test_union_covers_the_same_cells_once(pairs):
    got = union(array(pairs))
    assert length_s(got) == len(points(pairs))
    assert points([(int(a), int(b)) for a, b in got]) == points(pairs)
    assert (np.diff(got.ravel()) >= 0).all()


@given(spans, spans)
def test_share_is_an_intersection(busy, wanted):
    seconds = sum(end - start for start, end in wanted)
    both = sum(len(points(busy) & points([pair])) for pair in wanted)
    share = BusyTime(array(busy)).share_of(array(wanted))
    assert share == pytest.approx(both / seconds if seconds else 0.0)
    assert 0.0 <= share <= 1.0


@given(spans, st.integers(0, 70))
def test_two_parts_make_the_whole(pairs, moment):
    cells = sorted(cell for pair in pairs for cell in points([pair]))
    early, late = (part(array(pairs), moment).astype(int).tolist() for part in (part_before, part_after))
    assert sorted(cell for pair in early for cell in points([pair])) == [cell for cell in cells if cell < moment]
    assert sorted(cell for pair in late for cell in points([pair])) == [cell for cell in cells if cell >= moment]


def test_never_busy():
    assert BusyTime(array([])).share_of(array([(0, 1)])) == 0.0
    assert BusyTime(array([(0, 1)])).share_of(array([])) == 0.0

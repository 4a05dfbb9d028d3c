"""Spans of time as arrays of (start, end) rows, in seconds: their length, their union, their intersection."""

from __future__ import annotations

import numpy as np

from minedraft.run_data import Floats


def length_s(spans: Floats) -> float:
    """Sum of the lengths."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def union(spans: Floats) -> Floats:
    """The same points covered by disjoint spans in order (some may be empty)."""
    if (spans[1:, 0] >= spans[:-1, 1]).all() and (spans[:, 1] >= spans[:, 0]).all():
        return spans  # as they come from a device that does one thing at a time
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return spans
    # What is covered so far ends at `reach`; each span keeps only what lies beyond.
    reach = np.maximum.accumulate(spans[:, 1])
    start = spans[:, 0].copy()
    start[1:] = np.maximum(start[1:], reach[:-1])
    return np.column_stack([start, np.maximum(start, spans[:, 1])])


def part_before(spans: Floats, moment_s: float) -> Floats:
    """What of the spans lies before a moment."""
    spans = spans[spans[:, 0] < moment_s]
    return np.column_stack([spans[:, 0], np.minimum(spans[:, 1], moment_s)])


def part_after(spans: Floats, moment_s: float) -> Floats:
    """What of the spans lies after a moment."""
    spans = spans[spans[:, 1] > moment_s]
    return np.column_stack([np.maximum(spans[:, 0], moment_s), spans[:, 1]])


class BusyTime:
    """Busy seconds up to any moment, as a piecewise linear function: an intersection is two look-ups."""

    def __init__(self, spans: Floats) -> None:
        spans = union(spans)
        self._times = spans.ravel()
        after = (spans[:, 1] - spans[:, 0]).cumsum()
        self._busy = np.column_stack([np.concatenate([[0.0], after])[:-1], after]).ravel()

    def share_of(self, spans: Floats) -> float:
        """Busy seconds within these spans / their seconds; 0.0 if they have none."""
        total = length_s(spans)
        if total <= 0 or not self._times.size:
            return 0.0
        return float(min(1.0, self.within_s(spans) / total))

    def within_s(self, spans: Floats) -> float:
        """Busy seconds within these spans, which may overlap each other."""
        if not self._times.size:
            return 0.0
        busy = np.interp(spans.ravel(), self._times, self._busy).reshape(-1, 2)
        return float((busy[:, 1] - busy[:, 0]).sum())

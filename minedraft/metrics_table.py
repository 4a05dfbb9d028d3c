"""Folds the entries of verify works, thousands at a time, into one row per request and a few counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from minedraft.itl import GapList
from minedraft.run_data import Bools, Floats, Ints
from minedraft.work import NUM_ZERO_DRAFT_CAUSES

NOBODY: Final = 0  # the row of entries whose request has ended


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of finished verify works in the order in which the core saw them, as columns.

    Attributes:
        row: of the request, or NOBODY.
        num_draft: drafts verified.
        num_accepted: drafts accepted.
        num_committed: tokens committed.
        seen_s: when the core saw the end of the work, in seconds; never decreases.
    """

    row: Ints
    num_draft: Ints
    num_accepted: Ints
    num_committed: Ints
    seen_s: Floats


class Table:
    """What is known per request; see `RunData` for the columns."""

    def __init__(self) -> None:
        self.gaps = GapList()
        self.num_output = np.zeros(0, dtype=np.int64)
        self.first_token_s = np.zeros(0)
        self.last_token_s = np.zeros(0)
        self.num_entries = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_at = np.zeros(0, dtype=np.int64)
        self.zero_draft = np.zeros(NUM_ZERO_DRAFT_CAUSES, dtype=np.int64)
        self.seconds = SecondCounter()

    def add(self, entries: Entries, zero_draft: Ints, num_rows: int, origin_s: float) -> None:
        """Fold entries in.

        Args:
            entries: later ones than those of any call before.
            zero_draft: for each of their works, a row of counts by cause.
            num_rows: rows of requests known by now, NOBODY's included.
            origin_s: where whole seconds are counted from.
        """
        self._grow(num_rows)
        self.num_entries += len(entries.row)
        self.zero_draft += zero_draft.sum(axis=0)
        row, num_committed = entries.row, entries.num_committed
        self._count_drafts(entries.num_draft, entries.num_accepted, row != NOBODY)
        chunks = np.flatnonzero((num_committed > 0) & (row != NOBODY))
        if not len(chunks):
            return
        self.seconds.add(np.floor(entries.seen_s[chunks] - origin_s), num_committed[chunks])
        chunks = chunks[_stable_order(row[chunks])]
        self._note_tokens(row[chunks], entries.seen_s[chunks], num_committed[chunks])

    def keep(self, rows: Ints, new_rows: Ints) -> None:
        """Forget all rows but some.

        Args:
            rows: those that stay, in the order of their new numbers; NOBODY first.
            new_rows: by the old number, the new one, or NOBODY.
        """
        self.num_output = self.num_output[rows]
        self.first_token_s = self.first_token_s[rows]
        self.last_token_s = self.last_token_s[rows]
        self.gaps.keep(new_rows)

    def _grow(self, num_rows: int) -> None:
        more = num_rows - len(self.num_output)
        if more <= 0:
            return
        unknown = np.full(more, np.nan)
        self.num_output = np.concatenate([self.num_output, np.zeros(more, dtype=np.int64)])
        self.first_token_s = np.concatenate([self.first_token_s, unknown])
        self.last_token_s = np.concatenate([self.last_token_s, unknown])

    def _count_drafts(self, num_draft: Ints, num_accepted: Ints, known: Bools) -> None:
        drafts = np.flatnonzero((num_draft > 0) & known)
        if not len(drafts):
            return
        num_draft = num_draft[drafts]
        self.num_drafts += len(drafts)
        self.num_draft_tokens += int(num_draft.sum())
        longest = max(len(self.num_accepted_at), int(num_draft.max()))
        # Accepted drafts are a prefix: the one at position i was accepted wherever more than i were.
        exactly = np.bincount(num_accepted[drafts], minlength=longest + 1)
        more_than = exactly[::-1].cumsum()[::-1][1:]
        more_than[: len(self.num_accepted_at)] += self.num_accepted_at
        self.num_accepted_at = more_than

    def _note_tokens(self, row: Ints, seen_s: Floats, num_committed: Ints) -> None:
        """Token times and gaps, of entries that are grouped by row and each committed something."""
        first = _firsts(row)
        before_s = np.roll(seen_s, 1)
        before_s[first] = self.last_token_s[row[first]]
        opening = np.isnan(before_s)
        self.first_token_s[row[opening]] = seen_s[opening]
        self.gaps.add((seen_s - before_s)[~opening], row[~opening])
        last = np.roll(first, -1)
        self.last_token_s[row[last]] = seen_s[last]
        self.num_output[row[first]] += np.add.reduceat(num_committed, np.flatnonzero(first))


class SecondCounter:
    """The largest sum of counts within one whole second, over a stream in order of time.

    Attributes:
        most: that sum.
    """

    def __init__(self) -> None:
        self.most = 0
        self._second = -np.inf
        self._count = 0

    def add(self, seconds: Floats, counts: Ints) -> None:
        """Take counts with their whole seconds, which never decrease."""
        starts = np.flatnonzero(_firsts(seconds))
        sums = np.add.reduceat(counts, starts)
        if seconds[0] == self._second:
            sums[0] += self._count
        self.most = max(self.most, int(sums.max()))
        self._second, self._count = float(seconds[-1]), int(sums[-1])


def _firsts(values: Ints | Floats) -> Bools:
    """Where a run of equal values begins."""
    first = np.empty(len(values), dtype=np.bool_)
    first[:1] = True
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return first


def _stable_order(row: Ints) -> Ints:
    """Positions sorted by row, in order of time within a row."""
    low = int(row.min())
    if int(row.max()) - low < 1 << 16:
        # Rows within one flush lie close together, and numpy sorts 16-bit keys by radix: five times as fast.
        return np.argsort((row - low).astype(np.uint16), kind="stable")
    return np.argsort(row, kind="stable")

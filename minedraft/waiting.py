"""The waiting room: an ordered queue in which an abort costs nothing and a look at the head is O(1)."""

from __future__ import annotations

import heapq

from minedraft.request import FINISHED, PREEMPTED
from minedraft.sequence import SequenceState

Rank = tuple[float, ...]


class WaitingQueue:
    """Orders sequences by (policy rank, preempted first, arrival): I15.

    A sequence that finished while it waited is skipped when it comes up, and swept out once such dead entries are
    the majority.

    Attributes:
        num_live: how many wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, bool, int, SequenceState]] = []
        self._num_dead = 0
        self.num_live = 0

    def push(self, seq: SequenceState, rank: Rank) -> None:
        """Add a sequence; among equal ranks a preempted one goes before those that never started."""
        fresh = seq.status is not PREEMPTED
        heapq.heappush(self._heap, (rank, fresh, seq.arrival_index, seq))
        self.num_live += 1

    def head(self) -> SequenceState | None:
        """The next to be admitted, left in place."""
        heap = self._heap
        while heap:
            seq = heap[0][3]
            if seq.status is not FINISHED:
                return seq
            heapq.heappop(heap)
            self._num_dead -= 1
        return None

    def pop(self) -> None:
        """Take the head out; call only after `head` returned it."""
        heapq.heappop(self._heap)
        self.num_live -= 1

    def note_dead(self) -> None:
        """Say that a queued sequence has just finished (was aborted)."""
        self._num_dead += 1
        self.num_live -= 1
        if self._num_dead * 2 > len(self._heap) + 16:
            self._heap = [item for item in self._heap if item[3].status is not FINISHED]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def live(self) -> list[SequenceState]:
        """Everybody who waits, in no particular order. O(n); for tests."""
        return [item[3] for item in self._heap if item[3].status is not FINISHED]

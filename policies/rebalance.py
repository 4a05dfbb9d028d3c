"""Rebalancing: which requests change sub-batch. A moved request sits out one round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from minedraft.batch import IDLE_PHASE, BatchView
from minedraft.policy import Move


class Never:
    """The paper's rule: nobody moves. Departures can leave the batches lopsided for good."""

    def moves(self, batches: Sequence[BatchView]) -> Sequence[Move]:
        """Nothing."""
        return ()


def _even_out(batches: Sequence[BatchView], source: int, target: int) -> Sequence[Move]:
    """Move the youngest members of `source` to `target` until the two differ by at most one."""
    surplus = batches[source].num_requests - batches[target].num_requests
    room = batches[target].max_size - batches[target].num_requests
    count = min(surplus // 2, room)
    if count <= 0:
        return ()
    members = list(batches[source].members())
    return [Move(seq, target) for seq in islice(reversed(members), count)]


class SplitOnEmpty:
    """When a batch is empty, half of the largest IDLE batch moves over, so that drafting stays hidden."""

    def moves(self, batches: Sequence[BatchView]) -> Sequence[Move]:
        """A split, once an empty batch faces an IDLE one with two requests or more."""
        empty = -1
        for i, batch in enumerate(batches):
            if not batch.num_requests:
                empty = i
                break
        if empty < 0:  # nearly always, and this is asked at every step
            return ()
        largest, most = -1, 1
        for i, batch in enumerate(batches):
            num_requests = batch.num_requests
            if num_requests > most and batch.phase is IDLE_PHASE:
                largest, most = i, num_requests
        return _even_out(batches, largest, empty) if largest >= 0 else ()


class KeepWithin:
    """Whenever an IDLE batch holds over `difference` more requests than the smallest, even the two out.

    Args:
        difference: tolerated difference, at least 1.
    """

    def __init__(self, difference: int = 2) -> None:
        if difference < 1:
            raise ValueError(f"difference is {difference}, must be >= 1")
        self.difference = difference

    def moves(self, batches: Sequence[BatchView]) -> Sequence[Move]:
        """At most one pair of batches is evened out at a time."""
        smallest = min(range(len(batches)), key=lambda i: batches[i].num_requests)
        idle = [i for i, batch in enumerate(batches) if batch.phase is IDLE_PHASE]
        if not idle:
            return ()
        largest = max(idle, key=lambda i: batches[i].num_requests)
        gap = batches[largest].num_requests - batches[smallest].num_requests
        if gap <= self.difference and not (batches[smallest].num_requests == 0 and gap > 1):
            return ()
        return _even_out(batches, largest, smallest)

"""Assignment: which sub-batch a new or re-admitted request joins."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from minedraft.batch import IDLE_PHASE, BatchView
from minedraft.sequence import SequenceView


class FewestRequests:
    """The batch with the fewest requests, an IDLE one among equals. Keeps sizes within one of each other."""

    def choose_batch(self, seq: SequenceView, batches: Sequence[BatchView]) -> int:
        """Smallest by `num_requests`."""
        best, fewest, is_idle = 0, sys.maxsize, False
        for i, batch in enumerate(batches):
            num_requests = batch.num_requests
            if num_requests > fewest or num_requests >= batch.max_size:
                continue
            idle = batch.phase is IDLE_PHASE
            if num_requests < fewest or (idle and not is_idle):
                best, fewest, is_idle = i, num_requests, idle
        return best


class LeastTokens:
    """The batch with the fewest committed tokens: evens out context lengths, not heads."""

    def choose_batch(self, seq: SequenceView, batches: Sequence[BatchView]) -> int:
        """Smallest by `num_tokens`."""
        return min(range(len(batches)), key=lambda i: (not batches[i].has_room, batches[i].num_tokens, i))


class InPhase:
    """The paper's rule (arXiv 2603.18016, section 5.1): join the batch that is drafted next.

    While nothing is under way the batches are filled alternately. Later a request joins whichever batch is IDLE (so
    that it is never verified without drafts), whatever the sizes; balance is then kept only because a request that
    leaves is replaced in the same batch.
    """

    def choose_batch(self, seq: SequenceView, batches: Sequence[BatchView]) -> int:
        """The longest IDLE batch; the smaller one while all are IDLE; the fewest requests if none is."""
        open_ = [i for i in range(len(batches)) if batches[i].has_room]
        idle = [i for i in open_ if batches[i].phase is IDLE_PHASE]
        if not idle or len(idle) == len(batches):
            return min(idle or open_, key=lambda i: (batches[i].num_requests, i))
        return min(idle, key=lambda i: batches[i].phase_stamp)

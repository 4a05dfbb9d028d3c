"""Draft length: how many tokens to draft for a request in a round."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from minedraft.batch import BatchView
from minedraft.policy import LoadView
from minedraft.sequence import SequenceView


class Fixed:
    """The same k for everybody, within each request's limit.

    Args:
        k: drafts per round; None means the scheduler's `num_speculative_tokens`.
    """

    def __init__(self, k: int | None = None) -> None:
        if k is not None and k < 0:
            raise ValueError(f"k is {k}, must be >= 0")
        self.k = k

    def num_draft_tokens(self, seq: SequenceView, batch: BatchView, load: LoadView) -> int:
        """The constant."""
        return seq.max_draft_tokens if self.k is None else self.k

    def num_draft_tokens_of_all(self, batch: BatchView, load: LoadView) -> int:
        """The constant."""
        return sys.maxsize if self.k is None else self.k


class ByBatchSize:
    """k from a table over the size of the sub-batch, like vLLM's `num_speculative_tokens_per_batch_size`.

    Args:
        table: (largest size, k) pairs in order of size, or the same as text: `"8:5/16:3/64:1"`. Above the last size
            nothing is drafted.

    Raises:
        ValueError: sizes don't rise, or a size or k is out of range.
    """

    def __init__(self, table: str | Sequence[Sequence[int]] = ((8, 5), (16, 4), (32, 3), (64, 1))) -> None:
        if isinstance(table, str | int | float):  # an option such as table=8 is read as a number
            try:
                table = [[int(part) for part in row.split(":")] for row in str(table).split("/")]
            except ValueError:
                raise ValueError(f"table is {table!r}: write it as size:k/size:k, for example 8:5/16:3") from None
        rows = [tuple(row) if isinstance(row, Sequence) else (row,) for row in table]
        if not rows or any(len(row) != 2 or not all(isinstance(part, int) for part in row) for row in rows):
            raise ValueError(f"table is {table!r}: every row needs a size and a k, both whole numbers")
        previous = 0
        for size, k in rows:
            if size <= previous:
                raise ValueError(f"table: size {size} follows {previous}; sizes must rise and be >= 1")
            if k < 0:
                raise ValueError(f"table: k is {k} at size {size}, must be >= 0")
            previous = size
        self.rows = rows

    def num_draft_tokens(self, seq: SequenceView, batch: BatchView, load: LoadView) -> int:
        """First row that the batch fits in."""
        return self.num_draft_tokens_of_all(batch, load)

    def num_draft_tokens_of_all(self, batch: BatchView, load: LoadView) -> int:
        """The same: the request doesn't matter."""
        num_requests = batch.num_requests
        for size, k in self.rows:
            if num_requests <= size:
                return k
        return 0

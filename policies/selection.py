"""Selection: which drafts are worth verifying."""

from __future__ import annotations

from collections.abc import Sequence

from minedraft.policy import Draft


class All:
    """Everything that was drafted; beyond the capacity the last requests of the batch lose theirs."""

    keeps_all = True

    def select(self, drafts: Sequence[Draft], capacity: int) -> Sequence[int]:
        """All, in order, until the capacity is spent."""
        kept = []
        for draft in drafts:
            count = min(draft.num_drafted, capacity)
            capacity -= count
            kept.append(count)
        return kept

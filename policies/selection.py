"""Selection: which drafts are worth verifying."""

from __future__ import annotations

from collections.abc import Sequence

from minedraft.policy import Draft


class All:
    """Everything that was drafted; if that is over the capacity, everybody's first drafts before anybody's second."""

    keeps_all = True

    def select(self, drafts: Sequence[Draft], capacity: int) -> Sequence[int]:
        """All, or an even share."""
        kept = [0] * len(drafts)
        for position in range(max(draft.num_drafted for draft in drafts)):
            for i, draft in enumerate(drafts):
                if capacity and draft.num_drafted > position:
                    kept[i] += 1
                    capacity -= 1
        return kept

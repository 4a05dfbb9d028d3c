"""From works to forward passes: prices any cost model that can say how long one pass takes (`StepModel`).

A verification is one pass over all its entries. Drafting k tokens is k passes: the first ingests every new token, of
entries that only ingest too, and yields the first draft; each further pass takes one token of every entry that still
drafts. The context that grows meanwhile is priced at its mean over those passes.

A pass is described by five sums over its entries, where an entry computes q tokens behind c tokens of context:

* `num_seqs`: entries;
* `num_tokens`: sum of q, the rows of every GEMM;
* `context`: sum of c, KV positions that are read;
* `num_pairs`: sum of q c + q (q + 1) / 2, pairs of query and key (a token attends to itself and all before it);
* `num_logits`: rows of the output head: every position of a verification, the last of a prompt.

They cost a few C loops over the columns; the step model itself is asked in constant time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from operator import add, mul
from typing import Protocol

from minedraft.work import DraftWork, VerifyWork, WorldError


class CostError(WorldError):
    """A work can't be priced: nothing was measured there, or nobody said what the drafter is. One line."""


class StepModel(Protocol):
    """Seconds of one forward pass; see the module's docstring for the arguments."""

    def step_s(self, num_seqs: int, num_tokens: int, context: float, num_pairs: float, num_logits: int) -> float:
        """Seconds, finite, at least 0. Raises `CostError` for a pass that it can't price."""
        ...


@dataclass(frozen=True, slots=True)
class StepCost:
    """A `minedraft.sim.cost.CostModel` made of two step models.

    Attributes:
        target: passes of the target.
        drafter: passes of the drafter; None if there is none (mode ar), and then drafting is an error.
        later: its passes after the first, where they differ from that (an EAGLE-3 head joins the target's hidden states
            in the first only).
    """

    target: StepModel
    drafter: StepModel | None = None
    later: StepModel | None = None

    def verify_s(self, work: VerifyWork) -> float:
        """One pass over all entries."""
        num_new, num_draft, num_computed = work.num_new, work.num_draft, work.num_computed
        num_seqs = len(num_new)
        if not num_seqs:
            return 0.0
        new, drafts, context = sum(num_new), sum(num_draft), sum(num_computed)
        if new == num_seqs:  # nobody has a prompt chunk
            if not drafts:
                return self.target.step_s(num_seqs, num_seqs, context, context + num_seqs, num_seqs)
            width = 1 + num_draft[0]
            if drafts == num_seqs * (width - 1) and num_draft.count(width - 1) == num_seqs:
                tokens = num_seqs * width
                return self.target.step_s(num_seqs, tokens, context, width * context + tokens * (width + 1) / 2, tokens)
            # Pairs of one query per sequence, and k c + 3 k / 2 + k k / 2 more for k drafts.
            more = _pairs(num_draft, num_computed) + drafts
            return self.target.step_s(
                num_seqs, num_seqs + drafts, context, context + num_seqs + more, num_seqs + drafts
            )
        widths = tuple(map(add, num_new, num_draft))
        num_logits = drafts + sum(work.is_last)
        return self.target.step_s(num_seqs, new + drafts, context, _pairs(widths, num_computed), num_logits)

    def draft_s(self, work: DraftWork) -> float:
        """As many passes as the longest draft is long, or one that only ingests."""
        if self.drafter is None:
            raise CostError("cost.draft: is missing, and a drafter is asked for; add [cost.draft], or run with mode ar")
        num_new, num_draft, num_computed = work.num_new, work.num_draft, work.num_computed
        num_seqs = len(num_new)
        if not num_seqs:
            return 0.0
        step_s = self.drafter.step_s
        new, context = sum(num_new), sum(num_computed)
        if new == num_seqs:
            pairs: float = context + num_seqs
        else:
            pairs = _pairs(num_new, num_computed)
        num_idle = num_draft.count(0)
        first_s = step_s(num_seqs, new, context, pairs, num_seqs - num_idle)
        longest = max(num_draft)
        if longest < 2:
            return first_s
        shortest = num_draft[0]
        if shortest == longest and num_draft.count(longest) == num_seqs:
            return first_s + self._further_s(num_seqs, context + new, longest - 1)
        return first_s + self._ragged_s(work)

    def _further_s(self, num_seqs: int, context: int, num_passes: int, num_before: int = 0) -> float:
        """Passes of one token for everybody, the first of them behind `context` + `num_before` tokens each."""
        drafter = self.later or self.drafter
        assert drafter is not None
        mean = context + num_seqs * (2 * num_before + num_passes - 1) / 2
        return num_passes * drafter.step_s(num_seqs, num_seqs, mean, mean + num_seqs, num_seqs)

    def _ragged_s(self, work: DraftWork) -> float:
        """Passes after the first where drafts differ in length: those between two lengths have the same entries."""
        num_draft = work.num_draft
        lens = tuple(map(add, work.num_computed, work.num_new))
        total_s, done = 0.0, 1
        for length in sorted(set(num_draft)):
            if length > 1:
                taking_part = tuple(map(length.__le__, num_draft))
                context = sum(compress(lens, taking_part))
                total_s += self._further_s(taking_part.count(True), context, length - done, done - 1)
                done = length
        return total_s


def _pairs(widths: tuple[int, ...], num_computed: tuple[int, ...]) -> float:
    """Sum of q c + q (q + 1) / 2 over the entries."""
    read: int = sum(map(mul, widths, num_computed))
    squares: int = sum(map(mul, widths, widths))
    return read + (squares + sum(widths)) / 2

"""Preemption: who gives way when a KV pool is short, and what it loses."""

from __future__ import annotations

from collections.abc import Sequence

from minedraft.policy import KVNeed, PreemptionMode, Victim
from minedraft.sequence import SequenceView


def _cheapest_mode(need: KVNeed) -> PreemptionMode:
    """Draft blocks can be had without losing text progress; target blocks can't."""
    return PreemptionMode.DROP_DRAFT_KV if need.pool == "draft" else PreemptionMode.RECOMPUTE


class Newest:
    """The latest arrival gives way (vLLM's and the paper's rule)."""

    def choose_victim(self, candidates: Sequence[SequenceView], need: KVNeed) -> Victim:
        """Largest arrival index."""
        return Victim(max(candidates, key=lambda seq: seq.arrival_index), _cheapest_mode(need))


class LeastUrgent:
    """The least urgent one gives way, the latest arrival among equals (vLLM's rule with priorities).

    Lower priority numbers are more urgent, as in the admission policy `priority`.
    """

    def choose_victim(self, candidates: Sequence[SequenceView], need: KVNeed) -> Victim:
        """Largest (priority, arrival index)."""
        victim = max(candidates, key=lambda seq: (seq.request.priority, seq.arrival_index))
        return Victim(victim, _cheapest_mode(need))


class CostAware:
    """The one whose lost KV is cheapest to compute again, among those that free enough at a stroke.

    If nobody alone frees enough, the one that frees the most. Ties go to the latest arrival.
    """

    def choose_victim(self, candidates: Sequence[SequenceView], need: KVNeed) -> Victim:
        """Fewest computed tokens with enough blocks."""
        draft = need.pool == "draft"

        def held(seq: SequenceView) -> int:
            return seq.draft_capacity_tokens if draft else seq.target_capacity_tokens

        def cost(seq: SequenceView) -> int:
            return seq.num_draft_computed_tokens if draft else seq.num_computed_tokens

        wanted = need.num_blocks * need.block_size
        enough = [seq for seq in candidates if held(seq) >= wanted]
        if enough:
            seq = min(enough, key=lambda seq: (cost(seq), -seq.arrival_index))
        else:
            seq = max(candidates, key=lambda seq: (held(seq), seq.arrival_index))
        return Victim(seq, _cheapest_mode(need))

"""Admission: in which order waiting requests start."""

from __future__ import annotations

from minedraft.sequence import SequenceView


class Fcfs:
    """First come, first served."""

    def rank(self, seq: SequenceView) -> float:
        """Everybody alike: arrival decides."""
        return 0.0


class Priority:
    """The request's own priority, lower first (vLLM's convention); arrival among equals."""

    def rank(self, seq: SequenceView) -> float:
        """The priority."""
        return float(seq.request.priority)


class ShortestPrompt:
    """Shortest known context first. Long prompts can starve under overload: meant for comparison."""

    def rank(self, seq: SequenceView) -> float:
        """Committed tokens, which is what a re-admission has to compute."""
        return float(seq.num_tokens)

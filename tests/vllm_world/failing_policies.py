"""Policies that fail in the middle of a run, each in its own way: by an exception, or by an illegal decision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from minedraft.policy import Mode, PolicyError, PreemptionMode, Victim


class _Fails:
    """Answers as it should a few times, and never again."""

    def __init__(self, patience: int = 6) -> None:
        self._asked = itertools.count()
        self._patience = patience

    def _answer(self, good: Callable[[], Any], bad: Callable[[], Any]) -> Any:
        return good() if next(self._asked) < self._patience else bad()


def _raise(error: Exception | None = None) -> Any:
    raise error or RuntimeError("boom")


class Admission(_Fails):
    def rank(self, seq: Any) -> Any:
        return self._answer(lambda: 0.0, lambda: float("nan"))


class Assignment(_Fails):
    def choose_batch(self, seq: Any, batches: Sequence[Any]) -> Any:
        return self._answer(lambda: min(batches, key=lambda batch: batch.num_requests).index, lambda: 7)


class Rebalance(_Fails):
    """It raises what the core itself would, without saying whose it is."""

    def moves(self, batches: Sequence[Any]) -> Any:
        return self._answer(lambda: (), lambda: _raise(PolicyError("I can't")))


class DraftLength(_Fails):
    def num_draft_tokens(self, seq: Any, batch: Any, load: Any) -> Any:
        return self._answer(lambda: 2, _raise)


class DraftLengthOfAll(DraftLength):
    def num_draft_tokens_of_all(self, batch: Any, load: Any) -> Any:
        return self._answer(lambda: 2, lambda: -3)


class Selection(_Fails):
    """It needs probabilities; what takes its place doesn't."""

    def select(self, drafts: Sequence[Any], capacity: int) -> Any:
        assert all(len(draft.probs) == draft.num_drafted for draft in drafts)
        return self._answer(lambda: [draft.num_drafted for draft in drafts], lambda: [99] * len(drafts))


class Preemption(_Fails):
    def choose_victim(self, candidates: Sequence[Any], need: Any) -> Any:
        return self._answer(lambda: Victim(candidates[-1], PreemptionMode.RECOMPUTE), _raise)


class ChoosesMode(_Fails):
    def choose_mode(self, load: Any) -> Any:
        return self._answer(lambda: Mode.PSD, lambda: "fast")

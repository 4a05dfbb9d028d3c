"""From works to passes: the five sums and the passes of a draft, against entry-by-entry arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.sim.steps import CostError, StepCost
from minedraft.work import DraftWork, VerifyWork, WorldError


@dataclass(frozen=True)
class Weighted:
    """A step model linear in the five sums, with weights that tell them apart."""

    seqs: float = 1e-1
    tokens: float = 1e-3
    context: float = 1e-6
    pairs: float = 1e-9
    logits: float = 1e-2
    base: float = 1.0

    def step_s(self, num_seqs: int, num_tokens: int, context: float, num_pairs: float, num_logits: int) -> float:
        """A weighted sum."""
        return (
            self.base
            + self.seqs * num_seqs
            + self.tokens * num_tokens
            + self.context * context
            + self.pairs * num_pairs
            + self.logits * num_logits
        )


MODEL = Weighted()
COST = StepCost(MODEL, MODEL)


def pairs(q: int, c: int) -> int:
    """Query i of q attends to c tokens, those before it, and itself."""
    return sum(c + i + 1 for i in range(q))


def verify(entries: list[tuple[int, int, int, bool]]) -> VerifyWork:
    n = len(entries)
    computed, new, drafts, last = zip(*entries, strict=True) if entries else ((), (), (), ())
    columns = tuple(f"r{i}" for i in range(n)), (0,) * n, (0,) * n
    return VerifyWork(0, 0, *columns, computed, new, drafts, last, (0,) * 13, (n,), ())


def draft(entries: list[tuple[int, int, int]]) -> DraftWork:
    n = len(entries)
    computed, new, drafts = zip(*entries, strict=True) if entries else ((), (), ())
    columns = tuple(f"r{i}" for i in range(n)), (0,) * n, (0,) * n
    return DraftWork(0, 0, *columns, computed, new, drafts, ())


def verify_s(entries: list[tuple[int, int, int, bool]]) -> float:
    widths = [(new + k, c) for c, new, k, _ in entries]
    logits = sum(k + last for _, _, k, last in entries)
    context = sum(c for _, c in widths)
    return MODEL.step_s(len(entries), sum(q for q, _ in widths), context, sum(pairs(q, c) for q, c in widths), logits)


def draft_s(entries: list[tuple[int, int, int]]) -> float:
    context, tokens = sum(c for c, _, _ in entries), sum(new for _, new, _ in entries)
    first_pairs = sum(pairs(new, c) for c, new, _ in entries)
    total = MODEL.step_s(len(entries), tokens, context, first_pairs, sum(k > 0 for _, _, k in entries))
    for number in range(2, max(k for _, _, k in entries) + 1):
        lens = [c + new + number - 2 for c, new, k in entries if k >= number]
        total += MODEL.step_s(len(lens), len(lens), sum(lens), sum(pairs(1, c) for c in lens), len(lens))
    return total


COUNTS = st.integers(0, 5000)


@given(st.lists(st.tuples(COUNTS, st.integers(1, 600), st.integers(0, 6), st.booleans()), min_size=1, max_size=8))
def test_any_verification(entries: list[tuple[int, int, int, bool]]) -> None:
    entries = [(c, new, k, last or k > 0 or new == 1) for c, new, k, last in entries]
    assert COST.verify_s(verify(entries)) == pytest.approx(verify_s(entries), rel=1e-12)


@given(st.lists(COUNTS, min_size=1, max_size=8), st.integers(0, 6))
def test_a_verification_of_equal_width(contexts: list[int], k: int) -> None:
    entries = [(c, 1, k, True) for c in contexts]
    assert COST.verify_s(verify(entries)) == pytest.approx(verify_s(entries), rel=1e-12)


@given(st.lists(st.tuples(COUNTS, st.integers(1, 600), st.integers(0, 6)), min_size=1, max_size=8))
def test_any_draft(entries: list[tuple[int, int, int]]) -> None:
    assert COST.draft_s(draft(entries)) == pytest.approx(draft_s(entries), rel=1e-12)


@given(st.lists(st.tuples(COUNTS, st.integers(1, 3)), min_size=1, max_size=8), st.integers(0, 6))
def test_a_draft_of_equal_length(entries: list[tuple[int, int]], k: int) -> None:
    alike = [(c, new, k) for c, new in entries]
    assert COST.draft_s(draft(alike)) == pytest.approx(draft_s(alike), rel=1e-12)


def test_works_without_entries_take_no_time() -> None:
    assert COST.verify_s(verify([])) == COST.draft_s(draft([])) == 0.0


def test_drafting_without_a_drafter_is_one_line() -> None:
    with pytest.raises(CostError, match=r"cost.draft: is missing.*add \[cost.draft\]") as caught:
        StepCost(MODEL).draft_s(draft([(9, 1, 3)]))
    assert isinstance(caught.value, WorldError)  # which commands report in one line
    assert "\n" not in str(caught.value)

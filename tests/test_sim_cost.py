"""Cost models: the formulas of their docstrings on hand-made works."""

from __future__ import annotations

from dataclasses import fields

import pytest

from minedraft.sim.cost import PAPER_MEDIANS, ConstantCost, LinearCost, paper_cost
from minedraft.work import DraftWork, VerifyWork


def verify(num_computed: list[int], num_new: list[int], num_draft: list[int]) -> VerifyWork:
    n = len(num_new)
    columns = tuple(f"r{i}" for i in range(n)), (0,) * n, (0,) * n, tuple(num_computed), tuple(num_new)
    return VerifyWork(0, 0, *columns, tuple(num_draft), (True,) * n, (0,) * 13, (n,), ())


def draft(num_computed: list[int], num_new: list[int], num_draft: list[int]) -> DraftWork:
    n = len(num_new)
    columns = tuple(f"r{i}" for i in range(n)), (0,) * n, (0,) * n, tuple(num_computed), tuple(num_new)
    return DraftWork(0, 0, *columns, tuple(num_draft), ())


LINEAR = LinearCost(
    verify_base_s=1.0,
    verify_per_seq_s=0.1,
    verify_per_token_s=0.01,
    verify_per_context_token_s=0.001,
    prefill_base_s=2.0,
    prefill_per_seq_s=0.2,
    prefill_per_token_s=0.02,
    prefill_per_context_token_s=0.002,
    draft_base_s=3.0,
    draft_per_seq_s=0.3,
    draft_per_token_s=0.03,
    draft_per_context_token_s=0.003,
    draft_prefill_base_s=4.0,
    draft_prefill_per_seq_s=0.4,
    draft_prefill_per_token_s=0.04,
    draft_prefill_per_context_token_s=0.004,
)


def test_linear_verification() -> None:
    work = verify([100, 50], [1, 1], [3, 0])
    assert LINEAR.verify_s(work) == pytest.approx(1.0 + 0.2 + 0.01 * 5 + 0.001 * 150)


def test_linear_prefill() -> None:
    work = verify([0, 64], [64, 32], [0, 0])
    assert LINEAR.verify_s(work) == pytest.approx(2.0 + 0.4 + 0.02 * 96 + 0.002 * 64)


def test_linear_mixed_step_has_one_base() -> None:
    work = verify([100, 0], [1, 64], [3, 0])
    assert LINEAR.verify_s(work) == pytest.approx(1.0 + 0.1 + 0.01 * 4 + 0.001 * 100 + 0.2 + 0.02 * 64)


def test_linear_drafting() -> None:
    # Two passes for the first, one for the second; one token ingested beyond those that feed the first pass.
    work = draft([100, 50], [2, 1], [2, 1])
    assert LINEAR.draft_s(work) == pytest.approx(3.0 * 2 + 0.33 * 3 + 0.003 * (200 + 50) + 0.04 * 1)


def test_linear_drafting_with_ingestion_riding_along() -> None:
    work = draft([100, 0], [1, 64], [2, 0])
    assert LINEAR.draft_s(work) == pytest.approx(3.0 * 2 + 0.33 * 2 + 0.003 * 200 + 0.4 + 0.04 * 64)


def test_linear_ingestion_only() -> None:
    work = draft([10], [64], [0])
    assert LINEAR.draft_s(work) == pytest.approx(4.0 + 0.4 + 0.04 * 64 + 0.004 * 10)


def test_constant_cost() -> None:
    cost = ConstantCost(0.04, 0.002, draft_base_s=0.001, draft_per_token_s=0.016, prefill_s=0.06, draft_ingest_s=0.03)
    assert cost.verify_s(verify([9, 9], [1, 1], [3, 1])) == pytest.approx(0.046)
    assert cost.verify_s(verify([9, 0], [1, 7], [0, 0])) == pytest.approx(0.04)
    assert cost.verify_s(verify([0], [7], [0])) == 0.06
    assert cost.draft_s(draft([9, 9], [1, 2], [3, 4])) == pytest.approx(0.065)
    assert cost.draft_s(draft([0], [9], [0])) == 0.03


@pytest.mark.parametrize("drafter", PAPER_MEDIANS)
@pytest.mark.parametrize("k", [3, 4])
def test_paper_cost_goes_through_the_medians(drafter: str, k: int) -> None:
    cost, medians = paper_cost(drafter), PAPER_MEDIANS[drafter][k]
    assert cost.verify_s(verify([9], [1], [k])) == pytest.approx(medians.verify_s)
    assert cost.draft_s(draft([9], [1], [k])) == pytest.approx(medians.draft_s)


def test_unknown_drafter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gpt-2'; known: qwen3-0.6b"):
        paper_cost("gpt-2")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", [field.name for field in fields(LinearCost)])
def test_linear_refuses_bad_seconds_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"LinearCost.{name} is"):
        LinearCost(**{name: value})


def test_constant_refuses_bad_seconds_by_name() -> None:
    with pytest.raises(ValueError, match=r"ConstantCost.draft_base_s is -0.1"):
        ConstantCost(1.0, draft_base_s=-0.1)

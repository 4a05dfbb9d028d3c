"""Cost models: how many seconds a device group needs for a work.

Shared vocabulary, so that all models and their users mean the same thing:

* A *verify entry* computes one committed token and checks its drafts behind it (`num_new == 1`): `1 +
  num_draft` positions. k = 0 is a plain decoding step.
* A *prompt entry* computes more than one committed token (`num_new > 1`): a prompt chunk, or the
  recomputation after a preemption. (A chunk of exactly one token is therefore charged as a verify entry; it
  costs the same work.)
* A step is a *verification* if it has at least one verify entry, else a *prefill*.
* The drafter drafts k tokens in k sequential passes (or otherwise: `minedraft.sim.methods`). A drafting entry's
  last new token feeds its first pass, as each drafted token feeds the next; all other new tokens are *ingested*,
  which is prefill of the drafter.

All figures are seconds. The columns of a work are reduced with `sum`, `count` and `map`, which run in C: a
cost model is asked once per work on the simulator's hot path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import mul
from typing import Final, Protocol

from minedraft.work import DraftWork, VerifyWork


class CostModel(Protocol):
    """Seconds on the device for a work; called once, when the work is submitted."""

    def draft_s(self, work: DraftWork) -> float:
        """Seconds the drafter needs for `work`; finite, at least 0."""
        ...

    def verify_s(self, work: VerifyWork) -> float:
        """Seconds the target needs for `work`; finite, at least 0."""
        ...


def _check_seconds(model: ConstantCost | LinearCost) -> None:
    """Refuse a negative, infinite or NaN field, naming it."""
    for field in fields(model):
        value = getattr(model, field.name)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{type(model).__name__}.{field.name} is {value}, must be a finite number of seconds >= 0")


def _dot(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    total: int = sum(map(mul, left, right))
    return total


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """Stage times that do not depend on the batch: the setting of the paper's theory and Nsight medians.

    With k the largest `num_draft` in the work::

        draft:  t(k) = draft_base_s + draft_per_token_s * k     (draft_ingest_s if nothing is drafted)
        verify: V(k) = verify_base_s + verify_per_token_s * k   (prefill_s if the step is a prefill)

    The constant V and t of Theorem 1 are `verify_base_s` and `draft_base_s` alone.

    Attributes:
        verify_base_s: V(0), seconds per verification step.
        verify_per_token_s: extra seconds per draft position.
        draft_base_s: constant part of t(k), seconds per drafting work.
        draft_per_token_s: seconds per sequential drafting pass.
        prefill_s: seconds of a target step that holds prompt entries only.
        draft_ingest_s: seconds of a drafter work that drafts nothing.

    Raises:
        ValueError: a field is negative, infinite or NaN.
    """

    verify_base_s: float
    verify_per_token_s: float = 0.0
    draft_base_s: float = 0.0
    draft_per_token_s: float = 0.0
    prefill_s: float = 0.0
    draft_ingest_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self)

    def draft_s(self, work: DraftWork) -> float:
        """t(k) of the class docstring."""
        k = max(work.num_draft, default=0)
        return self.draft_base_s + self.draft_per_token_s * k if k else self.draft_ingest_s

    def verify_s(self, work: VerifyWork) -> float:
        """V(k) of the class docstring."""
        if 1 not in work.num_new:
            return self.prefill_s
        return self.verify_base_s + self.verify_per_token_s * max(work.num_draft)


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Base + per sequence + per new token + per context token, at separate rates for four kinds of work.

    Verification (at least one verify entry)::

        verify_base_s + verify_per_seq_s * entries + verify_per_token_s * sum(1 + num_draft)
                      + verify_per_context_token_s * context

    over verify entries; *context* is the sum of `num_computed` over all entries, i.e. the KV positions read.
    Prompt entries riding along add `prefill_per_seq_s` each and `prefill_per_token_s` per new token, but no
    second base.

    Prefill (prompt entries only)::

        prefill_base_s + prefill_per_seq_s * entries + prefill_per_token_s * sum(num_new)
                       + prefill_per_context_token_s * context

    Drafting (some `num_draft > 0`), k_max sequential passes in which entry i takes part in the first k_i::

        draft_base_s * k_max + (draft_per_seq_s + draft_per_token_s) * sum(k_i)
                             + draft_per_context_token_s * sum(k_i * num_computed_i)

    (a sequence contributes one token to each of its passes, so for the drafter the two rates mean the same
    and one may be left at 0), and ingested tokens add `draft_prefill_per_token_s` each, and
    `draft_prefill_per_seq_s` per entry that only ingests, but no second base. A work that drafts nothing::

        draft_prefill_base_s + draft_prefill_per_seq_s * entries + draft_prefill_per_token_s * sum(num_new)
                             + draft_prefill_per_context_token_s * context

    Raises:
        ValueError: a field is negative, infinite or NaN.
    """

    verify_base_s: float = 0.0
    verify_per_seq_s: float = 0.0
    verify_per_token_s: float = 0.0
    verify_per_context_token_s: float = 0.0
    prefill_base_s: float = 0.0
    prefill_per_seq_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_context_token_s: float = 0.0
    draft_base_s: float = 0.0
    draft_per_seq_s: float = 0.0
    draft_per_token_s: float = 0.0
    draft_per_context_token_s: float = 0.0
    draft_prefill_base_s: float = 0.0
    draft_prefill_per_seq_s: float = 0.0
    draft_prefill_per_token_s: float = 0.0
    draft_prefill_per_context_token_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self)

    def verify_s(self, work: VerifyWork) -> float:
        """Verification or prefill of the class docstring."""
        num_new = work.num_new
        num_verify = num_new.count(1)
        num_prompt = len(num_new) - num_verify
        prompt_s = 0.0
        if num_prompt:
            prompt_tokens = sum(num_new) - num_verify
            prompt_s = self.prefill_per_seq_s * num_prompt + self.prefill_per_token_s * prompt_tokens
            if not num_verify:
                return self.prefill_base_s + prompt_s + self.prefill_per_context_token_s * sum(work.num_computed)
        # Nothing is summed for a rate of 0.0, here and below, since most models leave most of them out.
        token_rate, context_rate = self.verify_per_token_s, self.verify_per_context_token_s
        return (
            self.verify_base_s
            + self.verify_per_seq_s * num_verify
            + (token_rate * (num_verify + sum(work.num_draft)) if token_rate else 0.0)
            + (context_rate * sum(work.num_computed) if context_rate else 0.0)
            + prompt_s
        )

    def draft_s(self, work: DraftWork) -> float:
        """Drafting or ingestion of the class docstring."""
        num_draft = work.num_draft
        num_passes = max(num_draft) if num_draft else 0
        num_ingesting = num_draft.count(0)
        num_drafting = len(num_draft) - num_ingesting
        ingest_s, token_rate = self.draft_prefill_per_seq_s * num_ingesting, self.draft_prefill_per_token_s
        if token_rate:
            ingest_s += token_rate * (sum(work.num_new) - num_drafting)
        if not num_passes:
            context = sum(work.num_computed)
            return self.draft_prefill_base_s + ingest_s + self.draft_prefill_per_context_token_s * context
        context_rate = self.draft_per_context_token_s
        return (
            self.draft_base_s * num_passes
            + (self.draft_per_seq_s + self.draft_per_token_s) * sum(num_draft)
            + (context_rate * _dot(num_draft, work.num_computed) if context_rate else 0.0)
            + ingest_s
        )


@dataclass(frozen=True, slots=True)
class StageMedians:
    """Median stage times of one drafter at one k, in seconds.

    Attributes:
        draft_s: t, drafting time of a step.
        verify_s: V, verification time of a step.
    """

    draft_s: float
    verify_s: float


PAPER_MEDIANS: Final[Mapping[str, Mapping[int, StageMedians]]] = {
    "qwen3-0.6b": {3: StageMedians(0.04960, 0.04862), 4: StageMedians(0.06406, 0.05106)},
    "qwen3-1.7b": {3: StageMedians(0.04953, 0.04930), 4: StageMedians(0.06575, 0.05070)},
    "qwen3-4b": {3: StageMedians(0.06183, 0.04762), 4: StageMedians(0.08100, 0.04893)},
}
"""By drafter and k: Nsight medians for target Qwen3-32B (TP 4, L40), Spec-Bench, 16 requests per step.

Source: MineDraft, arXiv 2603.18016v1, Fig. 25 (vLLM 0.9.2, eager mode). The only absolute stage times it
gives.
"""


def paper_cost(drafter: str) -> ConstantCost:
    """The straight lines t(k) and V(k) through the two medians of `PAPER_MEDIANS`.

    Only k = 3 and 4 are published; other k are extrapolated. Prefill and ingestion are free, as in the
    paper's decode throughput, which leaves prefill steps out.

    Args:
        drafter: a key of `PAPER_MEDIANS`.

    Raises:
        ValueError: the drafter is unknown; the message lists the known ones.
    """
    if drafter not in PAPER_MEDIANS:
        raise ValueError(f"no published medians for drafter {drafter!r}; known: {', '.join(PAPER_MEDIANS)}")
    at_3, at_4 = PAPER_MEDIANS[drafter][3], PAPER_MEDIANS[drafter][4]
    draft_slope_s = at_4.draft_s - at_3.draft_s
    verify_slope_s = at_4.verify_s - at_3.verify_s
    return ConstantCost(
        verify_base_s=at_3.verify_s - 3 * verify_slope_s,
        verify_per_token_s=verify_slope_s,
        draft_base_s=at_3.draft_s - 3 * draft_slope_s,
        draft_per_token_s=draft_slope_s,
    )

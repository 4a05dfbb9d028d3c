"""What `minedraft theory` was asked and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minedraft.theory.claims import Claims
from minedraft.theory.study import Study


class TheoryOptions(NamedTuple):
    """What was typed; times in milliseconds.

    Attributes:
        drafter: whose published medians give V and t where they aren't given.
        verify_ms: V of a step with k drafts.
        draft_ms: t of it.
        verify_2m_ms: V with 2m requests.
        draft_2m_ms: t with 2m requests.
        overhead_ms: o.
        k: drafts per round.
        acceptance: a constant rate, or unconditional rates by position.
        m: requests per verification.
        target_devices: of the target.
        draft_devices: which PSD has besides.
    """

    drafter: str
    verify_ms: float | None
    draft_ms: float | None
    verify_2m_ms: float | None
    draft_2m_ms: float | None
    overhead_ms: float
    k: int
    acceptance: str
    m: int
    target_devices: int
    draft_devices: int


@dataclass(frozen=True, slots=True)
class TheorySetting:
    """A setting with its figures.

    Attributes:
        options: what was typed.
        study: the closed forms.
        claims: Theorem 1, which depends on no option.
        alpha: acceptance, if it is a constant rate.
        cost_ends: of `draft_cost_ends` at 37 %; None if there are none, or no constant rate.
    """

    options: TheoryOptions
    study: Study
    claims: Claims
    alpha: float | None
    cost_ends: tuple[float, float] | None

"""The seconds of a round, and what they make of T_SD, T_PSD and the gain at equal k.

Differs from section 4 of the paper in two ways: a round has an overhead o that nothing hides, and a stage may take
longer with more drafts (`StageLines`). The rest is as there: every round of a mode takes the same time and verifies m
requests; prompts, communication and the drain at the end are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One round's stages, in seconds.

    Attributes:
        verify_s: V, above 0.
        draft_s: t, at least 0.
        overhead_s: o, host time and whatever else no stage hides, at least 0.

    Raises:
        ValueError: a field is out of range.
    """

    verify_s: float
    draft_s: float
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < math.inf or (field.name == "verify_s" and not value):
                least = "> 0" if field.name == "verify_s" else ">= 0"
                raise ValueError(f"{field.name} is {value}, must be finite and {least}")

    @property
    def sd_s(self) -> float:
        """A round of SD: draft, then verify, V + t + o."""
        return self.verify_s + self.draft_s + self.overhead_s

    @property
    def psd_s(self) -> float:
        """A round of PSD: the verification of one batch beside the drafting of the other, max(V, t) + o."""
        return max(self.verify_s, self.draft_s) + self.overhead_s

    @property
    def gain(self) -> float:
        """Throughput of PSD over that of SD at equal k and m, less 1: (V + t + o) / (max(V, t) + o) - 1.

        Acceptance cancels out, and it is at most 1 (100 %, reached at V = t and o = 0). The paper reports it as Delta,
        measured (section 6); its "naive upper bound 50 %" is the same in latency, `reduction_of_gain(1.0)`.
        """
        return self.sd_s / self.psd_s - 1.0


@dataclass(frozen=True, slots=True)
class StageLines:
    """Stage times as straight lines in k, in seconds: V(k) = base + k per draft, t(k) likewise but t(0) = 0.

    Raises:
        ValueError: from `at`, if a line leaves the range of `StageTimes`.
    """

    verify_base_s: float
    verify_per_draft_s: float = 0.0
    draft_base_s: float = 0.0
    draft_per_draft_s: float = 0.0
    overhead_s: float = 0.0

    def at(self, num_draft: int) -> StageTimes:
        """The stages of a round with k drafts; k = 0 is a plain decoding step."""
        draft_s = self.draft_base_s + num_draft * self.draft_per_draft_s if num_draft else 0.0
        return StageTimes(self.verify_base_s + num_draft * self.verify_per_draft_s, draft_s, self.overhead_s)


def reduction_of_gain(gain: float) -> float:
    """Share of time saved by a throughput gain: gain / (1 + gain); both may be negative.

    Raises:
        ValueError: the gain isn't above -1.
    """
    if not gain > -1.0:
        raise ValueError(f"gain is {gain}, must be above -1")
    return gain / (1.0 + gain)


def decode_s(num_tokens: float, tokens_per_step: float, step_s: float) -> float:
    """T_SD or T_PSD (section 4 of the paper): seconds for R tokens, R / tokens per step × seconds per step.

    Args:
        num_tokens: R, of all requests together.
        tokens_per_step: of all m requests, m × E[N]. The paper puts f(t), the share of accepted drafts, in its place:
            constants are missing there, so only ratios of its T mean something.
        step_s: `StageTimes.sd_s` or `.psd_s`.

    Raises:
        ValueError: `tokens_per_step` isn't above 0.
    """
    if not tokens_per_step > 0.0:
        raise ValueError(f"tokens_per_step is {tokens_per_step}, must be > 0")
    return num_tokens / tokens_per_step * step_s


def sd_makespan_s(num_steps: int, stages: StageTimes) -> float:
    """Seconds of `num_steps` rounds of SD, from an idle start to the last verification's end."""
    return num_steps * stages.sd_s


def psd_makespan_s(num_steps: int, stages: StageTimes) -> float:
    """Seconds of `num_steps` verifications of PSD, from an idle start to the last one's end.

    t + (n - 1) (max(V, t) + o) + o + V: the first drafting has nothing to hide behind, and behind the last
    verification nothing is drafted. The paper leaves both out.
    """
    if num_steps == 0:
        return 0.0
    filled = (num_steps - 1) * stages.psd_s
    return stages.draft_s + filled + stages.overhead_s + stages.verify_s

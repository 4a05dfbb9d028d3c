"""Seconds of the stages in a setting of the paper: verification, drafting, and prompts.

Two kinds. Where the paper publishes stage times (Fig. 25: Qwen3-32B with three drafters, k = 3 and 4, 16 requests),
these are taken (`NsightStages`). Elsewhere a roofline in eager mode is asked (`RooflineStages`): the authors' scripts
run vLLM with `--enforce-eager`. Prompts are always the roofline's: the paper publishes no time for them.

For all of them prompts are no part of a verification or a drafting, but time in which both device groups stand still
(`minedraft.sim.paper.plugin_world`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

from minedraft.sim.cost import PAPER_MEDIANS
from minedraft.sim.device_group import DeviceGroup
from minedraft.sim.gpus import load_gpu
from minedraft.sim.models import load_model
from minedraft.sim.paper.setup import TARGET_DEVICES, Setting
from minedraft.sim.roofline import Roofline, RooflineSettings
from minedraft.sim.steps import StepCost
from minedraft.work import DraftWork, VerifyWork

PROMPT_BUDGET: Final = 2048
"""Tokens of one prompt step: vLLM V0's `max_num_batched_tokens` without chunked prefill, the scripts' model length."""

NSIGHT_ROWS: Final = 16
MOST_CATCH_UP: Final = 2  # committed tokens that a drafter ingests in an ordinary round


class Stages(Protocol):
    """A `minedraft.sim.cost.CostModel` for which prompts are free, and the price of prompts."""

    def verify_s(self, work: VerifyWork) -> float:
        """The target's pass over the rows that aren't prompts."""
        ...

    def draft_s(self, work: DraftWork) -> float:
        """The drafter's passes, without the ingestion of prompts."""
        ...

    def prompts_s(self, prompt_lens: Sequence[int]) -> float:
        """Prompt steps of the target and then of the drafter, as many as the token budget makes it."""
        ...


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Prompt steps: whole prompts, in order, as many as fit `PROMPT_BUDGET`; the target's pass, then the drafter's.

    Attributes:
        target: passes of the target.
        drafter: passes of the drafter.
    """

    target: Roofline
    drafter: Roofline

    def prompts_s(self, prompt_lens: Sequence[int]) -> float:
        """See `Stages`."""
        total_s = 0.0
        for group in _packed(prompt_lens):
            tokens = sum(group)
            pairs = sum(length * (length + 1) for length in group) / 2.0
            total_s += sum(
                model.step_s(len(group), tokens, 0.0, pairs, len(group)) for model in (self.target, self.drafter)
            )
        return total_s


def _packed(prompt_lens: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    room = 0
    for length in prompt_lens:
        if length > room:
            groups.append([])
            room = PROMPT_BUDGET
        groups[-1].append(length)
        room -= length
    return groups


@dataclass(frozen=True, slots=True)
class NsightStages:
    """Straight lines through the published medians.

    V is linear in the tokens of a verification (16 requests with k + 1 each were measured); t is linear in the passes
    and doesn't depend on the requests, since eager drafting is bound by launches: 0.52 to 0.58 ms per layer and pass,
    whatever the drafter's size. k = 1, 2, 5 and other numbers of requests are on these lines, not published.

    Attributes:
        verify_base_s: V without tokens.
        verify_per_token_s: per token verified.
        draft_base_s: of a drafting.
        draft_per_pass_s: per pass, so per draft of one request.
        prompts: what prompts take; None if they are free.
    """

    verify_base_s: float
    verify_per_token_s: float
    draft_base_s: float
    draft_per_pass_s: float
    prompts: PromptCost | None

    @classmethod
    def of(cls, drafter: str, prompts: PromptCost | None) -> NsightStages:
        """Of a key of `PAPER_MEDIANS`."""
        at_3, at_4 = PAPER_MEDIANS[drafter][3], PAPER_MEDIANS[drafter][4]
        per_token_s = (at_4.verify_s - at_3.verify_s) / NSIGHT_ROWS
        per_pass_s = at_4.draft_s - at_3.draft_s
        base_s = at_3.verify_s - 4 * NSIGHT_ROWS * per_token_s
        return cls(base_s, per_token_s, at_3.draft_s - 3 * per_pass_s, per_pass_s, prompts)

    def at(self, num_rows: int, num_draft: int) -> tuple[float, float]:
        """V and t of so many requests with k drafts each."""
        verify_s = self.verify_base_s + num_rows * (num_draft + 1) * self.verify_per_token_s
        return verify_s, self.draft_base_s + num_draft * self.draft_per_pass_s

    def verify_s(self, work: VerifyWork) -> float:
        """See `Stages`."""
        num_rows = work.num_new.count(1)
        if not num_rows:
            return 0.0
        return self.verify_base_s + self.verify_per_token_s * (num_rows + sum(work.num_draft))

    def draft_s(self, work: DraftWork) -> float:
        """See `Stages`."""
        num_passes = max(work.num_draft, default=0)
        return self.draft_base_s + self.draft_per_pass_s * num_passes if num_passes else 0.0

    def prompts_s(self, prompt_lens: Sequence[int]) -> float:
        """See `Stages`."""
        return 0.0 if self.prompts is None else self.prompts.prompts_s(prompt_lens)


@dataclass(frozen=True, slots=True)
class RooflineStages:
    """Passes priced by `minedraft.sim.roofline`, prompts taken out of the works.

    Attributes:
        steps: of both models.
        prompts: what prompts take.
    """

    steps: StepCost
    prompts: PromptCost

    def verify_s(self, work: VerifyWork) -> float:
        """See `Stages`."""
        num_new = work.num_new
        if num_new.count(1) == len(num_new):
            return self.steps.verify_s(work)
        rows = [i for i, new in enumerate(num_new) if new == 1]
        kept = work._replace(
            num_new=(1,) * len(rows),
            num_computed=tuple([work.num_computed[i] for i in rows]),
            num_draft=tuple([work.num_draft[i] for i in rows]),
            is_last=(True,) * len(rows),
        )
        return self.steps.verify_s(kept)

    def draft_s(self, work: DraftWork) -> float:
        """See `Stages`."""
        if max(work.num_new) <= MOST_CATCH_UP and 0 not in work.num_draft:
            return self.steps.draft_s(work)
        rows = [i for i, k in enumerate(work.num_draft) if k]
        new = [min(MOST_CATCH_UP, work.num_new[i]) for i in rows]
        kept = work._replace(
            num_new=tuple(new),
            num_computed=tuple(
                [work.num_computed[i] + work.num_new[i] - short for i, short in zip(rows, new, strict=True)]
            ),
            num_draft=tuple([work.num_draft[i] for i in rows]),
        )
        return self.steps.draft_s(kept)

    def prompts_s(self, prompt_lens: Sequence[int]) -> float:
        """See `Stages`."""
        return self.prompts.prompts_s(prompt_lens)


@cache
def stages_of(setting: Setting, *, eager: bool = True, free_prompts: bool = False) -> Stages:
    """The stage times of a setting.

    Args:
        setting: whose; with published times these are used, if `eager`.
        eager: without CUDA graphs, as the paper ran.
        free_prompts: for identities that know no prompts; only where times are published.
    """
    target, drafter = rooflines_of(setting, eager=eager)
    prompts = PromptCost(target, drafter)
    if setting.nsight and eager:
        return NsightStages.of(setting.draft, None if free_prompts else prompts)
    return RooflineStages(StepCost(target, drafter), prompts)


def rooflines_of(setting: Setting, *, eager: bool = True) -> tuple[Roofline, Roofline]:
    """Passes of target (tensor parallelism 4) and drafter (one GPU) by their shapes."""
    settings, gpu = RooflineSettings(cuda_graph=not eager), load_gpu(setting.gpu)
    target = DeviceGroup(load_model(setting.target), gpu, TARGET_DEVICES)
    return Roofline(target, settings), Roofline(DeviceGroup(load_model(setting.draft), gpu), settings)

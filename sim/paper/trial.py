"""One simulated run of the paper's (`Trial`), and its figures as the authors' notebook computes them (`Figures`).

The run: all requests there at once, 256 tokens each whatever the model says, the plugin's own policies (newcomers join
the sub-batch that is drafted next, nobody is ever moved), KV pools large enough. The seed is fixed, and a token's fate
depends on it, the request and the position alone, so runs of one data set differ in nothing but what they compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from minedraft.engine import Engine
from minedraft.policy import load_policies
from minedraft.request import FinishReason
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig
from minedraft.sim.acceptance import BetaRate, ConstantRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.paper.plugin_world import PluginWorld
from minedraft.sim.paper.setup import OUTPUT_LEN, load_prompts, load_setting
from minedraft.sim.paper.stages import Stages, stages_of
from minedraft.sim.pearl import PearlBackend
from minedraft.sim.workload import AtOnce, FixedLength, SyntheticWorkload
from minedraft.work import WorldError

SEED: Final = 1
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 1_000_000
TOKEN_BUDGET: Final = 1_000_000  # prompts are never cut: chunked prefill is off
FREE: Final = "none"
"""The data set whose prompts take no time, for the identities of the theory."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run; equal trials have equal figures.

    Attributes:
        setting: S1 to S8.
        dataset: whose prompts, or `FREE`.
        mode: sd (drafter on the target's GPUs), psd (on its own) or pearl.
        num_draft: k, drafts verified per request.
        num_requests: prompts times samples of each.
        host_row_s: host work of a step per request in it, which nothing hides.
        mean_rate: mean of the requests' acceptance rates.
        concentration: of those rates, see `BetaRate`; None if all requests have the mean.
        extra: e of TETRIS, drafts made beyond k; 0 is without TETRIS.
        batch_size: m, if not the setting's.
        output_len: tokens of every answer.
        eager: without CUDA graphs.
        seed: of everything random.
    """

    setting: str
    dataset: str
    mode: str
    num_draft: int
    num_requests: int
    host_row_s: float
    mean_rate: float
    concentration: float | None
    extra: int = 0
    batch_size: int | None = None
    output_len: int = OUTPUT_LEN
    eager: bool = True
    seed: int = SEED

    @property
    def rows(self) -> int:
        """Requests per verification, m."""
        return load_setting(self.setting).batch_size if self.batch_size is None else self.batch_size


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of a trial.

    Attributes:
        num_requests: all of which ended.
        makespan_s: from the arrival of all to the end of the last.
        prompt_s: of that, prompts.
        num_rows: rows of verifications, prompts left out.
        num_tokens: decoded: the first token of a request comes from its prompt.
        num_verified: drafts verified.
        num_accepted: of those.
        overlapped: share of decode steps whose drafts were made behind another verification.
        verify_s: median device time of a verification.
        draft_s: median device time of a drafting.
        service_s: mean time of a request from the target's first look at it to its end.
    """

    num_requests: int
    makespan_s: float
    prompt_s: float
    num_rows: int
    num_tokens: int
    num_verified: int
    num_accepted: int
    overlapped: float
    verify_s: float
    draft_s: float
    service_s: float

    @property
    def decode_s(self) -> float:
        """Duration of all decode steps together: nothing else happens in an offline run but these and prompts."""
        return self.makespan_s - self.prompt_s

    @property
    def throughput(self) -> float:
        """The authors': tokens of decode steps over the duration of decode steps."""
        return self.num_tokens / self.decode_s

    @property
    def latency_s(self) -> float:
        """The authors' "end-to-end latency": makespan over requests, not a request's own."""
        return self.makespan_s / self.num_requests

    @property
    def prompt_share(self) -> float:
        """Time for prompts over that for decoding."""
        return self.prompt_s / self.decode_s

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a request's round."""
        return self.num_tokens / self.num_rows

    def throughput_with(self, host_row_s: float) -> float:
        """Of a run without host work (`host_row_s` = 0), what it would be with some.

        Exact: the host's time stalls everything, so it moves the run's events without changing their order.
        """
        return self.num_tokens / (self.decode_s + self.num_rows * host_row_s)


def run(trial: Trial) -> Figures:
    """Carry a trial out.

    Raises:
        WorldError: a request didn't end, or was refused.
    """
    stages = _stages(trial)
    world = PluginWorld(_world(trial, stages), stages, trial.host_row_s)
    engine = Engine(Scheduler(_limits(trial), load_policies(_policies(trial))), world)
    num_ended, service_s = 0, 0.0
    for output in engine.outputs():
        if output.finish_reason is FinishReason.ERROR:
            raise WorldError(f"{trial}: request {output.request_id!r} wasn't served: {output.detail}")
        num_ended += 1
        service_s += world.now() - world.first_s[output.request_id]
    return Figures(
        num_requests=num_ended,
        makespan_s=world.now(),
        prompt_s=world.prompt_s,
        num_rows=world.num_rows,
        num_tokens=world.num_tokens,
        num_verified=world.num_verified,
        num_accepted=world.num_accepted,
        overlapped=world.num_overlapped / max(1, world.num_steps),
        verify_s=world.median_verify_s,
        draft_s=world.median_draft_s,
        service_s=service_s / max(1, num_ended),
    )


def _stages(trial: Trial) -> Stages:
    return stages_of(load_setting(trial.setting), eager=trial.eager, free_prompts=trial.dataset == FREE)


def _limits(trial: Trial) -> SchedulerConfig:
    return SchedulerConfig(
        num_batches=2 if trial.mode == "psd" else 1,
        max_batch_size=trial.rows,
        num_speculative_tokens=trial.num_draft + trial.extra,
        draft_capacity=trial.num_draft * trial.rows if trial.extra else None,
        max_num_batched_tokens=TOKEN_BUDGET,
        block_size=BLOCK_SIZE,
        num_target_blocks=NUM_BLOCKS,
        num_draft_blocks=NUM_BLOCKS,
        draft_ingests_beside=trial.mode == "psd",
    )


def _policies(trial: Trial) -> dict[str, str]:
    return {
        "mode": "fixed,mode=psd" if trial.mode == "psd" else "fixed,mode=sd",
        "assignment": "in-phase",
        "rebalance": "never",
        "selection": "tetris" if trial.extra else "all",
    }


def _world(trial: Trial, stages: Stages) -> SimBackend:
    lengths: Any = FixedLength(2) if trial.dataset == FREE else load_prompts(trial.dataset)
    workload = SyntheticWorkload(
        AtOnce(), lengths, FixedLength(trial.output_len), trial.num_requests, seed=trial.seed, id_prefix=trial.dataset
    )
    acceptance: Any = (
        ConstantRate(trial.mean_rate, seed=trial.seed)
        if trial.concentration is None
        else BetaRate(trial.mean_rate, trial.concentration, seed=trial.seed)
    )
    probs = bool(trial.extra)
    if trial.mode == "pearl":
        return PearlBackend(workload, stages, acceptance, draft_probs=probs)
    return SimBackend(workload, stages, acceptance, colocated=trial.mode == "sd", draft_probs=probs)

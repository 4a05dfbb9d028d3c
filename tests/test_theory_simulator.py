"""The closed forms against the scheduler in the simulated world: step times, tokens, rounds, T8, T10 and T11."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from test_sim_runs import Recorder, make, offline, run

from minedraft.sim.acceptance import ConstantRate
from minedraft.sim.cost import PAPER_MEDIANS, ConstantCost, LinearCost, paper_cost
from minedraft.theory.fairness import psd_over_sd_2m
from minedraft.theory.jitter import expected_max_lognormal
from minedraft.theory.stages import StageTimes, decode_s, psd_makespan_s, sd_makespan_s
from minedraft.theory.tokens import constant_rates, expected_rounds, tokens_per_round
from minedraft.work import DraftWork, VerifyResult, VerifyWork, WorkDone

K = 3
MEDIANS = PAPER_MEDIANS["qwen3-4b"][K]
STAGES = StageTimes(MEDIANS.verify_s, MEDIANS.draft_s)


def rounds_and_tokens(recorder: Recorder) -> tuple[int, int]:
    """Rounds of all requests, and their tokens; a prompt's own pass is not a round."""
    entries = {
        work.work_id: [new == 1 for new in work.num_new] for _, work in recorder.works if isinstance(work, VerifyWork)
    }
    num_rounds = num_tokens = 0
    for _, event in recorder.events:
        if isinstance(event, WorkDone) and isinstance(event.result, VerifyResult):
            committed = zip(entries[event.work_id], event.result.num_committed, strict=True)
            tokens = [number for is_round, number in committed if is_round]
            num_rounds += len(tokens)
            num_tokens += sum(tokens)
    return num_rounds, num_tokens


@pytest.mark.parametrize("drafter", PAPER_MEDIANS)
@pytest.mark.parametrize("num_rounds", [1, 2, 25])
def test_makespans_are_exact_when_every_draft_is_accepted(drafter: str, num_rounds: int) -> None:
    """Every round then yields k + 1 tokens: the length of a run is known, first drafting and last verification too."""
    m, medians = 4, PAPER_MEDIANS[drafter][K]
    stages, output_len = StageTimes(medians.verify_s, medians.draft_s), 1 + num_rounds * (K + 1)
    options = {"k": K, "m": m, "acceptance": ConstantRate(1.0)}
    _, sequential = run("sd", offline(m, output_len), paper_cost(drafter), **options)
    assert sequential.now() == pytest.approx(sd_makespan_s(num_rounds, stages), rel=1e-9)
    _, parallel = run("psd", offline(2 * m, output_len), paper_cost(drafter), **options)
    assert parallel.now() == pytest.approx(psd_makespan_s(2 * num_rounds, stages), rel=1e-9)


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_rounds_and_tokens_of_a_run(mode: str) -> None:
    """Within 1 %: rounds until 255 tokens, for a prompt's pass gives the first of 256, and tokens per round."""
    num_requests, rates = 400, constant_rates(0.7, K)
    _, recorder = run(mode, offline(num_requests), paper_cost("qwen3-4b"), k=K, acceptance=ConstantRate(0.7, seed=5))
    num_rounds, num_tokens = rounds_and_tokens(recorder)
    assert num_tokens == 255 * num_requests
    assert num_rounds / num_requests == pytest.approx(expected_rounds(rates, 255), rel=0.01)
    assert num_tokens / num_rounds == pytest.approx(tokens_per_round(rates), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize("overhead_s", [0.0, 0.0277])
def test_decode_time_of_a_long_run(mode: str, overhead_s: float) -> None:
    """T_SD and T_PSD for all tokens: within 2.5 %, most of which the drain at the end takes."""
    m, num_requests = 16, 1500
    stages = StageTimes(MEDIANS.verify_s, MEDIANS.draft_s, overhead_s)
    _, recorder = run(mode, offline(num_requests), paper_cost("qwen3-4b"), k=K, m=m, round_overhead_s=overhead_s)
    step_s = stages.sd_s if mode == "sd" else stages.psd_s
    # Prompts cost nothing but the host's time, as often as a step held nothing else.
    num_prompt_steps = sum(isinstance(work, VerifyWork) and 1 not in work.num_new for _, work in recorder.works)
    expected_s = decode_s(255 * num_requests, m * tokens_per_round(constant_rates(0.7, K)), step_s)
    assert recorder.now() - num_prompt_steps * overhead_s == pytest.approx(expected_s, rel=0.025)


class JitteryCost:
    """Lognormal stage times; mean and coefficient of variation."""

    def __init__(self, verify: tuple[float, float], draft: tuple[float, float], seed: int) -> None:
        self.verify, self.draft = verify, draft
        self.rngs = random.Random(f"{seed}/verify"), random.Random(f"{seed}/draft")

    def drawn_s(self, rng: random.Random, mean_s: float, cv: float) -> float:
        variance = math.log1p(cv * cv)
        return mean_s * rng.lognormvariate(-variance / 2.0, math.sqrt(variance))

    def verify_s(self, work: VerifyWork) -> float:
        return self.drawn_s(self.rngs[0], *self.verify) if 1 in work.num_new else 0.0

    def draft_s(self, work: DraftWork) -> float:
        return self.drawn_s(self.rngs[1], *self.draft)


@pytest.mark.parametrize(
    ("verify", "draft"), [((0.05, 0.1), (0.05, 0.1)), ((0.05, 0.2), (0.05, 0.2)), ((0.05, 0.3), (0.04, 0.05))]
)
@pytest.mark.parametrize("overhead_s", [0.0, 0.01])
def test_t10_step_with_jitter(verify: tuple[float, float], draft: tuple[float, float], overhead_s: float) -> None:
    """A psd step takes E[max(V, t)] + o: the scheduler's roles swap when both stages are done. Within 1 %."""
    engine, recorder = make(
        "psd",
        offline(2, 3000),
        JitteryCost(verify, draft, seed=8),
        k=1,
        m=1,
        acceptance=ConstantRate(0.0),
        round_overhead_s=overhead_s,
        limits={"max_model_len": 4096},
    )
    engine.run()
    starts = recorder.verify_starts()[10:-10]
    mean_s = (starts[-1] - starts[0]) / (len(starts) - 1)
    assert len(starts) > 5000
    assert mean_s == pytest.approx(expected_max_lognormal(*verify, *draft) + overhead_s, rel=0.01)


def step_s(mode: str, m: int, cost: LinearCost, overhead_s: float) -> float:
    """A step of full batches, from verification to verification."""
    _, recorder = run(mode, offline(4 * m, 128), cost, k=K, m=m, round_overhead_s=overhead_s)
    starts = recorder.verify_starts()[10:40]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-9)
    return gaps[0]


@pytest.mark.parametrize(
    ("verify_per_token_s", "psd_wins"),
    [(0.0, False), (2e-5, False), (5e-4, True)],  # memory-bound, as good as memory-bound, near compute-bound
)
@pytest.mark.parametrize("overhead_s", [0.0, 0.004])
def test_t11_psd_against_a_sequential_batch_of_2m(verify_per_token_s: float, psd_wins: bool, overhead_s: float) -> None:
    """The simulator's PSD(m) wins over its SD(2m) where the closed form says so, by the factor that it says."""
    m = 8
    cost = LinearCost(
        verify_base_s=0.020, verify_per_token_s=verify_per_token_s, draft_base_s=0.008, draft_per_token_s=1e-4
    )

    def stages(size: int) -> StageTimes:
        verify_s = cost.verify_base_s + cost.verify_per_token_s * size * (1 + K)
        draft_s = cost.draft_base_s * K + cost.draft_per_token_s * size * K
        return StageTimes(verify_s, draft_s, overhead_s)

    ratio = step_s("sd", 2 * m, cost, overhead_s) / (2.0 * step_s("psd", m, cost, overhead_s))
    assert ratio == pytest.approx(psd_over_sd_2m(stages(m), stages(2 * m)), rel=1e-9)
    assert (ratio > 1.0) == psd_wins


def test_a_run_with_constant_stage_times_needs_no_paper() -> None:
    """The stages of `StageTimes` are those of `ConstantCost` without slopes."""
    cost = ConstantCost(verify_base_s=0.03, draft_base_s=0.02)
    _, recorder = run("psd", offline(64), cost, k=2, m=8)
    starts = recorder.verify_starts()[10:40]
    assert starts[-1] - starts[0] == pytest.approx(29 * StageTimes(0.03, 0.02).psd_s)

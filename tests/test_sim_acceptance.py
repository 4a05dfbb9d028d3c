"""Acceptance models: closed forms, consistency of fates, refusals."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
from minedraft.request import FinishReason
from minedraft.sim.acceptance import (
    AcceptanceModel,
    BetaRate,
    ConstantRate,
    RisingRate,
    SyntheticLength,
    SyntheticRates,
)
from minedraft.sim.acceptance_log import RIGHT, UNKNOWN, WRONG, LoggedRequest
from minedraft.sim.acceptance_replay import LoggedAcceptance
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import LinearCost
from minedraft.sim.faults import Faults
from minedraft.sim.workload import Aborts, FixedLength, Poisson, SyntheticWorkload


def mean_tokens(model: AcceptanceModel, num_draft: int, num_rounds: int, num_requests: int) -> float:
    """Mean tokens per round, walking positions as a run does."""
    total = 0
    for request in range(num_requests):
        position = 0
        for _ in range(num_rounds // num_requests):
            committed = model.num_accepted(f"r{request}", position, num_draft) + 1
            position += committed
            total += committed
        model.forget(f"r{request}")
    return total / num_rounds


@pytest.mark.parametrize(
    ("model", "num_draft"),
    [
        (SyntheticRates([0.73, 0.52, 0.35], seed=1), 3),
        (SyntheticRates([0.73, 0.52, 0.35], seed=1), 2),
        (SyntheticLength(2.6, 3, seed=2), 3),
        (ConstantRate(0.7, seed=3), 4),
        (ConstantRate(0.0), 4),
        (ConstantRate(1.0), 4),
        (RisingRate(0.1, 0.8, 0.7, seed=6), 5),
    ],
)
def test_mean_tokens_per_round_follow_the_closed_form(
    model: SyntheticRates | ConstantRate | RisingRate, num_draft: int
) -> None:
    measured = mean_tokens(model, num_draft, 100_000, 100)
    assert measured == pytest.approx(model.expected_tokens(num_draft), rel=0.01)


def test_beta_mean_tokens_follow_the_closed_form() -> None:
    model = BetaRate(0.6, 8.0, seed=4)
    # Many requests: the spread of alpha between requests dominates the error.
    assert mean_tokens(model, 4, 100_000, 10_000) == pytest.approx(model.expected_tokens(4), rel=0.01)


def test_beta_conditional_rates_rise_with_the_slot() -> None:
    model = BetaRate(0.6, 3.0, seed=5)
    reached, accepted = [0] * 3, [0] * 3
    for request in range(20_000):
        count = model.num_accepted(f"r{request}", 0, 3)
        for slot in range(min(count + 1, 3)):
            reached[slot] += 1
            accepted[slot] += count > slot
        model.forget(f"r{request}")
    rates = [a / n for a, n in zip(accepted, reached, strict=True)]
    assert rates[0] < rates[1] < rates[2]


def test_synthetic_length_is_the_minimum_variance_schedule() -> None:
    assert SyntheticLength(2.6, 3).rates == pytest.approx((1.0, 0.6, 0.0))
    assert SyntheticLength(1.0, 2).rates == (0.0, 0.0)
    assert SyntheticLength(4.0, 3).rates == (1.0, 1.0, 1.0)
    assert SyntheticLength(3.25, 4).expected_tokens(4) == pytest.approx(3.25)


def test_synthetic_rates_are_unconditional() -> None:
    model = SyntheticRates([0.8, 0.4, 0.0])
    assert model.conditional_rates("r", 3) == pytest.approx((0.8, 0.5, 0.0))
    assert model.conditional_rates("r", 1) == pytest.approx((0.8,))


def test_rising_rates_rise_to_their_limit() -> None:
    assert RisingRate(0.5, 0.9).conditional_rates("r", 4) == pytest.approx((0.5, 0.7, 0.8, 0.85))
    assert RisingRate(0.6, 0.9, 0.0).conditional_rates("r", 3) == (0.6, 0.6, 0.6)
    assert RisingRate(0.6, 0.9, 1.0).conditional_rates("r", 3) == pytest.approx((0.6, 0.9, 0.9))
    # What a log of an n-gram matcher shows (see the class): no constant rate is near both ends.
    logged = (0.09, 0.70, 0.75, 0.82, 0.84)
    assert RisingRate(0.09, 0.80, 0.85).conditional_rates("r", 5) == pytest.approx(logged, abs=0.05)
    model = RisingRate(0.3, 0.9, seed=1)
    short = [model.num_accepted("r", position, 2) for position in range(200)]
    longer = [model.num_accepted("r", position, 6) for position in range(200)]
    assert short == [min(count, 2) for count in longer]


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), position=st.integers(0, 60), short=st.integers(1, 4), long=st.integers(4, 8))
def test_fates_do_not_depend_on_draft_length_or_order(seed: int, position: int, short: int, long: int) -> None:
    first, second = ConstantRate(0.7, seed=seed), ConstantRate(0.7, seed=seed)
    accepted = first.num_accepted("r", position, long)
    second.num_accepted("other", 3, 8)
    second.num_accepted("r", 0, 5)  # an earlier round, e.g. of another policy
    assert second.num_accepted("r", position, short) == min(accepted, short)
    assert second.num_accepted("r", position, long) == accepted  # again, as after a failed step
    # A round that starts later sees the same tokens.
    if accepted >= 2:
        assert second.num_accepted("r", position + 1, long - 1) == accepted - 1


def test_forgetting_is_invisible() -> None:
    model = BetaRate(0.5, 2.0, seed=9)
    before = [model.num_accepted("r", p, 4) for p in range(20)]
    model.forget("r")
    model.forget("never seen")
    assert [model.num_accepted("r", p, 4) for p in range(20)] == before


def test_beta_from_shape_is_the_same_distribution() -> None:
    by_mean, by_shape = BetaRate(0.6, 5.0, seed=1), BetaRate.from_shape(3.0, 2.0, seed=1)
    assert by_mean.alpha_of("r") == pytest.approx(by_shape.alpha_of("r"))
    assert by_shape.conditional_rates("r", 2) == (by_shape.alpha_of("r"),) * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SyntheticRates([]), "synthetic_acceptance_rates is empty"),
        (lambda: SyntheticRates([0.5, 0.6]), r"synthetic_acceptance_rates\[1\] is 0.6"),
        (lambda: SyntheticRates([0.5, 1.5]), r"synthetic_acceptance_rates\[1\] is 1.5"),
        (lambda: SyntheticRates([float("nan")]), r"synthetic_acceptance_rates\[0\] is nan"),
        (lambda: SyntheticLength(5.0, 3), r"synthetic_acceptance_length is 5.0, must be in \[1, 4\]"),
        (lambda: SyntheticLength(1.0, 0), "num_speculative_tokens is 0"),
        (lambda: ConstantRate(1.01), "alpha is 1.01"),
        (lambda: BetaRate(1.0, 2.0), "mean is 1.0"),
        (lambda: BetaRate(0.5, 0.0), "concentration is 0.0"),
        (lambda: BetaRate.from_shape(0.0, 1.0), "a is 0.0"),
        (lambda: RisingRate(0.5, 0.4), "limit is 0.4, must be >= first, which is 0.5"),
        (lambda: RisingRate(-0.1, 0.4), "first is -0.1"),
        (lambda: RisingRate(0.1, 0.4, 1.5), "rise is 1.5"),
        (lambda: SyntheticRates([0.5]).num_accepted("r", 0, 2), "a round has 2 drafts"),
    ],
)
def test_refusals_name_the_field(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


MODELS: dict[str, AcceptanceModel] = {
    "rates": SyntheticRates([0.73, 0.52, 0.35, 0.2]),
    "length": SyntheticLength(2.6, 4),
    "constant": ConstantRate(0.7),
    "rising": RisingRate(0.1, 0.8, 0.7),
    "beta": BetaRate(0.7, 4.0),
    "log": LoggedAcceptance([LoggedRequest(None, bytes([RIGHT, WRONG, UNKNOWN, RIGHT]))]),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_kept_of_requests_that_have_ended(name: str) -> None:
    """Though they end in the middle of a draft or a verification, and the drafter's confidence is asked for."""
    model = MODELS[name]
    for k in range(1, 5):  # what depends on k alone may be kept
        model.num_accepted("nobody", 0, k)
    model.forget("nobody")
    before = pickle.dumps(model.__dict__)
    workload = SyntheticWorkload(
        Poisson(30.0), FixedLength(50), FixedLength(30), num_requests=120, aborts=Aborts(0.5, 0.3)
    )
    cost = LinearCost(verify_base_s=0.02, prefill_base_s=0.02, draft_base_s=0.01)
    backend = SimBackend(workload, cost, model, draft_probs=True, faults=Faults(verify_failure_rate=0.05))
    config = SchedulerConfig(num_batches=2, max_batch_size=8, num_speculative_tokens=4)
    outputs = Engine(Scheduler(config, load_policies({"mode": "fixed,mode=psd"})), backend).run()
    assert sum(output.finish_reason is FinishReason.ABORT for output in outputs) > 20
    assert pickle.dumps(model.__dict__) == before

"""Tokens per round: closed forms against enumeration, Monte Carlo, integrals and the simulator's acceptance models."""

from __future__ import annotations

import importlib
import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from minedraft.sim import acceptance
from minedraft.sim.acceptance import (
    AcceptanceModel,
    BetaRate,
    ConstantRate,
    RisingRate,
    SyntheticLength,
    SyntheticRates,
)
from minedraft.sim.acceptance_presets import load_acceptance
from minedraft.theory.tokens import (
    accepted_per_round,
    beta_rates,
    constant_rates,
    expected_rounds,
    geometric_tokens,
    token_distribution,
    tokens_per_round,
    tokens_per_round_without_bonus,
    unbounded_geometric_tokens,
)

rate_lists = st.lists(st.floats(0.0, 1.0), max_size=8).map(lambda rates: tuple(sorted(rates, reverse=True)))
alphas = st.floats(0.0, 1.0)


def simulated_accepted(rates: tuple[float, ...], num_rounds: int, seed: int) -> np.ndarray[Any, Any]:
    """Accepted drafts per round: each draft has its conditional chance, and the first refusal ends the round."""
    before = np.array((1.0, *rates[:-1]))
    conditional = np.divide(rates, before, out=np.zeros(len(rates)), where=before > 0)
    accepted = np.random.default_rng(seed).random((num_rounds, len(rates))) < conditional
    counts: np.ndarray[Any, Any] = np.cumprod(accepted, axis=1).sum(axis=1)
    return counts


@pytest.mark.parametrize(
    "rates", [constant_rates(0.7, 4), constant_rates(0.95, 16), (0.73, 0.52, 0.35), (1.0, 0.6, 0.0), (0.2,)]
)
def test_means_and_distribution_by_monte_carlo(rates: tuple[float, ...]) -> None:
    counts = simulated_accepted(rates, 400_000, seed=len(rates))
    k = len(rates)
    assert counts.mean() == pytest.approx(accepted_per_round(rates), rel=0.01)
    assert (counts + 1).mean() == pytest.approx(tokens_per_round(rates), rel=0.01)
    assert np.minimum(counts + 1, k).mean() == pytest.approx(tokens_per_round_without_bonus(rates), rel=0.01)
    shares = np.bincount(counts + 1, minlength=k + 2)[1:] / len(counts)
    assert shares == pytest.approx(np.array(token_distribution(rates)), abs=0.005)


# One line per model that has a closed form: the model, k, requests to spread the rounds over, and the rates meant.
MODELS: dict[str, tuple[AcceptanceModel, int, int, tuple[float, ...]]] = {
    "SyntheticRates": (SyntheticRates([0.73, 0.52, 0.35], seed=1), 3, 100, (0.73, 0.52, 0.35)),
    "SyntheticLength": (SyntheticLength(2.6, 3, seed=2), 3, 100, (1.0, 0.6, 0.0)),
    "ConstantRate": (ConstantRate(0.7, seed=3), 4, 100, constant_rates(0.7, 4)),
    # The requests' own rates differ, so there must be many requests.
    "BetaRate": (BetaRate(0.6, 8.0, seed=4), 4, 20_000, beta_rates(4.8, 3.2, 4)),
    "RisingRate": (
        RisingRate(0.5, 0.9, 0.5, seed=5),
        4,
        100,
        (0.5, 0.35, 0.28, 0.238),
    ),
    # Of presets, one for each way in which figures are published; they are models of the first kind.
    "preset, rates": (
        load_acceptance("qwen3-8b-eagle3-redhat-mt-bench").build(3, seed=6),
        3,
        100,
        (0.6541, 0.3993, 0.2020),
    ),
    "preset, lengths": (
        load_acceptance("qwen3-8b-eagle3-coding").build(7, seed=7),
        7,
        100,
        (0.81, 0.59, 0.40, 0.26, 0.16, 0.08, 0.03),
    ),
}


def test_no_acceptance_model_with_a_closed_form_is_left_out() -> None:
    files = Path(acceptance.__file__).parent.glob("acceptance*.py")
    modules = [importlib.import_module(f"minedraft.sim.{file.stem}") for file in files]
    models = {
        name
        for module in modules
        for name, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__ and hasattr(found, "expected_tokens")
    }
    assert models == {name for name in MODELS if not name.startswith("preset")}


@pytest.mark.parametrize("name", MODELS)
def test_acceptance_models_within_one_percent_at_100_000_rounds(name: str) -> None:
    model, k, num_requests, rates = MODELS[name]
    num_tokens = 0
    for request in range(num_requests):
        position = 0
        for _ in range(100_000 // num_requests):
            position += model.num_accepted(f"r{request}", position, k) + 1
        num_tokens += position
        model.forget(f"r{request}")
    assert num_tokens / 100_000 == pytest.approx(tokens_per_round(rates), rel=0.01)
    expected_tokens = model.expected_tokens(k)  # type: ignore[attr-defined]
    assert expected_tokens == pytest.approx(tokens_per_round(rates), rel=1e-12)


@given(alpha=alphas, k=st.integers(0, 60))
def test_geometric_is_the_sum_of_powers(alpha: float, k: int) -> None:
    assert geometric_tokens(alpha, k) == pytest.approx(sum(alpha**i for i in range(k + 1)), rel=1e-9)
    assert geometric_tokens(alpha, k) == pytest.approx(tokens_per_round(constant_rates(alpha, k)), rel=1e-9)


@given(alpha=st.floats(0.0, 0.99))
def test_geometric_rises_to_its_limit(alpha: float) -> None:
    values = [geometric_tokens(alpha, k) for k in range(40)]
    limit = unbounded_geometric_tokens(alpha)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    assert values[-1] <= limit + 1e-12
    assert geometric_tokens(alpha, 5000) == pytest.approx(limit, rel=1e-9)


def test_ends_of_the_geometric_law() -> None:
    assert geometric_tokens(1.0, 4) == 5.0
    assert geometric_tokens(0.0, 4) == 1.0
    assert unbounded_geometric_tokens(1.0) == float("inf")
    assert geometric_tokens(1.0 - 1e-15, 4) == pytest.approx(5.0, abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [(4.8, 3.2), (0.5, 0.5), (30.0, 2.0)])
def test_beta_rates_are_moments(a: float, b: float) -> None:
    rates = beta_rates(a, b, 6)
    assert rates == pytest.approx([float(stats.beta(a, b).moment(i)) for i in range(1, 7)], rel=1e-9)
    conditional = [after / before for before, after in itertools.pairwise((1.0, *rates))]
    assert conditional == sorted(conditional)
    assert rates[0] < conditional[-1]


@given(rates=rate_lists)
def test_distribution_and_means_agree(rates: tuple[float, ...]) -> None:
    chances = token_distribution(rates)
    assert sum(chances) == pytest.approx(1.0)
    assert sum(n * p for n, p in enumerate(chances, 1)) == pytest.approx(tokens_per_round(rates))
    lost = rates[-1] if rates else 0.0
    assert tokens_per_round(rates) - tokens_per_round_without_bonus(rates) == pytest.approx(lost)


def rounds_by_enumeration(chances: tuple[float, ...], num_tokens: int) -> float:
    """Mean rounds over all sequences of rounds, each listed with its chance."""
    if num_tokens <= 0:
        return 0.0
    return sum(p * (1.0 + rounds_by_enumeration(chances, num_tokens - n)) for n, p in enumerate(chances, 1))


@pytest.mark.parametrize("rates", [(0.7, 0.49), (0.9, 0.2, 0.1), (), (1.0, 1.0)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7])
def test_rounds_by_enumeration(rates: tuple[float, ...], num_tokens: int) -> None:
    expected = rounds_by_enumeration(token_distribution(rates), num_tokens)
    assert expected_rounds(rates, num_tokens) == pytest.approx(expected)


def test_rounds_by_monte_carlo() -> None:
    rates, num_tokens = constant_rates(0.7, 4), 255
    counts = simulated_accepted(rates, 2_000 * num_tokens, seed=9).reshape(2_000, num_tokens) + 1
    rounds = (np.cumsum(counts, axis=1) < num_tokens).sum(axis=1) + 1
    assert rounds.mean() == pytest.approx(expected_rounds(rates, num_tokens), rel=0.005)


@given(rates=rate_lists, num_tokens=st.integers(1, 200))
def test_rounds_obey_wald(rates: tuple[float, ...], num_tokens: int) -> None:
    """E[N] E[T] is the mean number of tokens before the cut: L of them, and at most k more."""
    tokens = tokens_per_round(rates) * expected_rounds(rates, num_tokens)
    assert num_tokens - 1e-6 <= tokens <= num_tokens + len(rates) + 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tokens_per_round([0.5, 0.6]), r"rates\[1\] is 0.6, above 0.5"),
        (lambda: tokens_per_round([1.5]), r"rates\[0\] is 1.5"),
        (lambda: tokens_per_round([float("nan")]), r"rates\[0\] is nan"),
        (lambda: constant_rates(-0.1, 2), "alpha is -0.1"),
        (lambda: geometric_tokens(0.5, -1), "num_draft is -1"),
        (lambda: beta_rates(0.0, 1.0, 2), "a is 0.0"),
        (lambda: expected_rounds([0.5], -1), "num_tokens is -1"),
    ],
)
def test_refusals_name_the_argument(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

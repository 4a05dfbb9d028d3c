"""Fates of tokens: uniform, independent of each other, a function of their key alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.sim.acceptance import BetaRate
from minedraft.sim.beta_fates import beta_variate
from minedraft.sim.fates import NUM_FATES, TokenFates, threshold

NUM = 60_000


def fate(seed: int, request_id: str, position: int) -> int:
    """From its definition."""
    digest = hashlib.blake2b(f"{seed}/accept/{request_id}/{position // 16}".encode()).digest()
    word = position % 16
    return int.from_bytes(digest[4 * word : 4 * word + 4], "little")


@given(
    st.integers(-5, 1 << 70),
    st.text(max_size=5),
    st.lists(st.integers(0, 100), min_size=1, max_size=9),
    st.integers(0, 5),
)
def test_a_fate_is_a_function_of_its_key(seed: int, request_id: str, positions: list[int], length: int) -> None:
    """Whatever was asked for before, and though the request was forgotten."""
    fates = TokenFates(seed)
    for position in positions:
        limit = fate(seed, request_id, position)
        assert fates.num_below(request_id, position, 1, limit) == 0
        assert fates.num_below(request_id, position, 1, limit + 1) == 1
        limits = [fate(seed, request_id, position + i) + 1 for i in range(length)]
        assert fates.num_below_each(request_id, position, length, limits) == length
        if position % 3 == 0:
            fates.forget(request_id)


def drawn(seed: int, request_id: str, number: int) -> np.ndarray:
    return np.array(TokenFates(seed).drawn(request_id, number)[:number], dtype=np.uint64)


def chi_square(counts: np.ndarray) -> float:
    """Deviations from equal counts, in standard deviations of the statistic."""
    mean = counts.sum() / counts.size
    return float((((counts - mean) ** 2 / mean).sum() - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1)))


STREAMS: dict[str, Callable[[], np.ndarray]] = {
    "positions": lambda: drawn(3, "r1", NUM),
    "requests": lambda: np.array([fate(3, f"r{i}", 5) for i in range(NUM)], dtype=np.uint64),
    "seeds": lambda: np.array([fate(i, "r1", 5) for i in range(NUM)], dtype=np.uint64),
}


@pytest.mark.parametrize("name", STREAMS)
def test_fates_are_uniform_and_independent(name: str) -> None:
    """Along every part of the key: each byte, and pairs of neighbours."""
    values = STREAMS[name]()
    for shift in (0, 8, 16, 24):
        assert abs(chi_square(np.bincount((values >> np.uint64(shift)).astype(int) & 255, minlength=256))) < 5.0
    uniform = values / NUM_FATES
    for lag in (1, 2, 15, 16, 17):
        here, there = (16 * uniform[:-lag]).astype(int), (16 * uniform[lag:]).astype(int)
        assert abs(chi_square(np.bincount(16 * here + there, minlength=256))) < 5.0, lag
        assert abs(np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]) < 5.0 / np.sqrt(NUM), lag


def test_thresholds_are_chances() -> None:
    assert threshold(0.0) == 0
    assert threshold(1.0) == NUM_FATES
    assert threshold(0.25) * 4 == NUM_FATES
    below = (drawn(8, "x", NUM) < threshold(0.7)).mean()
    assert below == pytest.approx(0.7, abs=5 * np.sqrt(0.21 / NUM))


def test_rates_of_requests_follow_their_distribution() -> None:
    model = BetaRate.from_shape(2.0, 5.0, seed=4)
    rates = np.sort([model.alpha_of(f"r{i}") for i in range(20_000)])
    # Of Beta(2, 5): F(x) = 1 - (1 - x)^6 - 6 x (1 - x)^5.
    exact = 1 - (1 - rates) ** 6 - 6 * rates * (1 - rates) ** 5
    assert np.abs(exact - (np.arange(20_000) + 0.5) / 20_000).max() < 1.95 / np.sqrt(20_000)  # Kolmogorov, 0.1 %
    again = BetaRate.from_shape(2.0, 5.0, seed=4)
    assert again.alpha_of("r77") == model.alpha_of("r77"), "whoever was asked for before"


class PythonsOwn(random.Random):
    """Python's distributions over the digests of a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._values = self._draw(name)

    def random(self) -> float:
        return next(self._values)

    @staticmethod
    def _draw(name: str) -> Iterator[float]:
        for block in count():
            digest = hashlib.blake2b(f"{name}/{block}".encode()).digest()
            words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 64, 4)]
            for high, low in zip(words[::2], words[1::2], strict=True):
                yield ((high >> 5) * 67108864.0 + (low >> 6)) / 9007199254740992.0


SHAPES = st.one_of(st.floats(1e-3, 100.0), st.sampled_from([0.2, 0.999, 1.0, 1.001, 2.8]))


@given(SHAPES, SHAPES, st.text(max_size=5))
def test_a_rate_is_the_one_that_pythons_generator_draws_from_the_same_numbers(a: float, b: float, name: str) -> None:
    """To the last bit: below, at and above shape 1 three algorithms are at work."""
    for i in range(5):
        assert beta_variate(f"{name}{i}", a, b) == PythonsOwn(f"{name}{i}").betavariate(a, b)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 9)), max_size=30), st.integers(0, 9))
def test_a_request_of_its_own_rate_has_the_fates_of_its_key(asked: list[tuple[int, int, int]], seed: int) -> None:
    """Whatever was asked for before, also of others, and though some were forgotten."""
    model = BetaRate(0.6, 3.0, seed=seed)
    for number, position, length in asked:
        request_id = f"r{number}"
        limit = threshold(BetaRate(0.6, 3.0, seed=seed).alpha_of(request_id))
        luck = [fate(seed, request_id, position + i) < limit for i in range(length)]
        assert model.num_accepted(request_id, position, length) == [*luck, False].index(False)
        if position % 3 == 0:
            model.forget(request_id)

"""The model of Theorem 1 in figures, for showing."""

from __future__ import annotations

from typing import Final, NamedTuple

from minedraft.theory import theorem

SHOWN_X: Final = (0.1, 0.5, 1.0, 1.678, 3.0, 5.0, 6.0, 10.0, 20.0, 100.0)
REDUCTIONS: Final = (0.37, 0.3, 0.2, 0.1)
COUNTER_EXAMPLE: Final = 10.0


class Claims(NamedTuple):
    """What holds and what doesn't; see `minedraft.theory.theorem`.

    Attributes:
        starts_at: the alpha V from which Theorem 1 claims its ratio.
        bound_there: what its proof shows at that point.
        peak: the alpha V of the largest ratio.
        claimed: both ends of the interval in which the claimed ratio is reached.
        ranges: the same for each of `REDUCTIONS`, shares of time saved.
        ratios: at `SHOWN_X`.
        counter_example: the ratio at `COUNTER_EXAMPLE`.
    """

    starts_at: float
    bound_there: float
    peak: float
    claimed: tuple[float, float]
    ranges: tuple[tuple[float, float], ...]
    ratios: tuple[float, ...]
    counter_example: float


def claims() -> Claims:
    """Compute them.

    Raises:
        MissingTheoryExtraError: scipy isn't there.
    """
    start = theorem.claimed_from()
    return Claims(
        start,
        theorem.proven_bound(start),
        theorem.peak(),
        theorem.range_of_ratio(),
        tuple(theorem.range_of_ratio(1.0 / (1.0 - share)) for share in REDUCTIONS),
        tuple(theorem.ratio(x) for x in SHOWN_X),
        theorem.ratio(COUNTER_EXAMPLE),
    )

"""The highest arrival rate at which a share of the requests still keeps the SLO (`search`), for one seed.

At every rate the requests, their luck and the pattern of their arrivals are the same, only closer together
(`arrival_rate`), so that the share falls nearly monotonically and a bisection finds where it crosses the target. It
crosses once in theory only; in a finite run it may waver, and the crossing that is found is one of those.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from minedraft.commands.arrival_rate import at_rate
from minedraft.commands.drive import Outcome
from minedraft.commands.many_runs import run_once
from minedraft.config import RunConfig

FIRST_RATE: Final = 1.0  # the same for everybody, so that variants are measured on the same grid of rates
LOWEST_RATE: Final = 2.0**-10
HIGHEST_RATE: Final = 2.0**14
NUM_HALVINGS: Final = 7  # of the bracket of a factor 2: to within 0.6 %


class Search(NamedTuple):
    """What to look for.

    Attributes:
        config: with an SLO.
        share: of the requests that must keep it.
    """

    config: RunConfig
    share: float


class Found(NamedTuple):
    """What was found.

    Attributes:
        rate: requests per second; None if the SLO can't be kept at any rate that was tried, or is kept at all.
        outcome: the run at this rate; else that at the last rate tried.
        kept: whether the last rate tried was fine: with no `rate` the limit lies beyond, else nowhere.
        num_runs: that it took.
    """

    rate: float | None
    outcome: Outcome
    kept: bool
    num_runs: int


def search(wanted: Search) -> Found:
    """Double or halve the rate until the target lies in between, then bisect (geometrically).

    Raises:
        CommandError: a run failed, or the user interrupted it.
    """
    runs = 0

    def run(rate: float) -> tuple[bool, Outcome]:
        nonlocal runs
        runs += 1
        outcome = run_once(at_rate(wanted.config, rate))
        if outcome.error is not None:
            raise outcome.error
        return (outcome.summary.slo_attainment or 0.0) >= wanted.share, outcome

    rate = FIRST_RATE
    kept, outcome = run(rate)
    first = kept
    while kept is first:
        rate *= 2.0 if first else 0.5
        if not LOWEST_RATE <= rate <= HIGHEST_RATE:
            return Found(None, outcome, kept, runs)
        before, (kept, outcome) = outcome, run(rate)
    low, best = (rate / 2.0, before) if first else (rate, outcome)
    factor = 2.0
    for _ in range(NUM_HALVINGS):
        factor **= 0.5
        kept, outcome = run(low * factor)
        if kept:
            low, best = low * factor, outcome
    return Found(low, best, kept=True, num_runs=runs)

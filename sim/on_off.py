"""Arrivals in bursts with silence in between (`OnOff`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from minedraft.sim.workload import Poisson, check_rate

LONGEST_PHASE_S: Final = 1e9
SHORTEST_PHASE_S: Final = 1e-6
MOST_PHASES_PER_GAP: Final = 1000.0


@dataclass(frozen=True, slots=True)
class OnOff:
    """An interrupted Poisson process: Poisson arrivals while a source is on, none while it is off.

    Times on and off are exponential, and the source is in its long-run state from the start. Unlike `Gamma`, whose
    bursts are moments, it makes busy phases of a chosen length. With on and off means A and B and arrivals at rate r
    while on, gaps have the squared coefficient of variation 1 + 2 r a / (a + b)^2 with a = 1 / A and b = 1 / B (Fischer
    and Meier-Hellstern, *The Markov-modulated Poisson process (MMPP) cookbook*, 1993: the process is a renewal process
    with hyperexponential gaps).

    On a clock that stands still while the source is off, arrivals are a plain Poisson process; at another rate they
    only move closer together, within the same phases.

    Attributes:
        rate: requests per second in the long run, above 0; while on it is rate * (on_s + off_s) / on_s.
        on_s: mean length of a busy phase in seconds, from `SHORTEST_PHASE_S` to `LONGEST_PHASE_S`. If more than
            `MOST_PHASES_PER_GAP` phases pass between two arrivals, the process is Poisson's, and is refused.
        off_s: mean length of a silence in seconds, from 0 to `LONGEST_PHASE_S`.

    Raises:
        ValueError: a field is out of range.
    """

    rate: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        check_rate(self, self.rate)
        for name, value, least in (("on_s", self.on_s, SHORTEST_PHASE_S), ("off_s", self.off_s, 0.0)):
            if not least <= value <= LONGEST_PHASE_S:
                raise ValueError(f"OnOff.{name} is {value}, must be from {least:g} to {LONGEST_PHASE_S:g} seconds")
        if self.rate * (self.on_s + self.off_s) * MOST_PHASES_PER_GAP < 1.0:
            raise ValueError(
                f"OnOff.on_s is {self.on_s} and off_s {self.off_s}: far shorter than the {1.0 / self.rate:g} s between "
                'two arrivals, so that no burst would be seen; make them longer, or use kind = "poisson"'
            )

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps between arrivals."""
        off_rate, share_on = 1.0 / self.on_s, self.on_s / (self.on_s + self.off_s)
        # a + b = a / (1 - share_on), and b is infinite where there is no silence.
        return math.sqrt(1.0 + 2.0 * (self.rate / share_on) * (1.0 - share_on) ** 2 / off_rate)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """See `minedraft.sim.workload.Arrivals`."""
        of_arrivals, of_phases = rng.spawn(2)
        share_on = self.on_s / (self.on_s + self.off_s)
        # Seconds off so far; and the time on, by the clock of the source, at which the next silence begins.
        silent_s = float(of_phases.exponential(self.off_s)) if of_phases.random() >= share_on else 0.0
        stops_s = float(of_phases.exponential(self.on_s))
        for at_s in Poisson(self.rate / share_on).times_s(of_arrivals):
            while at_s > stops_s:
                silent_s += float(of_phases.exponential(self.off_s))
                stops_s += float(of_phases.exponential(self.on_s))
            yield at_s + silent_s

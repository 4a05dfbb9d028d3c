"""Whether a run was in steady state: did the queue keep growing for as long as requests arrived?

Where more arrives than is served the backlog grows until the last arrival, and every latency depends on how many
requests the run had. The number of requests that an arriving one finds in the system shows it whatever the bottleneck
is (the waiting list, a growing batch, preemptions), and by Little's law it is what latency follows.

Law of this file: pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from minedraft.run_data import Floats

NUM_PARTS: Final = 10
NUM_WARM_UP: Final = 2  # parts left out at least: an empty system fills up even at light load
# One-sided 1 % points of Student's t for the slope through so many points, which has two degrees of freedom less.
LEAST_T: Final = {8: 3.143, 7: 3.365, 6: 3.747}
LEAST_RISE: Final = 0.43  # of what a queue shows, relative to its mean, that grows from nothing at a constant rate
LONG_WAIT: Final = 0.25  # of a mean service time: waiting this long in a short run is no filling


def backlog_by_tenth(arrival_s: Floats, end_s: Floats) -> tuple[float, ...]:
    """How many other requests were there when one arrived, mean over each tenth of the arrivals in order.

    Args:
        arrival_s: arrivals.
        end_s: when the same requests left; NaN for those that never did.

    Returns:
        Ten means; nothing for fewer than ten requests, or if all arrived at one moment: an offline batch has no load.
    """
    number = len(arrival_s)
    arrival_s = np.sort(arrival_s)
    if number < NUM_PARTS or arrival_s[0] == arrival_s[-1]:
        return ()
    gone = np.searchsorted(np.sort(end_s[~np.isnan(end_s)]), arrival_s, side="right")
    present = np.maximum(np.arange(number) - gone, 0)  # who leaves on arrival, refused, is gone before it counts
    return tuple([float(part.mean()) for part in np.array_split(present, NUM_PARTS)])


def still_growing(
    backlogs: Sequence[Sequence[float]], *, filling_share: float = 0.0, waiting_share: float = 0.0
) -> bool:
    """Whether the backlog kept growing after the warm-up, clearly and by much.

    Until the first requests leave, an empty system fills up at any load: one mean service time is left out, two tenths
    at least. A line through the means over the runs must rise at the 1 % level, and from end to end by one request and
    by nearly half of what unchecked growth would show (half of the mean, if two tenths are left out). Where filling
    takes more than two tenths, requests that wait long are growth too; where it takes more than four, nothing else is.
    At a load just above capacity, or in a short run, growth may stay unseen.

    Args:
        backlogs: `backlog_by_tenth` of runs that differ in the seed; empty ones say nothing.
        filling_share: `Summary.filling_share`, mean over these runs.
        waiting_share: `Summary.waiting_share`, likewise.
    """
    known = [backlog for backlog in backlogs if backlog]
    if not known:
        return False
    level = np.asarray(known, dtype=np.float64).mean(axis=0)
    num_warm_up = max(NUM_WARM_UP, math.ceil(NUM_PARTS * min(filling_share, 1.0)))
    if num_warm_up > NUM_WARM_UP and waiting_share >= LONG_WAIT and level[-1] > level.mean():
        return True
    return NUM_PARTS - num_warm_up in LEAST_T and _rises(level[num_warm_up:], _spread(filling_share))


def _rises(level: Floats, spread: float) -> bool:
    """Whether the last parts rise; `spread` is what neighbours' likeness does to a slope's error."""
    number = len(level)
    place = np.arange(number) - (number - 1) / 2.0
    slope = float(place @ level / (place @ place))
    rest = level - level.mean() - slope * place
    error = spread * float(np.sqrt(rest @ rest / (number - 2) / (place @ place)))
    rise = slope * (number - 1)
    # A straight line from nothing at the first arrival has its means at the middles of the parts.
    unchecked = 2.0 * (number - 1) / (2 * NUM_PARTS - number)
    return rise >= max(1.0, LEAST_RISE * unchecked * float(level.mean())) and slope >= LEAST_T[number] * error


def _spread(filling_share: float) -> float:
    """Tenths of a short run are alike: who is there is forgotten within a service time, as in an AR(1) process."""
    if filling_share <= 0.0:
        return 1.0
    likeness = math.exp(-1.0 / (NUM_PARTS * filling_share))
    return math.sqrt((1.0 + likeness) / (1.0 - likeness))

"""Whether a run was in steady state: did the queue keep growing for as long as requests arrived?

Where more arrives than is served the backlog grows until the last arrival, and every latency depends on how many
requests the run had. The number of requests that an arriving one finds in the system shows it whatever the bottleneck
is (the waiting list, a growing batch, preemptions), and by Little's law it is what latency follows.

Law of this file: pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from minedraft.run_data import Floats

NUM_PARTS: Final = 10
NUM_WARM_UP: Final = 2  # parts left out: an empty system fills up even at light load
LEAST_T: Final = 3.143  # one-sided 1 % point of Student's t with 6 degrees of freedom, for the slope through 8 points
LEAST_RISE: Final = 0.5  # of the mean backlog; a queue that grows from nothing at a constant rate has 1.17


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


def still_growing(backlogs: Sequence[Sequence[float]]) -> bool:
    """Whether the backlog kept growing after the warm-up, clearly and by much.

    A line through the means over the runs must rise at the 1 % level, and from end to end by half of its mean and by
    one request. At a load just above capacity, or in a short run, growth may stay unseen.

    Args:
        backlogs: `backlog_by_tenth` of runs that differ in the seed; empty ones say nothing.
    """
    known = [backlog for backlog in backlogs if backlog]
    if not known:
        return False
    level = np.asarray(known, dtype=np.float64).mean(axis=0)[NUM_WARM_UP:]
    place = np.arange(len(level)) - (len(level) - 1) / 2.0
    slope = float(place @ level / (place @ place))
    rise = slope * (len(level) - 1)
    rest = level - level.mean() - slope * place
    error = float(np.sqrt(rest @ rest / (len(level) - 2) / (place @ place)))
    return rise >= max(1.0, LEAST_RISE * float(level.mean())) and slope >= LEAST_T * error

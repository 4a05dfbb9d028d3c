"""The star: one drafter group shared by n target replicas, each of them PSD with two batches of its own.

Not in the paper. Where drafting is short, a drafter of one's own idles most of the time; shared, its price is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minedraft.theory.fairness import per_device_gain
from minedraft.theory.stages import StageTimes


@dataclass(frozen=True, slots=True)
class Star:
    """A star in steady state, with constant stage times.

    Every replica needs the drafter for t once per round of its own, so a round takes max(max(V, t) + o, n t). That is
    exact for constant times and drafting first come, first served: the replicas fall into a rhythm in which nobody
    waits as long as the drafter isn't full. With random times they do wait, and this is the least that a round takes.
    Works of different replicas are never drafted together; a drafter that batches them would be quicker.

    Attributes:
        stages: of one replica; t is the drafter's time for one of its batches.
        num_replicas: n, at least 1.
        target_devices: D, of one replica.
        draft_devices: d, of the one drafter.

    Raises:
        ValueError: `num_replicas` isn't at least 1.
    """

    stages: StageTimes
    num_replicas: int
    target_devices: int
    draft_devices: int

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas is {self.num_replicas}, must be >= 1")

    @property
    def step_s(self) -> float:
        """Seconds of a replica's round."""
        return max(self.stages.psd_s, self.num_replicas * self.stages.draft_s)

    @property
    def drafter_utilisation(self) -> float:
        """The share of time in which the drafter drafts."""
        return self.num_replicas * self.stages.draft_s / self.step_s

    @property
    def num_devices(self) -> int:
        """Of all groups: n D + d."""
        return self.num_replicas * self.target_devices + self.draft_devices

    @property
    def gain(self) -> float:
        """Throughput of a replica over that of SD on its devices, less 1."""
        return self.stages.sd_s / self.step_s - 1.0

    @property
    def per_device_gain(self) -> float:
        """The same per device: (1 + gain) n D / (n D + d) - 1."""
        return per_device_gain(self.gain, self.num_replicas * self.target_devices, self.draft_devices)


def best_num_replicas(stages: StageTimes, target_devices: int, draft_devices: int) -> int | None:
    """The n with the largest gain per device, the smallest of equals; None if every further target adds to it (t = 0).

    The gain per device rises until the drafter is full, n t = max(V, t) + o, and falls from there, so it is one of the
    two whole numbers around that.
    """
    if draft_devices == 0:
        return 1
    if not stages.draft_s:
        return None
    full = max(1, math.floor(stages.psd_s / stages.draft_s))
    stars = [Star(stages, n, target_devices, draft_devices) for n in (full, full + 1)]
    return max(stars, key=lambda star: star.per_device_gain).num_replicas


def break_even_num_replicas(stages: StageTimes, target_devices: int, draft_devices: int) -> int | None:
    """The smallest n at which the star has the throughput per device of SD or more; None if no n has.

    While the drafter isn't full, (1 + gain) n D >= n D + d, so n >= d / (D gain).
    """
    gain = stages.gain
    if draft_devices == 0:
        return 1
    if gain <= 0.0:
        return None
    # One step back, lest rounding in the quotient has lost a draw.
    least = max(1, math.ceil(draft_devices / (target_devices * gain)) - 1)
    for n in (least, least + 1):
        if Star(stages, n, target_devices, draft_devices).per_device_gain >= -1e-12:
            return n
    return None

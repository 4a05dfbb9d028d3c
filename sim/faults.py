"""Faults to inject into a simulated run: outages of the drafter, works that fail, devices that pause.

All are finite and fixed before the run starts, from a seed where they are random: a fault schedule is part of
a run's input, never of its luck.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["target", "drafter"]


@dataclass(frozen=True, slots=True)
class DrafterOutage:
    """The drafter is gone for a while, with all its KV and its work in flight.

    Attributes:
        at_s: when it is lost, in seconds.
        duration_s: until it is back, above 0; infinite if it never is.

    Raises:
        ValueError: a field is out of range.
    """

    at_s: float
    duration_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.at_s < math.inf:
            raise ValueError(f"DrafterOutage.at_s is {self.at_s}, must be finite and >= 0")
        if not self.duration_s > 0.0:
            raise ValueError(f"DrafterOutage.duration_s is {self.duration_s}, must be > 0")


@dataclass(frozen=True, slots=True)
class DevicePause:
    """A device is busy with something else; queues behind the work it has at that moment.

    Attributes:
        device: which one; with one shared device both names mean it.
        at_s: when the pause is asked for, in seconds.
        duration_s: how long it lasts, in seconds.

    Raises:
        ValueError: a field is out of range.
    """

    device: DeviceName
    at_s: float
    duration_s: float

    def __post_init__(self) -> None:
        if self.device not in ("target", "drafter"):
            raise ValueError(f"DevicePause.device is {self.device!r}, must be 'target' or 'drafter'")
        for name, value in (("at_s", self.at_s), ("duration_s", self.duration_s)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"DevicePause.{name} is {value}, must be finite and >= 0")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a run.

    Attributes:
        outages: of the drafter, in order of time and disjoint.
        pauses: of devices, in any order.
        draft_failure_rate: chance that a draft work comes back as `WorkFailed`, in [0, 1].
        verify_failure_rate: the same for a verify work. At 1 no request can ever end but by the core giving
            up.
        seed: of the coins for failing works: one per work that a device completes, a stream per device group.

    Raises:
        ValueError: a rate is outside [0, 1], or outages overlap.
    """

    outages: tuple[DrafterOutage, ...] = ()
    pauses: tuple[DevicePause, ...] = ()
    draft_failure_rate: float = 0.0
    verify_failure_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rates = (
            ("draft_failure_rate", self.draft_failure_rate),
            ("verify_failure_rate", self.verify_failure_rate),
        )
        for name, rate in rates:
            if not 0.0 <= rate <= 1.0:
                raise ValueError(f"Faults.{name} is {rate}, must be in [0, 1]")
        back_s = 0.0
        for i, outage in enumerate(self.outages):
            if outage.at_s < back_s:
                raise ValueError(
                    f"Faults.outages[{i}] starts at {outage.at_s} s, before the drafter is back at {back_s} s"
                )
            back_s = outage.at_s + outage.duration_s

    def coins(self, group: DeviceName) -> Iterator[bool]:
        """Whether the group's next work fails, without end."""
        rate = self.draft_failure_rate if group == "drafter" else self.verify_failure_rate
        stream = random.Random(f"{self.seed}/failure/{group}")
        while True:
            yield stream.random() < rate


def random_outages(
    *, horizon_s: float, mean_up_s: float, mean_down_s: float, seed: int = 0
) -> tuple[DrafterOutage, ...]:
    """Outages with exponential times between and during them.

    Args:
        horizon_s: no outage starts at or after this time.
        mean_up_s: mean time from being back (or from 0) to the next loss, above 0.
        mean_down_s: mean duration of an outage, above 0.
        seed: of the stream.

    Raises:
        ValueError: a mean is not positive and finite, or the horizon is infinite.
    """
    for name, value in (("horizon_s", horizon_s), ("mean_up_s", mean_up_s), ("mean_down_s", mean_down_s)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} is {value}, must be finite and > 0")
    stream = random.Random(f"{seed}/outages")
    outages: list[DrafterOutage] = []
    now_s = stream.expovariate(1.0 / mean_up_s)
    while now_s < horizon_s:
        down_s = max(stream.expovariate(1.0 / mean_down_s), 1e-9)
        outages.append(DrafterOutage(now_s, down_s))
        now_s += down_s  # in two steps, so that rounding can't put a loss before the drafter is back
        now_s += stream.expovariate(1.0 / mean_up_s)
    return tuple(outages)

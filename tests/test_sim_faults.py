"""Fault schedules: checks and seeding. What faults do to a run is tested with the backend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from minedraft.sim.faults import DevicePause, DrafterOutage, Faults, random_outages


def test_random_outages_are_seeded_disjoint_and_within_the_horizon() -> None:
    outages = random_outages(horizon_s=1000.0, mean_up_s=5.0, mean_down_s=1.0, seed=1)
    assert outages == random_outages(horizon_s=1000.0, mean_up_s=5.0, mean_down_s=1.0, seed=1)
    assert outages != random_outages(horizon_s=1000.0, mean_up_s=5.0, mean_down_s=1.0, seed=2)
    assert len(outages) == pytest.approx(1000 / 6, rel=0.3)
    assert all(outage.at_s < 1000.0 for outage in outages)
    Faults(outages=outages)  # checks that they don't overlap


def test_coins_have_one_stream_per_device_group() -> None:
    faults = Faults(draft_failure_rate=0.3, verify_failure_rate=0.3, seed=4)
    drafter = list(itertools.islice(faults.coins("drafter"), 5000))
    target = list(itertools.islice(faults.coins("target"), 5000))
    assert sum(drafter) / 5000 == pytest.approx(0.3, abs=0.03)
    assert drafter != target
    assert drafter == list(itertools.islice(faults.coins("drafter"), 5000))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DrafterOutage(-1.0), "DrafterOutage.at_s is -1.0"),
        (lambda: DrafterOutage(1.0, 0.0), "DrafterOutage.duration_s is 0.0"),
        (lambda: DrafterOutage(math.inf), "DrafterOutage.at_s is inf"),
        (lambda: DevicePause("gpu", 0.0, 1.0), "DevicePause.device is 'gpu'"),  # type: ignore[arg-type]
        (lambda: DevicePause("target", 0.0, math.inf), "DevicePause.duration_s is inf"),
        (lambda: Faults(draft_failure_rate=1.1), "Faults.draft_failure_rate is 1.1"),
        (lambda: Faults(verify_failure_rate=math.nan), "Faults.verify_failure_rate is nan"),
        (lambda: Faults(outages=(DrafterOutage(1.0), DrafterOutage(2.0, 1.0))), r"Faults.outages\[1\] starts at 2.0"),
        (lambda: random_outages(horizon_s=math.inf, mean_up_s=1.0, mean_down_s=1.0), "horizon_s is inf"),
    ],
)
def test_refusals_name_the_field(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

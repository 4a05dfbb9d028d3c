"""The work of a run grows like its number of requests: counted, not timed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
from minedraft.journal import Recorder
from minedraft.metrics import MetricsCollector
from minedraft.sim.acceptance import BetaRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.device_group import DeviceGroup
from minedraft.sim.gpus import load_gpu
from minedraft.sim.models import load_model
from minedraft.sim.roofline import Roofline
from minedraft.sim.steps import StepCost
from minedraft.sim.workload import FixedLength, Poisson, SyntheticWorkload

# Llama-3.1-70B on four H100 at 10 requests/s, where another simulator (github.com/inference-sim/inference-sim) takes
# more than four times as long for twice the requests; and a load that can't be served, so that the queue only grows.
TARGET = DeviceGroup(load_model("llama-3.1-70b"), load_gpu("h100"), 4)
DRAFTER = DeviceGroup(load_model("llama-3.1-8b"), load_gpu("h100"))


def calls_and_events(mode: str, rate: float, num_requests: int) -> tuple[int, int]:
    """Calls of functions, Python's and C's, and SimPy events that a whole run takes."""
    num_batches = 2 if mode == "psd" else 1
    config = SchedulerConfig(
        num_batches=num_batches,
        max_batch_size=32 // num_batches,
        num_speculative_tokens=4,
        num_draft_blocks=0 if mode == "ar" else 4096,
    )
    workload = SyntheticWorkload(Poisson(rate), FixedLength(512), FixedLength(24), num_requests)
    backend = SimBackend(workload, StepCost(Roofline(TARGET), Roofline(DRAFTER)), BetaRate(0.7, 4.0))
    core = Scheduler(config, load_policies({"mode": f"fixed,mode={mode}"}))
    metrics = MetricsCollector()
    engine = Engine(core, Recorder(backend, metrics))
    num_calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        while engine.step() is not None:
            pass
    finally:
        sys.setprofile(None)
    assert metrics.summarize().completed == num_requests
    # SimPy numbers its events with a counter; asking for the next number tells how many there were.
    return num_calls, next(backend.env._eid)


@pytest.mark.parametrize("mode", ["ar", "psd"])
@pytest.mark.parametrize("rate", [10.0, 400.0], ids=["served", "overload"])
def test_work_per_request_stays_the_same(mode: str, rate: float) -> None:
    sizes = 100, 200, 400
    calls, events = zip(*[calls_and_events(mode, rate, size) for size in sizes], strict=True)
    # Of what comes between n and 2 n requests, and between 2 n and 4 n: the filling of the batch is left out.
    for counted in (calls, events):
        first, second = (counted[1] - counted[0]) / 100, (counted[2] - counted[1]) / 200
        assert first > 1
        assert second == pytest.approx(first, rel=0.15), counted

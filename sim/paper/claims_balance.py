"""Claim E17: departures from one sub-batch leave the two lopsided under the authors' assignment, not under another.

The plugin caps the sum of both sub-batches only, and so does this: a sub-batch may hold all running requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Final

from minedraft.engine import Engine
from minedraft.policy import load_policies
from minedraft.request import FinishReason
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig
from minedraft.sim.acceptance import ConstantRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.paper.plugin_world import PluginWorld
from minedraft.sim.paper.setup import OUTPUT_LEN, QWEN, load_setting
from minedraft.sim.paper.stages import NsightStages
from minedraft.sim.paper.verdict import Basis, Line, order
from minedraft.sim.workload import SimRequest

M: Final = 8
K: Final = 3
NUM_REQUESTS: Final = 72
NUM_LEAVING: Final = 6
ABORT_AT_S: Final = (2.0, 2.06)  # within one round: either sub-batch is the next to be drafted at one of them
PLUGIN: Final = "in-phase"
ALWAYS: Final = "fewest-requests"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run left.

    Attributes:
        last: |size of one sub-batch - of the other| when the last request had joined.
        mean: the same, over the steps from the departures until then.
        undrafted: rows without drafts, beside prompts and last tokens, per request that joined.
    """

    last: int
    mean: float
    undrafted: float


def lines() -> list[Line]:
    """E17."""
    outcomes = {assignment: _outcomes(assignment) for assignment in (PLUGIN, ALWAYS)}
    plugin, always = outcomes[PLUGIN], outcomes[ALWAYS]
    worst = max(plugin, key=lambda outcome: outcome.mean)
    even = max(always, key=lambda outcome: outcome.last)
    cost = max(outcome.undrafted for outcome in always)
    what = f"{NUM_LEAVING} of {M} requests of one sub-batch abort"
    return [
        order(
            "E17",
            f"{what}: imbalance by the plugin's assignment",
            "persists",
            f"mean {worst.mean:.1f}, {worst.last} at the end",
            worst.mean > 2.0 and worst.last > 1,
            Basis.PREDICTED,
            f"worst of {len(plugin)} moments and sub-batches",
        ),
        order(
            "E17",
            f"{what}: at the end with {ALWAYS}",
            "≤ 1",
            f"{even.last}",
            even.last <= 1,
            Basis.PREDICTED,
        ),
        order(
            "E17",
            "its cost: rounds without drafts per request",
            "≤ 1",
            f"{cost:.3f}",
            cost <= 1.0,
            Basis.PREDICTED,
        ),
    ]


def _outcomes(assignment: str) -> list[Outcome]:
    return [_outcome(assignment, at_s, parity) for at_s in ABORT_AT_S for parity in (0, 1)]


def _outcome(assignment: str, at_s: float, parity: int) -> Outcome:
    """One run in which requests of the sub-batch that holds those of this parity leave."""
    stages = NsightStages.of(load_setting(QWEN[0]).draft, None)
    world = PluginWorld(SimBackend(_requests(at_s, parity), stages, ConstantRate(0.7, seed=1)), stages, 0.0)
    limits = SchedulerConfig(max_batch_size=2 * M, max_num_seqs=2 * M, num_speculative_tokens=K)
    engine = Engine(Scheduler(limits, load_policies({"assignment": assignment, "rebalance": "never"})), world)
    ended = [output for output in engine.outputs() if output.finish_reason is not FinishReason.ABORT]
    assert len(ended) == NUM_REQUESTS - NUM_LEAVING
    last_s = max(world.first_s.values())
    gaps = [abs(sizes[0] - sizes[1]) for now_s, sizes in world.sizes if at_s + 1.0 < now_s <= last_s]
    return Outcome(gaps[-1], fmean(gaps), world.num_undrafted / NUM_REQUESTS)


def _requests(at_s: float, parity: int) -> list[SimRequest]:
    """All there at once; the first ones are dealt out to the sub-batches in turn."""
    leaving = [i for i in range(2 * M) if i % 2 == parity][:NUM_LEAVING]
    return [
        SimRequest(f"r{i}", 0.0, 2, OUTPUT_LEN, OUTPUT_LEN, abort_after_s=at_s if i in leaving else None)
        for i in range(NUM_REQUESTS)
    ]

"""The benchmark's figures on simulated runs, where they are known in advance."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
from minedraft.journal import JournalHeader, JournalWriter, Recorder
from minedraft.sim.acceptance import ConstantRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import ConstantCost
from minedraft.sim.workload import SimRequest

sys.path.insert(0, str(Path(__file__).parent))

from overlap import Overlap, read_overlap

VERIFY_S, DRAFT_S, OVERHEAD_S = 0.050, 0.045, 0.002


def simulated(path: Path, mode: str, verify_s: float, draft_s: float) -> Overlap:
    """Four requests for warming up, then eight that all arrive at once; every draft is accepted."""
    requests = [SimRequest(f"w{i}", 0.0, 8, 20, 20) for i in range(4)]
    requests += [SimRequest(f"r{i}", 100.0, 8, 400, 400) for i in range(8)]
    backend = SimBackend(
        requests,
        ConstantCost(verify_base_s=verify_s, draft_base_s=draft_s, prefill_s=verify_s),
        ConstantRate(1.0),
        round_overhead_s=OVERHEAD_S,
    )
    num_batches = 2 if mode == "psd" else 1
    config = SchedulerConfig(num_batches=num_batches, max_batch_size=8 // num_batches, num_speculative_tokens=3)
    core = Scheduler(config, load_policies({"mode": f"fixed,mode={mode}"}))
    with Recorder(backend, JournalWriter(path, JournalHeader("test"))) as recorder:
        Engine(core, recorder).run()
    return read_overlap(path, "r")


@pytest.mark.parametrize(
    ("verify_s", "draft_s"), [(VERIFY_S, DRAFT_S), (DRAFT_S, VERIFY_S)], ids=["verify longer", "draft longer"]
)
def test_psd(verify_s: float, draft_s: float, tmp_path: Path) -> None:
    one = simulated(tmp_path / "run.jsonl", "psd", verify_s, draft_s)
    longer_s = max(verify_s, draft_s)
    assert one.verify_ms == pytest.approx(1000 * verify_s)
    assert one.draft_ms == pytest.approx(1000 * draft_s, rel=0.01)  # the first ones only ingest
    assert one.step_ms == pytest.approx(1000 * (longer_s + OVERHEAD_S), rel=0.01)
    assert one.step_ratio == pytest.approx((longer_s + OVERHEAD_S) / longer_s, rel=0.01)
    assert one.hidden == pytest.approx(min(draft_s, verify_s) / draft_s, rel=0.02)
    assert one.busy == pytest.approx(verify_s / (longer_s + OVERHEAD_S), rel=0.02)
    assert one.acceptance_length == pytest.approx(4.0, rel=0.01)  # the last drafts are cut at the limit
    assert one.batch == 4.0
    assert one.rounds == pytest.approx(2 * 400 / 4, abs=4)


def test_sd_and_feedback(tmp_path: Path) -> None:
    """The drafter of the simulator has the tokens at once, and is always free in sd."""
    one = simulated(tmp_path / "run.jsonl", "sd", VERIFY_S, DRAFT_S)
    assert one.hidden == 0.0
    assert one.step_ms == pytest.approx(1000 * (VERIFY_S + DRAFT_S + OVERHEAD_S), rel=0.01)
    assert len(one.feedback_ms) == pytest.approx(one.rounds, abs=2)
    assert max(one.feedback_ms) == pytest.approx(0.0, abs=1e-6)
    assert one.num_late <= 1


def test_feedback_where_the_drafter_is_busy(tmp_path: Path) -> None:
    """A verification that ends while the other sub-batch is drafted isn't counted as feedback, but as late."""
    one = simulated(tmp_path / "run.jsonl", "psd", DRAFT_S, VERIFY_S)
    assert one.num_late == pytest.approx(one.rounds, abs=4)
    assert len(one.feedback_ms) <= 4

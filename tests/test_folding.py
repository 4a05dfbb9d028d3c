"""Figures of runs that are too long to be kept; tests/test_metrics.py has the comparison of whole streams."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
from minedraft.folding import MAX_BLOCKS, Folded
from minedraft.histogram import PERCENTILE_ERROR
from minedraft.journal import Recorder
from minedraft.metrics import Kept, MetricsCollector
from minedraft.run_data import COMPLETED, OPEN, LatencyStats, RunData
from minedraft.sim.acceptance import BetaRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import LinearCost
from minedraft.sim.workload import Aborts, FixedLength, LognormalLength, Poisson, SyntheticWorkload
from minedraft.summary import Summary, summarize

COST = LinearCost(
    verify_base_s=0.02, verify_per_seq_s=1e-4, prefill_base_s=0.02, prefill_per_token_s=1e-5, draft_base_s=0.005
)
MODES = ("ar", "sd", "psd")


def run(mode: str, num_requests: int, *collectors: MetricsCollector) -> Engine:
    """Below capacity, with preemptions, and clients that leave."""
    config = SchedulerConfig(
        num_batches=2 if mode == "psd" else 1,
        max_batch_size=8 if mode == "psd" else 16,
        num_speculative_tokens=4,
        num_target_blocks=70,
        num_draft_blocks=0 if mode == "ar" else 70,
        max_model_len=512,
    )
    workload = SyntheticWorkload(
        Poisson(16.0 if mode == "ar" else 24.0),
        FixedLength(64),
        LognormalLength(20, p50=16, max_tokens=60),
        num_requests=num_requests,
        aborts=Aborts(0.2, 1.0),
    )
    backend = SimBackend(workload, COST, BetaRate(0.7, 4.0), draft_probs=True)
    core = Scheduler(config, load_policies({"mode": f"fixed,mode={mode}"}))
    engine = Engine(core, Recorder(backend, *collectors))
    while engine.step() is not None:
        pass
    return engine


def simulated(mode: str, num_requests: int, *collectors: MetricsCollector) -> list[Summary]:
    run(mode, num_requests, *collectors)
    return [collector.summarize() for collector in collectors]


@pytest.mark.parametrize("mode", MODES)
def test_a_simulated_run_has_the_same_figures(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minedraft.metrics.FLUSH_ROWS", 64)
    collectors = MetricsCollector(max_kept=None), MetricsCollector(max_kept=Kept(100, 1000, 200))
    exact, folded = [summary.to_dict() for summary in simulated(mode, 1500, *collectors)]
    assert collectors[1].device_times_s() == pytest.approx(collectors[0].device_times_s())
    assert collectors[0].device_times_s()[0] == pytest.approx(exact["mean_verify_ms"] * exact["rounds"] / 1000)
    assert exact["completed"] > 1000
    assert exact["num_aborted"] > 50
    assert exact["num_preemptions"] > 5
    for name, value in exact.items():
        if name == "percentile_error" or value is None:
            continue
        rough = name.startswith(("p50", "p9", "median"))
        assert folded[name] == pytest.approx(value, rel=1.01 * PERCENTILE_ERROR if rough else 1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_memory_is_bounded(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who takes part in a run, the world and the core included, keeps anything of requests that have ended."""
    monkeypatch.setattr("minedraft.metrics.FLUSH_ROWS", 256)

    def live_bytes(num_requests: int) -> int:
        collector = MetricsCollector(max_kept=Kept(100, 1000, 200))
        tracemalloc.start()
        try:
            engine = run(mode, num_requests, collector)
            gc.collect()
            assert engine.scheduler.state.num_finished == num_requests
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    live_bytes(100)  # what is made once in a process
    more = live_bytes(1500) - live_bytes(500)
    assert more < 40 * 1000, f"{more / 1000:.0f} bytes per request that ended"


def run_data(arrival_s: np.ndarray, end_s: np.ndarray, now_s: float) -> RunData:
    """Requests that have two tokens each, and nothing but requests."""
    spans = np.empty((0, 2))
    number = len(arrival_s)
    return RunData(
        status=np.where(np.isnan(end_s), OPEN, COMPLETED),
        arrival_s=arrival_s,
        prompt_len=np.full(number, 7),
        output_len=np.full(number, 2),
        first_scheduled_s=arrival_s,
        first_token_s=arrival_s + 0.01,
        last_token_s=np.where(np.isnan(end_s), arrival_s + 0.01, end_s),
        end_s=end_s,
        gaps_s=end_s[~np.isnan(end_s)],
        verify_spans_s=spans,
        draft_spans_s=spans,
        ingest_spans_s=spans,
        last_event_s=now_s,
        max_tokens_in_a_second=0,
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_at=np.zeros(0, dtype=np.int64),
        num_drafted_tokens=0,
        num_entries=0,
        num_preemptions=0,
        num_failed_works=0,
        num_drafter_losses=0,
        zero_draft=(0,) * 13,
        batch_sizes={},
    )


def in_parts(arrival_s: np.ndarray, end_s: np.ndarray, num_folds: int) -> Summary:
    """The summary of requests that were folded now and then."""
    folded = Folded()
    alive = np.zeros(0, dtype=np.int64)
    known = 0
    for now_s in np.linspace(arrival_s[0], end_s.max() * 0.99, num_folds):
        come = np.searchsorted(arrival_s, now_s, side="right")
        rows = np.concatenate([alive, np.arange(known, come)])
        known = int(come)
        ends_s = np.where(end_s[rows] <= now_s, end_s[rows], np.nan)
        folded.fold(run_data(arrival_s[rows], ends_s, float(now_s)), float(now_s))
        alive = rows[np.isnan(ends_s)]
    rows = np.concatenate([alive, np.arange(known, len(arrival_s))])
    return summarize(run_data(arrival_s[rows], end_s[rows], float(end_s.max())), folded=folded)


@pytest.mark.parametrize("number", [50, 1000, 9 * MAX_BLOCKS + 77])
@pytest.mark.parametrize("num_folds", [1, 2, 40])
def test_who_is_there_at_once(number: int, num_folds: int) -> None:
    rng = np.random.default_rng(number + num_folds)
    arrival_s = rng.exponential(0.3, number).cumsum()
    end_s = arrival_s + rng.exponential(2.0 + 5.0 * np.linspace(0.0, 1.0, number) ** 2)
    whole = summarize(run_data(arrival_s, end_s, float(end_s.max())))
    parts = in_parts(arrival_s, end_s, num_folds)
    assert parts.max_concurrent_requests == whole.max_concurrent_requests
    exact = number <= MAX_BLOCKS
    assert parts.backlog_by_tenth == pytest.approx(whole.backlog_by_tenth, rel=1e-9 if exact else 2e-3)
    assert whole.backlog_by_tenth[-1] > 2 * whole.backlog_by_tenth[0]
    assert parts.decode_verify_share == 0.0
    assert parts.duration == pytest.approx(whole.duration)
    assert parts.arrival_span == whole.arrival_span == arrival_s[-1] - arrival_s[0]


def test_a_folded_run_says_so() -> None:
    collectors = MetricsCollector(max_kept=Kept(10, 1000, 1000)), MetricsCollector()
    folded, exact = simulated("ar", 30, *collectors)
    assert folded.percentile_error == PERCENTILE_ERROR
    assert exact.percentile_error == 0.0
    assert isinstance(folded.ttft, LatencyStats)

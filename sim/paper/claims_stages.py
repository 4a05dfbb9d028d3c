"""Claims about stage times: E1 (their balance) and E18 (what CUDA graphs would leave of the gain)."""

from __future__ import annotations

from typing import Final

from minedraft.sim.cost import PAPER_MEDIANS
from minedraft.sim.paper.bench import Bench
from minedraft.sim.paper.calibration import FITTED_ON, Calibration
from minedraft.sim.paper.setup import QWEN, load_prompts, load_setting
from minedraft.sim.paper.stages import rooflines_of
from minedraft.sim.paper.trial import Trial
from minedraft.sim.paper.verdict import Basis, Line, Shown, Verdict, figure, order

CONTEXT: Final = 1000  # tokens behind each request on Spec-Bench, about
K: Final = 3
GRAPHS: Final = (*QWEN, "S4")
MOST_WITH_GRAPHS: Final = 20.0


def trials(bench: Bench, calibration: Calibration) -> list[Trial]:
    """All runs that these claims need."""
    graphs = [trial for pair in _graph_trials(bench, calibration).values() for trial in pair]
    return graphs + [_nsight(calibration, name, k) for name in QWEN for k in PAPER_MEDIANS[load_setting(name).draft]]


def lines(bench: Bench, calibration: Calibration) -> list[Line]:
    """E1 and E18."""
    return [*_balance(bench, calibration), *_graphs(bench, calibration)]


def _nsight(calibration: Calibration, name: str, k: int) -> Trial:
    return calibration.trial(name, FITTED_ON, "psd", k, load_prompts(FITTED_ON).num_requests)


def _balance(bench: Bench, calibration: Calibration) -> list[Line]:
    found = []
    for name in QWEN:
        for k, medians in PAPER_MEDIANS[load_setting(name).draft].items():
            trial = _nsight(calibration, name, k)
            ours = bench[trial].draft_s / bench[trial].verify_s
            paper = medians.draft_s / medians.verify_s
            roofline = _roofline_balance(name, k)
            note = f"from shapes alone, roofline in eager mode: {roofline:.3f}"
            what = f"{name}, k = {k}: t / V, median of the simulated works"
            found.append(
                figure("E1", what, paper, ours, 0.05, Basis.INPUT, shown=Shown(decimals=3, relative=True), note=note)
            )
    return found


def _roofline_balance(name: str, k: int) -> float:
    """The t / V with 16 requests behind `CONTEXT` tokens each, nothing of it measured at the paper's."""
    target, drafter = rooflines_of(load_setting(name))
    rows = load_setting(name).batch_size
    width, context = k + 1, rows * CONTEXT
    verify_s = target.step_s(rows, rows * width, context, context * width, rows * width)
    return k * drafter.step_s(rows, rows, context, context, rows) / verify_s


def _graph_trials(bench: Bench, calibration: Calibration) -> dict[tuple[str, bool], tuple[Trial, Trial]]:
    """SD and PSD on the roofline with CUDA graphs, by setting and whether host work is left out."""
    found = {}
    for name in GRAPHS:
        for bare in (True, False):
            host = {"host_row_s": 0.0} if bare else {}
            made = [
                calibration.trial(name, "tough", mode, K, bench.scale.sweep_requests, eager=False, **host)
                for mode in ("sd", "psd")
            ]
            found[name, bare] = (made[0], made[1])
    return found


def _graphs(bench: Bench, calibration: Calibration) -> list[Line]:
    gains = {
        key: 100.0 * (bench[psd].throughput / bench[sd].throughput - 1.0)
        for key, (sd, psd) in _graph_trials(bench, calibration).items()
    }
    listed = {bare: ", ".join(f"{name} {gains[name, bare]:.1f} %" for name in GRAPHS) for bare in (True, False)}
    best = max(GRAPHS, key=lambda name: gains[name, False])
    with_host = gains["S1", False]
    return [
        Line(
            "E18",
            "S1 (0.6B) with CUDA graphs: Delta at k = 3",
            "no figure",
            f"{with_host:.1f} % ({gains['S1', True]:.1f} % without host work)",
            f"≤ {MOST_WITH_GRAPHS:g} %",
            Verdict.MET if with_host <= MOST_WITH_GRAPHS else Verdict.MISSED,
            Basis.WHAT_IF,
            "eager mode makes drafting slow: its launches, not the drafter's size, take the time",
            our_value=with_host,
        ),
        order(
            "E18",
            "drafter with the largest gain under CUDA graphs, k = 3",
            "4B",
            f"{load_setting(best).draft}: {listed[False]}",
            best == "S3",
            Basis.WHAT_IF,
            f"without host work: {listed[True]}",
        ),
    ]

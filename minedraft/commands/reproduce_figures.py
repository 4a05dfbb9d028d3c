"""The figures of `minedraft reproduce paper`, drawn with matplotlib (`draw`)."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minedraft.theory import theorem

if TYPE_CHECKING:
    from minedraft.sim.paper.calibration import Calibration
    from minedraft.sim.paper.gains import GainTable
    from minedraft.sim.paper.reproduction import Reproduction

COLOURS: Final = {"arena": "#1b6ca8", "sharegpt": "#d1495b", "spec-bench": "#5b8e3e", "tough": "#e09f3e"}
INK: Final = "#333333"
DPI: Final = 150
CAPTION_PER_INCH: Final = 18  # characters


def draw(found: Reproduction, folder: Path) -> list[Path]:
    """Draw what there are figures for.

    Raises:
        OSError: a file can't be written.
    """
    written = []
    if any(line.is_theory for line in found.lines):
        written.append(_theorem(folder / "theorem.png"))
    if found.table is not None and found.table.cells:
        written.append(_gains(found.table, folder / "delta-over-k.png"))
    claims = [line.claim for line in found.lines]
    if found.calibration is not None and "E10" in claims:
        written.append(_against_2m(found, found.calibration, folder / "psd-over-sd-2m.png"))
    if "E1" in claims:
        written.append(_stages(folder / "stage-times.png"))
    return written


def _canvas(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, two-dimensional, without a window system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _save(figure: Any, path: Path, caption: str) -> Path:
    """Put the caption below the axes, and write."""
    lines = textwrap.fill(caption, int(CAPTION_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(lines, fontsize=7.5, color=INK, ha="left", x=0.01)
    figure.savefig(path, dpi=DPI)
    return path


def _gains(table: GainTable, path: Path) -> Path:
    """The best variant's Delta over k for each setting; the paper's largest as dashes."""
    from minedraft.sim.paper.setup import load_setting, published_gain

    names = [name for name in table.settings if any(key[0] == name for key in table.cells)]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, grid = _canvas(rows, columns, 3.4 * columns, 2.7 * rows + 0.7)
    for axes, name in zip(grid.flat, names, strict=False):
        for dataset, cell in table.of(name).items():
            curve = cell.curve()
            gains = [100.0 * curve[k] for k in sorted(curve)]
            axes.plot(sorted(curve), gains, marker="o", markersize=3, color=COLOURS[dataset], label=dataset)
            paper = published_gain(name, "throughput_delta", dataset)
            axes.axhline(paper, color=COLOURS[dataset], linestyle=(0, (4, 3)), linewidth=0.9)
        setting = load_setting(name)
        axes.set_title(f"{name}: {setting.target} + {setting.draft}", fontsize=8)
        axes.set_xticks(sorted(curve))
        axes.set_ylim(0.0, 85.0 if name in ("S1", "S2", "S3") else 45.0)
        _tidy(axes)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("throughput Delta (%)", fontsize=8)
    grid.flat[0].legend(fontsize=7, frameon=False, loc="lower right")
    caption = (
        "Gain of the best MineDraft variant (TETRIS included) over plain SD at the same k, simulated (lines), and "
        "the largest over k that the paper reports (dashes): arXiv 2603.18016v1, Figs. 3, 4, 9. Horizontal: k. Host "
        "work is fitted on Spec-Bench, per setting; all else is predicted."
    )
    return _save(figure, path, caption)


def _against_2m(found: Reproduction, calibration: Calibration, path: Path) -> Path:
    """PSD(m) over SD(2m) in S1, by k, for every m that was run."""
    from minedraft.sim.paper.claims_sweeps import rivals

    ratios = rivals(found.bench, calibration)
    figure, grid = _canvas(1, 1, 5.2, 3.6)
    axes = grid[0][0]
    axes.axhline(1.0, color=INK, linewidth=0.9)
    axes.plot(list(ratios), list(ratios.values()), marker="o", color=COLOURS["arena"])
    for k, ratio in ratios.items():
        axes.annotate(f"{ratio:.2f}", (k, ratio), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    axes.set_xlabel("k", fontsize=8)
    axes.set_ylabel("throughput, PSD(16) / SD(32)", fontsize=8)
    axes.set_xticks(list(ratios))
    axes.set_ylim(0.5, 1.2)
    _tidy(axes)
    caption = (
        "S1 (Qwen3-32B + Qwen3-0.6B), Arena, simulated: PSD with 16 + 16 requests in flight on five GPUs against plain "
        "SD with 32 on four. The paper (appendix B.6) finds the two about equal at k > 4 to 5."
    )
    return _save(figure, path, caption)


def _theorem(path: Path) -> Path:
    """The exact ratio of Theorem 1's model, what its proof shows, and where the claim holds."""
    import numpy as np

    low, high = theorem.range_of_ratio()
    start = theorem.claimed_from()
    figure, grid = _canvas(1, 1, 6.2, 3.9)
    axes = grid[0][0]
    xs = np.geomspace(0.05, 100.0, 300)
    axes.axvspan(low, high, color="#5b8e3e", alpha=0.13, linewidth=0, label=f"37 % holds: {low:.3f} to {high:.3f}")
    axes.plot(xs, [theorem.ratio(float(x)) for x in xs], color=COLOURS["arena"], label="T_SD / T_PSD, exact")
    right = xs[xs >= start]
    axes.plot(
        right,
        [theorem.proven_bound(float(x)) for x in right],
        color=COLOURS["sharegpt"],
        linestyle="--",
        label="1 + ln(1 + x) / x, what the proof shows",
    )
    axes.plot([start, xs[-1]], [theorem.CLAIMED_RATIO] * 2, color=INK, linewidth=0.9, label="1.59, Theorem 1's claim")
    axes.set_xscale("log")
    axes.set_xlabel("x = alpha V", fontsize=8)
    axes.set_ylabel("ratio of times", fontsize=8)
    axes.set_ylim(1.0, 2.08)
    axes.legend(fontsize=7, frameon=False, loc="lower left")
    _tidy(axes)
    caption = (
        "Theorem 1 of arXiv 2603.18016v1 claims a ratio above 1.59 (37 % less time) for every alpha V of 1.678 or "
        f"more. Exactly, it is 2 at {theorem.peak():.4f} and falls to 1 on both sides."
    )
    return _save(figure, path, caption)


def _stages(path: Path) -> Path:
    """Published stage times, and the lines through them that the simulator uses."""
    from minedraft.sim.cost import PAPER_MEDIANS
    from minedraft.sim.paper.setup import DRAFT_LENGTHS, QWEN, load_setting
    from minedraft.sim.paper.stages import NSIGHT_ROWS, NsightStages

    figure, grid = _canvas(1, len(QWEN), 3.2 * len(QWEN), 3.3)
    for axes, name in zip(grid[0], QWEN, strict=True):
        drafter = load_setting(name).draft
        stages = NsightStages.of(drafter, None)
        pairs = [stages.at(NSIGHT_ROWS, k) for k in DRAFT_LENGTHS]
        medians = PAPER_MEDIANS[drafter]
        for label, colour, line, points in (
            ("V, verify", COLOURS["arena"], [v for v, _ in pairs], [m.verify_s for m in medians.values()]),
            ("t, draft", COLOURS["sharegpt"], [t for _, t in pairs], [m.draft_s for m in medians.values()]),
        ):
            axes.plot(DRAFT_LENGTHS, [1e3 * value for value in line], color=colour, label=label)
            axes.plot(list(medians), [1e3 * value for value in points], "o", color=colour, markersize=5)
        axes.set_title(f"{name}: {drafter}", fontsize=8)
        axes.set_xticks(DRAFT_LENGTHS)
        axes.set_ylim(0.0, 110.0)
        _tidy(axes)
    grid[0][0].set_ylabel("ms per step of 16 requests", fontsize=8)
    grid[0][0].legend(fontsize=7, frameon=False, loc="upper left")
    caption = (
        "Balance of the stages, target Qwen3-32B on four L40, over k (horizontal). Dots: medians published in arXiv "
        "2603.18016v1, Fig. 25 (k = 3 and 4 only). Lines: what is simulated. The gain is largest where t meets V."
    )
    return _save(figure, path, caption)

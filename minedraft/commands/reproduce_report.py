"""What `minedraft reproduce paper` prints and writes: tables of claims, gains and runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import minedraft
from minedraft.commands.demo import heading, paragraph
from minedraft.commands.report import console

if TYPE_CHECKING:
    from rich.table import Table

    from minedraft.sim.paper.calibration import Calibration
    from minedraft.sim.paper.reproduction import Reproduction
    from minedraft.sim.paper.verdict import Line

SOURCE: Final = "MineDraft, arXiv 2603.18016v1"
FIGURES_OF_TRIAL: Final = ("throughput", "latency_s", "decode_s", "prompt_share", "tokens_per_row")
"""Properties of `Figures` that go into the tables beside its fields."""


def print_reproduction(found: Reproduction, written: Sequence[Path]) -> None:
    """Print all of it on stdout."""
    theory = [line for line in found.lines if line.is_theory]
    experiment = [line for line in found.lines if not line.is_theory]
    out = console()
    if theory:
        heading("1. The theory, exact")
        out.print(_table(theory))
    if experiment:
        heading("2. The experiments, simulated")
        if found.calibration is not None:
            paragraph(_calibrated(found.calibration, found.bench.scale.name) + "\n")
        out.print(_table(experiment))
        _print_missed(experiment)
    heading("3. In all")
    paragraph(_summary(found))
    heading("Files")
    for path in written:
        out.print(f"  {path}", markup=False)


def _table(lines: Sequence[Line]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("claim", no_wrap=True)
    table.add_column("figure")
    for name in ("paper, or derived", "ours", "tolerance"):
        table.add_column(name, justify="right")
    table.add_column("verdict", no_wrap=True)
    table.add_column("ours is", no_wrap=True)
    before = None
    for line in lines:
        if before not in (None, line.claim):
            table.add_section()
        style = None if line.verdict == "met" else "bold"
        name = "" if line.claim == before else line.claim
        table.add_row(name, line.what, line.paper, line.ours, line.tolerance, line.verdict, line.basis, style=style)
        before = line.claim
    return table


def _print_missed(lines: Sequence[Line]) -> None:
    missed = [line for line in lines if line.verdict != "met"]
    if not missed:
        return
    paragraph("\nNot met, and why as far as it is known:")
    for line in missed:
        paragraph(f"* {line.claim}, {line.what}: {line.ours} instead of {line.paper}. {_sentence(line.note)}".rstrip())


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}." if note else ""


def _calibrated(calibration: Calibration, scale: str) -> str:
    from minedraft.sim.paper.setup import load_setting

    fitted = ", ".join(
        f"{name} {1e3 * row_s * load_setting(name).batch_size:.1f}" for name, row_s in calibration.host_row_s.items()
    )
    return (
        "Inputs: the medians of Fig. 25 (S1 to S3); for S4 to S8 a roofline in eager mode. Fitted: host work per step, "
        f"in ms at full batches, to the largest throughput Delta on Spec-Bench ({fitted}), and one mean acceptance "
        f"rate, {calibration.mean_rate:.3f}, to the blog's 310 tok/s of SD in S2. Not fitted: how requests differ in "
        f"their rates (a log of a real drafter), EAGLE's mean rate ({calibration.head_rate:.2f}, the same log), prompt "
        f"lengths (assumed), the time of prompts (roofline). All that is marked as predicted follows. Scale: {scale}."
    )


def _summary(found: Reproduction) -> str:
    from minedraft.sim.paper.verdict import Tally

    def tally(*, theory: bool, number: bool | None = None, predicted: bool = False) -> Tally:
        lines = [line for line in found.lines if line.is_theory == theory]
        if number is not None:
            lines = [line for line in lines if line.is_number == number]
        return Tally.of([line for line in lines if line.basis == "predicted"] if predicted else lines)

    numbers = tally(theory=False, number=True)
    share = f" ({100 * numbers.num_met / numbers.num_lines:.0f} %)" if numbers.num_lines else ""
    return (
        f"Theory: {tally(theory=True)} met. Experiments: of the figures {numbers}{share} within tolerance, of those "
        f"that are predicted {tally(theory=False, number=True, predicted=True)}; of the signs and orders "
        f"{tally(theory=False, number=False)}. {found.bench.num_trials} runs. A missed figure is a result: the exit "
        "code says only whether everything ran."
    )


# --- files


def write_tables(found: Reproduction, folder: Path) -> list[Path]:
    """Write claims, gains and runs as CSV.

    Raises:
        OSError: a file can't be written.
    """
    written = [_write(folder / "claims.csv", [_line_row(line) for line in found.lines])]
    gains = _gain_rows(found)
    if gains:
        written.append(_write(folder / "gains.csv", gains))
    runs = [
        {**asdict(trial), **asdict(figures), **{name: getattr(figures, name) for name in FIGURES_OF_TRIAL}}
        for trial, figures in found.bench.items()
    ]
    if runs:
        written.append(_write(folder / "runs.csv", runs))
    return written


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["claim"])
        writer.writeheader()
        writer.writerows(rows)
    return path


def _line_row(line: Line) -> dict[str, Any]:
    row = asdict(line)
    for name in ("verdict", "basis"):
        row[name] = str(row[name])
    for name in ("paper_value", "our_value"):
        row[name] = None if math.isnan(row[name]) else row[name]
    return row


def _gain_rows(found: Reproduction) -> list[dict[str, Any]]:
    if found.table is None:
        return []
    return [
        {
            "setting": name,
            "dataset": dataset,
            "k": k,
            "tetris_extra": extra,
            "sd_tokens_per_s": cell.plain[k].throughput,
            "psd_tokens_per_s": figures.throughput,
            "throughput_delta": cell.throughput_gain(k, extra),
            "time_saved": cell.time_saved(k, extra),
        }
        for (name, dataset), cell in found.table.cells.items()
        for (k, extra), figures in sorted(cell.psd.items())
    ]


def as_json(found: Reproduction) -> dict[str, Any]:
    """All of it, ready for JSON."""
    return {
        "minedraft": minedraft.__version__,
        "command": "reproduce paper",
        "source": SOURCE,
        "scale": found.bench.scale.name,
        "num_runs": found.bench.num_trials,
        "calibration": None if found.calibration is None else asdict(found.calibration),
        "claims": [_line_row(line) for line in found.lines],
        "gains": _gain_rows(found),
    }

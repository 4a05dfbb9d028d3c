"""Turns runs into a table and into JSON; names are those of `vllm bench serve` where it has the figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

import minedraft
from minedraft.commands.drive import Outcome
from minedraft.commands.errors import CommandError, unusable_file
from minedraft.config import PEARL_MODES
from minedraft.scheduler_config import SchedulerConfig
from minedraft.steady_state import still_growing
from minedraft.summary import Summary


@dataclass(frozen=True, slots=True)
class Column:
    """A run to report.

    Attributes:
        name: its heading.
        mode: ar, sd, psd or a PEARL.
        scheduler: limits that held.
        outcome: what came of it.
        closed_loop: clients wait for their answers, so that no backlog can grow.
    """

    name: str
    mode: str
    scheduler: SchedulerConfig
    outcome: Outcome
    closed_loop: bool = False

    @property
    def summary(self) -> Summary:
        """Its figures."""
        return self.outcome.summary

    @property
    def growing(self) -> bool:
        """Whether its backlog kept growing, see `minedraft.steady_state`."""
        summary = self.summary
        return not self.closed_loop and still_growing(
            [summary.backlog_by_tenth], filling_share=summary.filling_share, waiting_share=summary.waiting_share
        )

    @property
    def running_limit(self) -> int:
        """The most requests that may be in flight, in all replicas together."""
        return self.scheduler.running_limit * max(1, len(self.outcome.replicas))


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        label: what it is.
        text: how to show it.
        value: the figure, for ratios; None if there is no sense in them.
        wanted: whether to show it, given all columns.
    """

    label: str
    text: Callable[[Summary], str]
    value: Callable[[Summary], float] | None = None
    wanted: Callable[[Summary], bool] = lambda _: True


def _number(label: str, name: str, decimals: int = 1, *, scale: float = 1.0, ratio: bool = True) -> Row:
    def value(summary: Summary) -> float:
        found: float = getattr(summary, name) * scale
        return found

    return Row(label, lambda summary: f"{value(summary):,.{decimals}f}", value if ratio else None)


def _latency(label: str, name: str) -> tuple[Row, Row]:
    def mean(summary: Summary) -> float:
        found: float = getattr(summary, name).mean
        return found

    def p99(summary: Summary) -> float:
        found: float = getattr(summary, name).percentiles[99]
        return found

    return (
        Row(f"Mean {label} (ms)", lambda summary: f"{mean(summary):,.1f}", mean),
        Row(f"P99 {label} (ms)", lambda summary: f"{p99(summary):,.1f}", p99),
    )


def _share(label: str, name: str, *, of_drafting: bool = False) -> Row:
    def text(summary: Summary) -> str:
        if of_drafting and not summary.num_drafted_tokens:
            return "-"
        return f"{100.0 * getattr(summary, name):.1f}"

    return Row(label, text)


def _drafted(summary: Summary) -> bool:
    return summary.spec_decode_num_drafts > 0


def _goodput(summary: Summary) -> float:
    return summary.request_goodput or 0.0


def _failed_text(summary: Summary) -> str:
    parts = {"aborted": summary.num_aborted, "errors": summary.num_errors, "unfinished": summary.num_unfinished}
    listed = ", ".join(f"{number} {name}" for name, number in parts.items() if number)
    return f"{summary.failed} ({listed})" if listed else str(summary.failed)


def _positions_text(summary: Summary) -> str:
    return " ".join(f"{100 * rate:.1f}" for rate in summary.spec_decode_per_position_acceptance_rates) or "-"


def _causes_text(summary: Summary) -> str:
    found = sorted(summary.zero_draft_causes.items(), key=lambda item: -item[1])
    return "\n".join(f"{cause} {number:,}" for cause, number in found if number) or "none"


REQUESTS: Final = (
    Row("Successful requests", lambda s: f"{s.completed:,}"),
    Row("Failed requests", _failed_text),
    _number("Benchmark duration (s)", "duration", 2),
    _number("Makespan (s)", "makespan", 2),
    Row("Total input tokens", lambda s: f"{s.total_input_tokens:,}"),
    Row("Total generated tokens", lambda s: f"{s.total_output_tokens:,}"),
)
THROUGHPUT: Final = (
    _number("Request throughput (req/s)", "request_throughput", 3),
    Row(
        "Request goodput (req/s)",
        lambda s: f"{_goodput(s):,.3f}",
        _goodput,
        wanted=lambda s: s.request_goodput is not None,
    ),
    Row(
        "Requests that keep the SLO (%)",
        lambda s: f"{100.0 * (s.slo_attainment or 0.0):.1f}",
        wanted=lambda s: s.slo_attainment is not None,
    ),
    _number("Output token throughput (tok/s)", "output_throughput"),
    _number("Total token throughput (tok/s)", "total_token_throughput"),
    Row("Devices (target + drafter)", lambda s: f"{s.num_target_devices} + {s.num_draft_devices}"),
    _number("Output throughput per device (tok/s)", "output_throughput_per_device"),
)
LATENCY: Final = (
    *_latency("TTFT", "ttft"),
    *_latency("TPOT", "tpot"),
    *_latency("ITL", "itl"),
    *_latency("E2EL", "e2el"),
    *_latency("queueing", "queue"),
    *_latency("service (start to end)", "service"),
)
SPECULATION: Final = (
    Row(
        "Acceptance length",
        lambda s: f"{s.spec_decode_acceptance_length:.3f}" if _drafted(s) else "-",
        wanted=_drafted,
    ),
    Row(
        "Acceptance rate (%)", lambda s: f"{s.spec_decode_acceptance_rate:.1f}" if _drafted(s) else "-", wanted=_drafted
    ),
    Row("Per-position acceptance (%)", _positions_text, wanted=_drafted),
    Row("Verified without drafts, by cause", _causes_text),
)
DEVICES: Final = (
    _share("Target utilisation (%)", "target_utilisation"),
    _share("Drafter utilisation (%)", "draft_utilisation", of_drafting=True),
    _share("Drafting overlapped with verification (%)", "overlapped_draft_share", of_drafting=True),
    _number("Mean verify step (ms)", "mean_verify_ms", 2),
    Row("Mean draft step (ms)", lambda s: f"{s.mean_draft_ms:,.2f}" if s.num_drafted_tokens else "-"),
    Row("Verify steps", lambda s: f"{s.rounds:,}"),
    _number("Mean requests per verify step", "mean_batch_size", 2, ratio=False),
    _number("Mean running requests", "mean_running_requests", 2, ratio=False),
    _number("Mean imbalance of the batches", "mean_imbalance", 2, ratio=False),
    Row(
        "Verified while another batch was empty (%)",
        lambda s: f"{100.0 * s.empty_batch_share:.1f}",
        wanted=lambda s: s.empty_batch_share > 0,
    ),
    Row("Preemptions", lambda s: f"{s.num_preemptions:,}"),
    Row("Failed works", lambda s: f"{s.num_failed_works:,}", wanted=lambda s: s.num_failed_works > 0),
    Row("Times the drafter was lost", lambda s: f"{s.num_drafter_losses:,}", wanted=lambda s: s.num_drafter_losses > 0),
)
SECTIONS: Final = (REQUESTS, THROUGHPUT, LATENCY, SPECULATION, DEVICES)

MOST_COLUMNS: Final = 6
BRIEF: Final = (
    *(row for row in THROUGHPUT if row.label.startswith("Output")),
    *(row for row in (*REQUESTS, *LATENCY) if row.label in ("Makespan (s)", "Mean TTFT (ms)", "Mean TPOT (ms)")),
    *(row for row in (*LATENCY, *DEVICES) if row.label.startswith(("Mean E2EL", "Drafting overlapped"))),
)


def console() -> Console:
    """For stdout; wide if nobody's terminal limits it."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 160)


def print_report(columns: Sequence[Column], title: str) -> None:
    """Print a table of runs, with the ratio to the first where that says something, and notes below it.

    Nothing is printed if nothing was done.
    """
    if not any(column.summary.rounds for column in columns):
        return
    out = console()
    out.print(_with_columns(columns, SECTIONS, title) if len(columns) <= MOST_COLUMNS else _long_table(columns, title))
    for note in notes(columns):
        out.print(note, style="dim")


def rows_named(labels: Sequence[str]) -> list[Row]:
    """Rows of the full table, picked by label, in the order given."""
    known = {row.label: row for section in SECTIONS for row in section}
    return [known[label] for label in labels]


def table_of(columns: Sequence[Column], rows: Sequence[Row], title: str) -> Table:
    """A short table: some rows of the full one."""
    return _with_columns(columns, [rows], title)


def _with_columns(columns: Sequence[Column], sections: Sequence[Sequence[Row]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.name, justify="right")
    for section in sections:
        for row in section:
            if any(row.wanted(column.summary) for column in columns):
                table.add_row(row.label, *_cells(row, columns))
        table.add_section()
    return table


def _long_table(columns: Sequence[Column], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for row in BRIEF:
        table.add_column(row.label, justify="right")
    cells = [_cells(row, columns) for row in BRIEF]
    for i, column in enumerate(columns):
        table.add_row(column.name, *(texts[i] for texts in cells))
    return table


def _cells(row: Row, columns: Sequence[Column]) -> list[str]:
    texts = [row.text(column.summary) for column in columns]
    if row.value is None or len(columns) == 1:
        return texts
    first = row.value(columns[0].summary)
    if not first:
        return texts
    ratios = [row.value(column.summary) / first for column in columns]
    return [texts[0], *(f"{text}  {ratio:5.2f}x" for text, ratio in zip(texts[1:], ratios[1:], strict=True))]


def notes(columns: Sequence[Column]) -> list[str]:
    """What a reader must know to compare the columns fairly, and what went wrong."""
    found = []
    if any(column.mode not in ("ar", "sd") for column in columns):
        found.append(fairness(columns))
    if any(column.mode in PEARL_MODES for column in columns):
        found.append("In pearl k = 0 for draft_failed is, as a rule, a pre-verification: no draft stood.")
    stars = [f"{column.name} {len(column.outcome.replicas)}" for column in columns if column.outcome.replicas]
    if stars:
        found.append(
            f"Targets beside each other: {', '.join(stars)}. Requests and imbalance per verify step are those of one; "
            "the JSON has the figures of each under replicas."
        )
    if len(columns) > 1:
        found.append(
            f"Ratios are to the first column, {columns[0].name!r}; all columns have the same requests and seed."
        )
    error = max(column.summary.percentile_error for column in columns)
    if error:
        found.append(f"Long runs are summed up on the way: percentiles are within {error:.2%}, means are exact.")
    growing = [column.name for column in columns if column.growing]
    if growing:
        found.append(not_steady(growing))
    for column in columns:
        outcome = column.outcome
        if outcome.num_refused and outcome.summary.completed:
            found.append(f"{column.name}: requests not served: {outcome.num_refused}; the first: {outcome.detail}")
        if outcome.failure is not None:
            found.append(f"{column.name}: stopped early; the figures are those of what was done until then.")
    return found


def not_steady(names: Sequence[str]) -> str:
    """What to say of runs whose queue kept growing."""
    return (
        f"Not in steady state: {', '.join(names)}. More arrived than was served and the queue still grew at the last "
        "arrival, so latencies and goodput depend on the number of requests; read them as an overload, not as a level."
    )


def fairness(columns: Sequence[Column]) -> str:
    """What the modes are given: devices and requests in flight."""
    parts = [
        f"{column.mode} {column.summary.num_target_devices} + {column.summary.num_draft_devices} devices and up to "
        f"{column.running_limit} requests in flight"
        for column in columns
    ]
    reasons = []
    if any(column.mode == "psd" for column in columns):
        reasons.append("psd keeps several batches in flight")
    if any(column.summary.num_draft_devices for column in columns):
        reasons.append("a drafter with devices of its own adds to the target's (target + drafter)")
    return (
        f"Mind what the modes are given, since {', and '.join(reasons)}: {'; '.join(dict.fromkeys(parts))}. "
        "Compare per device and per request too."
    )


def as_json(column: Column, command: str, seed: int) -> dict[str, Any]:
    """A run as one flat object."""
    outcome = column.outcome
    return {
        "minedraft": minedraft.__version__,
        "command": command,
        "name": column.name,
        "mode": column.mode,
        "seed": seed,
        "error": None if outcome.error is None else str(outcome.error),
        "max_running_requests_allowed": column.running_limit,
        **outcome.summary.to_dict(),
        **({"replicas": [summary.to_dict() for summary in outcome.replicas]} if outcome.replicas else {}),
    }


def check_writable(path: str | None) -> None:
    """Find out before a run, not after it, that its JSON has nowhere to go.

    Raises:
        CommandError: the file's folder isn't there.
    """
    if path is not None and path != "-" and not Path(path).absolute().parent.is_dir():
        raise CommandError(f"{path}: no such folder; make it first")


def write_json(path: str, value: Any) -> None:
    """Write JSON to a file, or to stdout for `-`.

    Raises:
        CommandError: the file can't be written.
    """
    text = json.dumps(value, indent=2)
    if path == "-":
        sys.stdout.write(f"{text}\n")
        return
    try:
        Path(path).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise unusable_file(error, path) from error

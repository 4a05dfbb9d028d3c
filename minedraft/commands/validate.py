"""`minedraft validate`: what the simulator says against what was measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from minedraft.commands.errors import CommandError
from minedraft.commands.progress import ProgressBar
from minedraft.commands.report import check_writable, console, write_json
from minedraft.commands.validate_silicon import (
    FITTED_GPU,
    FITTED_MODEL,
    Answer,
    Overheads,
    SiliconRow,
    answer,
    fit,
    read_rows,
)
from minedraft.work import WorldError

if TYPE_CHECKING:
    from rich.table import Table

KINDS: Final = ("measured", "roofline")


class Validation(NamedTuple):
    """What came of a validation.

    Attributes:
        overheads: what was fitted.
        answers: to the rows that could be simulated, fitted ones first.
        refused: rows that couldn't, and why.
        num_others: rows of models that have no preset.
    """

    overheads: Overheads
    answers: list[Answer]
    refused: list[tuple[SiliconRow, str]]
    num_others: int


def silicon_command(kind: str, models: Sequence[str], requests_per_client: int, json_path: str | None) -> None:
    """Simulate the rows, print the errors, write the file.

    Args:
        kind: of the cost model.
        models: presets to look at; all if empty.
        requests_per_client: length of each simulated run.
        json_path: where to write every row, "-" for stdout.

    Raises:
        CommandError: the package isn't there, or a name is unknown.
    """
    if kind not in KINDS:
        raise CommandError(f"--cost {kind}: unknown; use {' or '.join(KINDS)}")
    if requests_per_client < 1:
        raise CommandError(f"--requests-per-client {requests_per_client}: must be >= 1")
    check_writable(json_path)
    rows, num_others = read_rows()
    known = sorted({row.model for row in rows})
    for name in models:
        if name not in known:
            raise CommandError(f"--model {name}: no such rows; use {', '.join(known)}")
    wanted = [row for row in rows if row.is_fitted or not models or row.model in models]
    validation = validate(kind, wanted, requests_per_client, num_others)
    if json_path is not None:
        write_json(json_path, _as_json(validation, kind))
    if json_path != "-":
        _print(validation, kind)


def validate(kind: str, rows: Sequence[SiliconRow], requests_per_client: int, num_others: int = 0) -> Validation:
    """Fit the overheads to the rows that may be fitted, then simulate all with them."""
    fitted = [row for row in rows if row.is_fitted]
    held_out = [row for row in rows if not row.is_fitted]
    with ProgressBar("simulating", 2 * len(fitted) + len(held_out)) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # passes outside the tables are counted and shown per row
        bare, _ = _answers(fitted, kind, Overheads(), requests_per_client, bar)
        overheads = fit(bare) if bare else Overheads()
        answers, refused = _answers([*fitted, *held_out], kind, overheads, requests_per_client, bar)
    return Validation(overheads, answers, refused, num_others)


def _answers(
    rows: Iterable[SiliconRow], kind: str, overheads: Overheads, requests_per_client: int, bar: ProgressBar
) -> tuple[list[Answer], list[tuple[SiliconRow, str]]]:
    answers, refused = [], []
    for row in rows:
        try:
            answers.append(answer(row, kind, overheads, requests_per_client))
        except (ValueError, WorldError) as error:
            refused.append((row, str(error)))
        bar.num_done += 1
    return answers, refused


class _Errors(NamedTuple):
    """Relative errors of a group of rows, in percent."""

    mean: float
    median: float
    bias: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> _Errors:
        sizes = [abs(error) for error in errors]
        return cls(*(100.0 * value for value in (fmean(sizes), median(sizes), fmean(errors), max(sizes))))


def _groups(answers: Sequence[Answer]) -> dict[tuple[str, str, bool], list[Answer]]:
    """By model, GPU, and whether it was fitted."""
    groups: dict[tuple[str, str, bool], list[Answer]] = {}
    for given in answers:
        groups.setdefault((given.row.model, given.row.gpu, given.row.is_fitted), []).append(given)
    return groups


def _print(validation: Validation, kind: str) -> None:
    out, overheads = console(), validation.overheads
    out.print(_table(validation.answers, kind))
    out.print(
        f"Fitted to the {FITTED_MODEL} rows on {FITTED_GPU} only: {1e3 * overheads.step_s:.2f} ms per step, "
        f"{1e6 * overheads.step_per_seq_s:.1f} us per step and sequence (up to {overheads.max_seqs}), "
        f"{1e3 * overheads.request_s:.1f} ms per request before its first token."
    )
    num_extrapolated = sum(1 for given in validation.answers if given.num_extrapolated)
    if num_extrapolated:
        out.print(f"{num_extrapolated} rows have steps outside the operator tables, which were extrapolated.")
    if validation.refused:
        row, reason = validation.refused[0]
        out.print(f"{len(validation.refused)} rows can't be simulated; the first, {row.model} on {row.gpu}: {reason}")
    if validation.num_others:
        out.print(f"{validation.num_others} rows are of models without a preset.")
    out.print(
        "Load is assumed: closed loop, all clients at once, lengths 80 to 100 % of the nominal; the sample doesn't say "
        "so. It is how InferenceMAX makes load, the likely source of the Llama-3.1-70B rows; others may differ."
    )


def _table(answers: Sequence[Answer], kind: str) -> Table:
    from rich.table import Table

    table = Table(title=f"Cost model {kind} in mode ar against vLLM on silicon (aiconfigurator-core's sample)")
    for name in ("model", "GPU", "rows", ""):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for metric in ("TPOT", "TTFT"):
        table.add_column(f"{metric} mean |error|", justify="right")
        table.add_column("median", justify="right")
        table.add_column("bias", justify="right")
    for (model, gpu, is_fitted), group in _groups(answers).items():
        cells = []
        for errors in ([given.tpot_error for given in group], [given.ttft_error for given in group]):
            figures = _Errors.of(errors)
            cells += [f"{figures.mean:.1f} %", f"{figures.median:.1f} %", f"{figures.bias:+.1f} %"]
        table.add_row(model, gpu, str(len(group)), "fitted" if is_fitted else "held out", *cells)
    return table


def _as_json(validation: Validation, kind: str) -> dict[str, Any]:
    overheads = validation.overheads
    return {
        "cost": kind,
        "overheads": {name: getattr(overheads, name) for name in ("step_s", "step_per_seq_s", "max_seqs", "request_s")},
        "groups": [
            {
                "model": model,
                "gpu": gpu,
                "held_out": not is_fitted,
                "rows": len(group),
                "tpot_error_percent": _Errors.of([given.tpot_error for given in group])._asdict(),
                "ttft_error_percent": _Errors.of([given.ttft_error for given in group])._asdict(),
            }
            for (model, gpu, is_fitted), group in _groups(validation.answers).items()
        ],
        "rows": [
            {
                **{name: getattr(given.row, name) for name in SiliconRow.__slots__},
                "held_out": not given.row.is_fitted,
                "simulated_ttft_ms": given.ttft_ms,
                "simulated_tpot_ms": given.tpot_ms,
                "num_extrapolated": given.num_extrapolated,
            }
            for given in validation.answers
        ],
        "refused": [
            {"model": row.model, "gpu": row.gpu, "tp": row.tp, "reason": why} for row, why in validation.refused
        ],
        "num_other_rows": validation.num_others,
    }

"""`minedraft reproduce paper`: the claims of the MineDraft paper (arXiv 2603.18016), worked out and judged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minedraft.commands.errors import FAILED_CHECK, CommandError, unusable_file
from minedraft.commands.many_runs import carry_out
from minedraft.commands.report import check_writable, write_json
from minedraft.commands.reproduce_report import as_json, print_reproduction, write_tables
from minedraft.theory.extra import MissingTheoryExtraError
from minedraft.work import WorldError

if TYPE_CHECKING:
    from minedraft.sim.paper.reproduction import Reproduction
    from minedraft.sim.paper.trial import Figures, Trial

PLOT_REMEDY: Final = "install it with: pip install 'minedraft[plot]', or add --no-figures"


@dataclass(frozen=True, slots=True)
class ReproduceOptions:
    """What can be asked for.

    Attributes:
        only: claims, comma-separated; None for all.
        quick: fewer requests, data sets and draft lengths.
        output_dir: where tables and figures go.
        jobs: processes at a time; None for as many as there are cores.
        figures: whether to draw.
    """

    only: str | None
    quick: bool
    output_dir: str
    jobs: int | None
    figures: bool


def reproduce_command(options: ReproduceOptions, json_path: str | None) -> None:
    """Work out, print, write tables and figures.

    A missed claim is a result, not a failure.

    Raises:
        CommandError: an option can't be used or an extra is missing; or, with exit code 1, something failed to run.
    """
    from minedraft.sim.paper.bench import FULL, QUICK, Bench
    from minedraft.sim.paper.reproduction import reproduce

    check_writable(json_path)
    wanted = _wanted(options.only)
    folder = _folder(options.output_dir)
    if options.figures:
        _check_plot_extra()
    jobs = _jobs(options.jobs)

    def run_all(trials: Sequence[Trial], label: str) -> list[Figures]:
        return _run_all(trials, label, jobs)

    try:
        found = reproduce(Bench(QUICK if options.quick else FULL, run_all), wanted)
    except MissingTheoryExtraError as error:
        raise CommandError(str(error)) from error
    except WorldError as error:
        raise CommandError(f"a run failed: {error}", FAILED_CHECK) from error
    written = _write(found, folder, options.figures)
    if json_path is not None:
        write_json(json_path, as_json(found))
    if json_path != "-":
        print_reproduction(found, written)


def _wanted(only: str | None) -> tuple[str, ...]:
    from minedraft.sim.paper.reproduction import CLAIMS

    if only is None:
        return CLAIMS
    names = [name.strip().upper() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in CLAIMS:
            raise CommandError(f"--only {only}: there is no claim {name!r}; use T1 to T12 and E1 to E18")
    if not names:
        raise CommandError(f"--only {only!r}: names no claim; write it as E2,E3")
    return tuple(claim for claim in CLAIMS if claim in names)


def _folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_file(error) from error
    return folder


def _check_plot_extra() -> None:
    if find_spec("matplotlib") is None:
        raise CommandError(f"figures need the plot extra (matplotlib is missing); {PLOT_REMEDY}")


def _jobs(jobs: int | None) -> int:
    if jobs is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs < 1:
        raise CommandError(f"--jobs {jobs}: must be >= 1")
    return jobs


def _run_all(trials: Sequence[Trial], label: str, jobs: int) -> list[Figures]:
    from minedraft.sim.paper.trial import run

    found, failure = carry_out(run, trials, jobs, label)
    if failure is not None:
        raise failure
    return [figures for figures in found if figures is not None]


def _write(found: Reproduction, folder: Path, figures: bool) -> list[Path]:
    try:
        written = write_tables(found, folder)
        if figures:
            from minedraft.commands.reproduce_figures import draw

            written += draw(found, folder)
    except OSError as error:
        raise unusable_file(error) from error
    return written

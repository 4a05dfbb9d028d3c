"""`minedraft demo`: real models first, then the paper's setting in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from minedraft.commands.errors import FAILED_CHECK, CommandError, unusable_file
from minedraft.commands.report import console
from minedraft.commands.torch_extra import REMEDY, has_torch_extra


def demo_command(folder: Path, simulate_only: bool) -> None:
    """Run both halves and name the files that they wrote.

    Raises:
        CommandError: the models can't be used, a run failed, or texts that must be equal differ.
    """
    from minedraft.commands.demo_paper import demo_paper

    if not simulate_only and not has_torch_extra():
        raise CommandError(f"the demo runs real models, which needs the torch extra; {REMEDY}, or add --simulate-only")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_file(error) from error
    written: list[Path] = []
    equal = True
    if not simulate_only:
        from minedraft.commands.demo_models import demo_models

        equal = demo_models(folder, written)
    demo_paper(folder, written)
    name_files(written)
    if not equal:
        raise CommandError("the three modes wrote different texts; speculation must never change them", FAILED_CHECK)


def heading(text: str) -> None:
    """Print a heading."""
    out = console()
    out.print()
    out.print(text, style="bold underline")


def paragraph(text: str) -> None:
    """Print running text, wrapped for reading."""
    console().print(text, width=100, markup=False)


TIMELINES: Final = (
    "Timelines, one lane per device group and one per batch: open them at https://ui.perfetto.dev or chrome://tracing "
    "(the files stay on your machine):"
)
JOURNALS: Final = (
    "Runs event by event: `minedraft replay FILE` feeds one to a fresh scheduler and checks that every decision comes "
    "out the same:"
)
FIGURES: Final = "Figures, under the names of `vllm bench serve`:"


def name_files(written: list[Path]) -> None:
    """Print what was written, and what it is for."""
    heading("Files")
    for ending, use in ((".trace.json", TIMELINES), (".journal.jsonl", JOURNALS), (".json", FIGURES)):
        paths = [path for path in written if path.name.endswith(ending)]
        written = [path for path in written if path not in paths]
        paragraph(f"\n{use}")
        for path in paths:
            console().print(f"  {path}", markup=False)

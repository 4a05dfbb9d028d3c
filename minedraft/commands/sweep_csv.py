"""Figures over seeds as CSV (`write_csv`): a row per variant and figure, ready for a data frame."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from minedraft.commands.errors import unusable_file
from minedraft.commands.figures import all_names
from minedraft.commands.repeated import Repeated, baseline_of
from minedraft.statistics import Estimate

COLUMNS: Final = (
    "variant",
    "line",
    "x_name",
    "x",
    "metric",
    "num_seeds",
    "mean",
    "low",
    "high",
    "baseline",
    "ratio",
    "ratio_low",
    "ratio_high",
    "difference",
    "difference_low",
    "difference_high",
    "steady_state",
)


def write_csv(path: str, repeated: Sequence[Repeated], line: str, x_name: str | None) -> None:
    """Write all figures, their intervals and their comparisons with the baseline; what there isn't stays empty.

    Raises:
        CommandError: the file can't be written.
    """
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            for one in repeated:
                writer.writerows(_rows(one, baseline_of(one, repeated, line), x_name))
    except OSError as error:
        raise unusable_file(error, path) from error


def _rows(one: Repeated, baseline: Repeated | None, x_name: str | None) -> Iterator[dict[str, Any]]:
    variant = one.variant
    steady = str(one.steady).lower()
    head = {"variant": variant.name, "line": variant.line, "x_name": x_name, "x": variant.x, "steady_state": steady}
    for name in all_names():
        estimate = one.estimate(name)
        if estimate is None:
            continue
        row = {**head, "metric": name, "num_seeds": estimate.num_values, **_ends("mean", estimate, "")}
        pair = None if baseline is None else one.against(baseline, name)
        if baseline is not None and pair is not None:
            row |= {"baseline": baseline.variant.name, **_ends("difference", pair.difference, "difference_")}
            row |= {} if pair.ratio is None else _ends("ratio", pair.ratio, "ratio_")
        yield row


def _ends(name: str, estimate: Estimate, prefix: str) -> dict[str, float | None]:
    return {name: estimate.value, f"{prefix}low": estimate.low, f"{prefix}high": estimate.high}

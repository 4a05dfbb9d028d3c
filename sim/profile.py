"""`Profile`: times of forward passes that were measured on a grid, read from JSON and interpolated.

The file is one model on one group of devices:

    {
      "format": "minedraft-profile/1",
      "about": {"model": "...", "device": "...", "num_devices": 4, "software": "..."},
      "num_seqs": [1, 2, 4, 8, 16, 32, 64],
      "num_new_tokens": [1, 2, 4, 6, 64, 512, 2048],
      "context": [0, 512, 2048, 8192],
      "seconds": [[[0.0071, 0.0072, 0.0074, 0.0081], ...], ...]
    }

`seconds[i][j][k]` is the time of a pass over `num_seqs[i]` sequences that each compute `num_new_tokens[j]` tokens
behind `context[k]` tokens, the device's own time without the host's, as the median of repeated runs. Axes increase
strictly; one of them may have a single value if nothing else will ever be asked. A pass that doesn't fit the device is
`null`.
`about` is free text fields, kept for reports.

Asked for a pass, the profile takes the mean new tokens and the mean context per sequence and interpolates linearly
along each axis, between measured neighbours only. A pass outside the grid, or next to a `null`, is refused; with
`outside = "flag"` it is extrapolated from the two outermost values of the axis (beside a `null`: it is still refused),
counted, and warned of once. It is never clamped in silence, and no line is ever drawn through zero.

What that leaves out: a pass that mixes prompts and verification is priced as if its sequences were alike, which keeps
the rows of the GEMMs exact and the attention of uneven mixes approximate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Final

from minedraft.json_text import parse_json
from minedraft.sim.fence import Fence, Outside
from minedraft.sim.steps import CostError

FORMAT: Final = "minedraft-profile/1"
AXES: Final = ("num_seqs", "num_new_tokens", "context")

Grid = tuple[tuple[tuple[float | None, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """A measured grid; see the module's docstring.

    Attributes:
        num_seqs: first axis.
        num_new_tokens: second axis, per sequence.
        context: third axis, per sequence.
        seconds: times; None where nothing could be measured.
        about: what was measured, on what.

    Raises:
        ValueError: an axis doesn't increase, the grid doesn't match the axes, a time isn't positive.
    """

    num_seqs: tuple[int, ...]
    num_new_tokens: tuple[int, ...]
    context: tuple[int, ...]
    seconds: Grid
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in zip(AXES, (1, 1, 0), strict=True):
            _check_axis(name, getattr(self, name), least)
        for i, plane in enumerate(_of_length(self.seconds, len(self.num_seqs), "seconds")):
            for j, row in enumerate(_of_length(plane, len(self.num_new_tokens), f"seconds[{i}]")):
                for k, value in enumerate(_of_length(row, len(self.context), f"seconds[{i}][{j}]")):
                    if value is not None and not (isfinite(value) and value > 0.0):
                        raise ValueError(f"seconds[{i}][{j}][{k}] is {value}, must be a number of seconds > 0, or null")
        if not any(value is not None for plane in self.seconds for row in plane for value in row):
            raise ValueError("seconds holds no time at all")

    @classmethod
    def load(cls, path: str | Path) -> ProfileTable:
        """Read a file.

        Raises:
            ValueError: it isn't a profile; the message names the file and the fault.
        """
        try:
            tree = parse_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; check the path") from error
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
        try:
            return cls.from_dict(tree)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, tree: Any) -> ProfileTable:
        """The table of a file's content.

        Raises:
            ValueError: it isn't one; the message says where.
        """
        if not isinstance(tree, Mapping) or tree.get("format") != FORMAT:
            found = tree.get("format") if isinstance(tree, Mapping) else None
            raise ValueError(f"format is {found!r}, must be {FORMAT!r}")
        missing = [name for name in (*AXES, "seconds") if name not in tree]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        axes = [_numbers(tree[name], name) for name in AXES]
        about = tree.get("about", {})
        return cls(axes[0], axes[1], axes[2], _grid(tree["seconds"]), about if isinstance(about, Mapping) else {})

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; `from_dict` takes it back."""
        axes = {name: list(getattr(self, name)) for name in AXES}
        grid = [[list(row) for row in plane] for plane in self.seconds]
        return {"format": FORMAT, "about": dict(self.about), **axes, "seconds": grid}


def _check_axis(name: str, values: tuple[int, ...], least: int) -> None:
    if not values:
        raise ValueError(f"{name} is empty")
    if values[0] < least:
        raise ValueError(f"{name} begins with {values[0]}, must be >= {least}")
    for before, after in pairwise(values):
        if after <= before:
            raise ValueError(f"{name} has {after} behind {before}, must increase strictly")


def _of_length(values: Sequence[Any], length: int, name: str) -> Sequence[Any]:
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} entries, its axis {length}")
    return values


def _numbers(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{name} must be a list of whole numbers")
    return tuple(values)


def _grid(tree: Any) -> Grid:
    def rows(values: Any, name: str) -> list[Any]:
        if not isinstance(values, list):
            raise ValueError(f"{name} must be a list")
        return values

    def number(value: Any, name: str) -> float | None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} is {value!r}, must be a number of seconds or null")
        return None if value is None else float(value)

    return tuple(
        tuple(
            tuple(number(value, f"seconds[{i}][{j}][{k}]") for k, value in enumerate(rows(row, f"seconds[{i}][{j}]")))
            for j, row in enumerate(rows(plane, f"seconds[{i}]"))
        )
        for i, plane in enumerate(rows(tree, "seconds"))
    )


class Profile:
    """A `minedraft.sim.steps.StepModel` that interpolates a `ProfileTable`.

    Attributes:
        table: what was measured.
        fence: counts the passes that lay outside of it.
    """

    __slots__ = ("_grid", "_least_s", "fence", "table")

    def __init__(self, table: ProfileTable, outside: Outside = "refuse") -> None:
        self.table = table
        self.fence = Fence(outside)
        self._grid = table.seconds
        self._least_s = min(value for plane in self._grid for row in plane for value in row if value is not None)

    def step_s(self, num_seqs: int, num_tokens: int, context: float, num_pairs: float, num_logits: int) -> float:
        """See the module's docstring, and `minedraft.sim.steps` for the arguments."""
        table = self.table
        point = (num_seqs, num_tokens / num_seqs, context / num_seqs)
        i, u = _place(table.num_seqs, point[0])
        j, v = _place(table.num_new_tokens, point[1])
        k, w = _place(table.context, point[2])
        inside = 0.0 <= u <= 1.0 and 0.0 <= v <= 1.0 and 0.0 <= w <= 1.0
        if not inside:
            self._leave(point)
        seconds = _between(self._grid[i], j, v, k, w)
        if u and seconds is not None:
            above = _between(self._grid[i + 1], j, v, k, w)
            seconds = None if above is None else seconds + u * (above - seconds)
        if seconds is None:
            raise CostError(f"profile: nothing was measured next to {_words(point)}; measure it, or keep steps smaller")
        return seconds if inside else max(seconds, self._least_s)  # a line must not end below all that was measured

    def _leave(self, point: tuple[float, float, float]) -> None:
        """Refuse or flag a pass outside the grid."""
        for name, value in zip(AXES, point, strict=True):
            axis = getattr(self.table, name)
            if axis[0] <= value <= axis[-1]:
                continue
            text = f"profile: {name} is {value:g} in a step of {_words(point)}, measured are {axis[0]} to {axis[-1]}"
            if len(axis) == 1:
                raise CostError(f"{text}; measure more")
            self.fence.cross(text)
            return


def _words(point: tuple[float, float, float]) -> str:
    return f"{point[0]:g} sequences with {point[1]:g} new tokens and {point[2]:g} context tokens each"


def _place(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    """The interval of an axis and how far into it; outside the axis the outermost one, and a share beyond 0..1."""
    last = len(axis) - 1
    if not last:
        return 0, 0.0 if value == axis[0] else 2.0
    if value == axis[last]:
        return last, 0.0
    i = bisect_right(axis, value, 1, last) - 1
    low = axis[i]
    return i, (value - low) / (axis[i + 1] - low)


def _between(plane: tuple[tuple[float | None, ...], ...], j: int, v: float, k: int, w: float) -> float | None:
    """Bilinear in one plane; None if a value that counts is missing."""
    low = _along(plane[j], k, w)
    if not v or low is None:
        return low
    high = _along(plane[j + 1], k, w)
    return None if high is None else low + v * (high - low)


def _along(row: tuple[float | None, ...], k: int, w: float) -> float | None:
    low = row[k]
    if not w or low is None:
        return low
    high = row[k + 1]
    return None if high is None else low + w * (high - low)

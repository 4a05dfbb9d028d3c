"""Named entries of the package's data files, with near matches for a name that isn't there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def read_presets(file: str) -> Mapping[str, Mapping[str, Any]]:
    """The tables of `data/<file>`, by name."""
    return tomllib.loads(files("minedraft.sim").joinpath("data", file).read_text(encoding="utf-8"))


def find_preset(file: str, kind: str, name: str) -> dict[str, Any]:
    """The fields of one table of `data/<file>`, whatever the case of its name.

    Args:
        file: see `read_presets`.
        kind: what its tables are, for the message.
        name: of the table.

    Raises:
        ValueError: there is none; the message offers near matches.
    """
    presets = read_presets(file)
    key = name.lower()
    if key not in presets:
        raise ValueError(f"no {kind} {name!r}; {offer(name, presets)}")
    return dict(presets[key])


def offer(name: str, known: Mapping[str, Any]) -> str:
    """What to try instead of a name that isn't known: near ones, or all."""
    near = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(known)}"

"""Refuses outputs that would destroy an input, or each other, before anything is written (`check_outputs`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from minedraft.commands.errors import CommandError

PATH_KEYS: Final = ("path", "model")
"""Fields of a configuration that may name a file; `model` may also be a preset, which is no file."""


class NamedPath(NamedTuple):
    """A file that a command reads or writes.

    Attributes:
        name: where the user said so: an option or a dotted field.
        path: as written.
    """

    name: str
    path: str


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[NamedPath]) -> None:
    """Find out, before anything is written, whether an output is an input too, or two outputs are one file.

    Links are followed. Devices and pipes may be given as often as one likes; `--json -` is no file.

    Args:
        outputs: path by option; None for those that nobody wants.
        inputs: what is read.

    Raises:
        CommandError: one is; it names both.
    """
    written: list[NamedPath] = []
    read = list(inputs)
    for option, path in outputs.items():
        if path is None or (option == "--json" and path == "-") or _is_special(Path(path)):
            continue
        here = NamedPath(option, path)
        if other := next((one for one in read if _same_file(path, one.path)), None):
            raise CommandError(f"{option} {path}: would overwrite {other.name} {other.path}; give it another name")
        if other := next((one for one in written if _same_file(path, one.path)), None):
            raise CommandError(f"{option} {path}: is the file of {other.name} {other.path} too; give each its own name")
        written.append(here)


def files_read(path: str | None, *trees: Mapping[str, Any]) -> Iterator[NamedPath]:
    """The configuration's file, and the files that it names.

    Args:
        path: of the configuration; None if there is none.
        trees: its tables, paths in them relative to the working directory.
    """
    if path is not None:
        yield NamedPath("the configuration", path)
    for tree in trees:
        yield from _paths_in(tree, "")


def _paths_in(value: Any, place: str) -> Iterator[NamedPath]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            below = f"{place}.{key}" if place else str(key)
            if key in PATH_KEYS and isinstance(item, str):
                yield NamedPath(below, item)
            else:
                yield from _paths_in(item, below)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _paths_in(item, f"{place}[{number}]")


def _same_file(one: str, other: str) -> bool:
    a, b = Path(one), Path(other)
    try:
        return a.samefile(b)  # also by a hard link
    except OSError:  # one of them isn't there yet
        return a.resolve() == b.resolve()


def _is_special(path: Path) -> bool:
    """Whether writing destroys nothing: a terminal, a pipe, /dev/null."""
    return path.exists() and not path.is_file() and not path.is_dir()

"""Nested dictionaries and dotted keys: setting one value, merging two trees, reading `key=value`.

Law of this file: plain values only; it knows nothing of what the keys mean.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from minedraft.config_shorthands import as_table

NOT_TOML: Final = (ValueError, RecursionError)
"""What tomllib raises of a text that is none: for thousands of digits or brackets it has no TOMLDecodeError."""


class Override(NamedTuple):
    """A value that is set on top of a configuration.

    Attributes:
        key: dotted.
        value: replaces what is there, tables as a whole.
        origin: what the user wrote, for messages.
    """

    key: str
    value: Any
    origin: str


def put(tree: Mapping[str, Any], key: str, value: Any, at: str = "") -> dict[str, Any]:
    """A copy of the tree in which a dotted key has a value.

    What is short for a table (`link = "pcie4-x16"`) becomes one if the key goes into it.

    Args:
        tree: stays as it is.
        key: dotted.
        value: of the key.
        at: dotted place of the tree itself, with a dot at its end; empty for the whole.
    """
    head, _, rest = key.partition(".")
    if not rest:
        return {**tree, head: value}
    place = f"{at}{head}"
    below = _table_at(place, tree.get(head), {rest: value})
    return {**tree, head: put(below, rest, value, f"{place}.")}


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """A copy of the tree with changes; tables are merged, other values replaced.

    A table whose `kind` or `name` changes is replaced too: what was said of another kind doesn't count. What is short
    for a table is one where a table is merged into it. `at` is as in `put`.
    """
    result = dict(tree)
    for key, value in changes.items():
        if isinstance(value, Mapping) and key in result:
            place = f"{at}{key}"
            below = _table_at(place, result[key], value)
            result[key] = value if _another_kind(below, value) else merged(below, value, f"{place}.")
        else:
            result[key] = value
    return result


def _table_at(place: str, value: Any, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands at a place, as a table; one written short gives way to another kind of it altogether."""
    if isinstance(value, Mapping):
        return value
    short = {} if value is None else as_table(place, value)
    return {} if _another_kind(short, changes) else short


def _another_kind(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return any(key in after and after[key] != before.get(key) for key in ("kind", "name"))


def origin_of(field: str, overrides: Sequence[Override]) -> str | None:
    """What the user wrote to set a dotted field, if it was set by an override; the last one counts."""
    for override in overrides[::-1]:
        if field == override.key or field.startswith((f"{override.key}.", f"{override.key}[")):
            return override.origin
    return None


def parse_assignment(text: str, option: str) -> Override:
    """Read `dotted.key=value`.

    Args:
        text: what the user wrote.
        option: the option's name, for messages.

    Raises:
        ValueError: there is no key, or no `=`.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ValueError(f"{option} {text!r}: write it as dotted.key=value")
    return Override(key, parse_value(value), f"{option} {text}")


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself: `16`, `0.5`, `true`, `[0.7, 0.5]`, `{kind = "beta"}`, `poisson`."""
    text = text.strip()
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except NOT_TOML:
        return text


def parse_values(text: str) -> list[Any]:
    """Values separated by commas; quote or bracket those that hold commas."""
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except NOT_TOML:
        return [parse_value(part) for part in text.split(",") if part.strip()]

"""Nested dictionaries and dotted keys: setting one value, merging two trees, reading `key=value`.

Law of this file: plain values only; it knows nothing of what the keys mean.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


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


def put(tree: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of the tree in which a dotted key has a value."""
    head, _, rest = key.partition(".")
    below = tree.get(head)
    if not rest:
        return {**tree, head: value}
    return {**tree, head: put(below if isinstance(below, Mapping) else {}, rest, value)}


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with changes; tables are merged, other values replaced.

    A table whose `kind` or `name` changes is replaced too: what was said of another kind doesn't count.
    """
    result = dict(tree)
    for key, value in changes.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping) and not _another_kind(below, value):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


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
    except tomllib.TOMLDecodeError:
        return text


def parse_values(text: str) -> list[Any]:
    """Values separated by commas; quote or bracket those that hold commas."""
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        return [parse_value(part) for part in text.split(",") if part.strip()]

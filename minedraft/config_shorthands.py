"""Tables that may be written as one value, and what that value says if a key of the table is set later (`as_table`).

Law of this file: plain values only. The shorthands themselves are declared where the tables are
(`minedraft.config_base.shorthand`); tests keep the two in step.
"""

from __future__ import annotations

from typing import Any, Final

from minedraft.policy import parse_spec

TEXTS: Final = {"link": "preset", "workload.arrivals": "kind"}
"""By dotted place, the key that a bare text stands for. A bare length stays out: beside it there is no other key."""


def as_table(place: str, value: Any) -> dict[str, Any]:
    """The table that a value is short for; an empty one if it is short for none, and so gives way.

    Args:
        place: dotted, such as `link`.
        value: no table.
    """
    if not isinstance(value, str):
        return {}
    if place in TEXTS:
        return {TEXTS[place]: value}
    if place.startswith("policies."):
        try:
            name, options = parse_spec(value)
        except ValueError:  # found when the policy is made
            return {"name": value}
        return {"name": name, **options}
    return {}

"""What every table of a configuration is made of.

Law of these files (`config_*.py`): names and defaults only where the part's own class has them too; ranges are checked
by that class. Parts of the simulated world are imported inside `build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from minedraft.config_messages import FieldError, built_fault

# A step of a target takes milliseconds; a larger figure is one that was meant in milliseconds.
LONGEST_STEP_S: Final = 10.0

Seconds = Annotated[float, Field(ge=0.0)]
StepSeconds = Annotated[float, Field(ge=0.0, le=LONGEST_STEP_S)]


class Table(BaseModel):
    """A table of a configuration: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def arguments(self) -> dict[str, Any]:
        """The fields as keyword arguments, without the `kind`."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}


def with_kind(default: str | None, **by_key: str) -> BeforeValidator:
    """Fill in a `kind` that was left out where the other keys, or their absence, tell it."""

    def fill(value: Any) -> Any:
        if not isinstance(value, Mapping) or "kind" in value:
            return value
        kinds = [kind for key, kind in by_key.items() if key in value]
        kind = kinds[0] if kinds else default
        return dict(value) if kind is None else {"kind": kind, **value}

    return BeforeValidator(fill)


def shorthand(key: str, types: tuple[type, ...], **rest: Any) -> BeforeValidator:
    """Take a bare value for a table: `output_lens = 256`."""

    def expand(value: Any) -> Any:
        plain = isinstance(value, types) and not isinstance(value, bool)
        return {**rest, key: value} if plain else value

    return BeforeValidator(expand)


@contextmanager
def building(section: str) -> Iterator[None]:
    """Turn a part's complaint about its arguments into a fault of a dotted field."""
    try:
        yield
    except FieldError:
        raise
    except (ValueError, OSError) as error:
        raise built_fault(section, error) from error

"""Says in one line what is wrong with a configuration: the dotted field, the fault, the remedy.

Law of this file: it reads pydantic's reports and the models' fields, but imports neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, get_args


class ConfigError(ValueError):
    """A configuration can't be used: one line with its source, the dotted field, the fault and the remedy."""


class FieldError(ValueError):
    """A fault of a field, with the remedy.

    Attributes:
        field: dotted; empty for the whole.
    """

    def __init__(self, field: str, text: str) -> None:
        self.field = field
        super().__init__(one_line(f"{field}: {text}" if field else text))


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


_FIELD_FIRST: Final = re.compile(r"(?:[A-Z]\w*\.)?([a-z]\w*(?:\[\d+\])?) (is .*)", re.DOTALL)


def built_fault(section: str, error: Exception) -> FieldError:
    """What a part of the run says of its arguments, as a fault of `section.argument`."""
    text = str(error)
    match = _FIELD_FIRST.fullmatch(text)
    if match:
        return FieldError(f"{section}.{match[1]}", match[2])
    return FieldError(section, re.sub(r"^[A-Z]\w+[. ](?=[a-z])", "", text))


def explain(errors: Sequence[Mapping[str, Any]], model: Any, tree: Mapping[str, Any]) -> FieldError:
    """The most telling of pydantic's reports.

    Args:
        errors: `ValidationError.errors()`.
        model: the root model.
        tree: what was validated.
    """
    # A misspelt key is reported twice, as unknown and as missing; only the former helps.
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    place = _Place.find(error["loc"], model, tree)
    text = _text(error, place, model)
    others = {_Place.find(other["loc"], model, tree).field for other in errors} - {place.field}
    if others and error["type"] != "extra_forbidden":
        text = f"{text} (and {len(others)} more)"
    return FieldError(place.field, text)


class _Place:
    """Where a report points to.

    Attributes:
        field: dotted, as the user writes it.
        name: its last part.
        model: the model that holds it.
    """

    def __init__(self, field: str, name: str, model: Any) -> None:
        self.field = field
        self.name = name
        self.model = model

    @classmethod
    def find(cls, loc: Sequence[str | int], model: Any, tree: Any) -> _Place:
        """Follow a location; parts of it that name a member of a union are not in the user's tree."""
        field, name, here = "", "", tree
        holder = model
        choices: tuple[Any, ...] = (model,)
        for part in loc:
            if isinstance(part, int):
                field = f"{field}[{part}]"
                here = here[part] if isinstance(here, Sequence) and part < len(here) else None
                continue
            # The member of a union comes first, and a key of the user's may have its name.
            in_tree = isinstance(here, Mapping) and part in here
            if not in_tree or (len(choices) > 1 and all(_tags(choice) for choice in choices)):
                tagged = next((choice for choice in choices if part in _tags(choice)), None)
                if tagged is not None:
                    choices = (tagged,)
                    continue
            if not in_tree and (part in ("str", "int", "float") or not part.isidentifier()):  # such as dict[str,any]
                continue
            field, name = (f"{field}.{part}" if field else part), part
            holder = choices[0] if choices else holder
            known = getattr(holder, "model_fields", {}).get(part)
            choices = tuple(_models(known.annotation)) if known is not None else ()
            here = here.get(part) if isinstance(here, Mapping) else None
        return cls(field, name, holder)


def _models(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _tags(model: Any) -> tuple[Any, ...]:
    kind = model.model_fields.get("kind")
    return () if kind is None else get_args(kind.annotation)


def _text(error: Mapping[str, Any], place: _Place, root: Any) -> str:
    value, context = error["input"], error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(place, value, root)
        case "missing":
            return f"is missing; add {place.name} = ..."
        case "union_tag_not_found":
            return f"has no kind; add one of {', '.join(f'kind = {kind!r}' for kind in _kinds(place))}"
        case "union_tag_invalid":
            return f"kind is {context['tag']!r}; {_offer(str(context['tag']), _kinds(place))}"
        case "literal_error":
            return f"is {value!r}; {_offer(str(value), list(_literals(_annotation(place))))}"
        case "greater_than_equal":
            return f"is {value}, must be {_a_number(place.name)}>= {context['ge']:g}"
        case "less_than_equal":
            text = f"is {value}, must be {_a_number(place.name)}<= {context['le']:g}"
            if not place.name.endswith("_s"):
                return text
            return f"{text}; times are in seconds: if milliseconds were meant, write {value / 1000:g}"
        case "finite_number":
            return f"is {value}, must be a finite number"
    return f"is {value!r}, must be {_wanted(error['type'], place.name)}"


def _kinds(place: _Place) -> list[str]:
    """The kinds that the union in this place has."""
    return [tag for model in _models(_annotation(place)) for tag in _tags(model)]


def _literals(annotation: Any) -> Iterator[str]:
    """The texts of a Literal, which may be a member of a union."""
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _literals(argument)


def _annotation(place: _Place) -> Any:
    known = getattr(place.model, "model_fields", {}).get(place.name)
    return None if known is None else known.annotation


def _a_number(name: str) -> str:
    return "a number of seconds " if name.endswith("_s") else ""


def _wanted(kind: str, name: str) -> str:
    if kind.startswith("float") and name.endswith("_s"):
        return "a plain number of seconds, such as 0.05"
    kinds = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text in quotes",
        "tuple": "a list",
        "list": "a list",
        "model": "a table",
        "dict": "a table",
    }
    return next((text for prefix, text in kinds.items() if kind.startswith(prefix)), f"something else ({kind})")


def _unknown_key(place: _Place, value: Any, root: Any) -> str:
    known = list(getattr(place.model, "model_fields", {}))
    name = place.name
    seconds = f"{name.removesuffix('_ms')}_s"
    if name.endswith("_ms") and seconds in known:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        remedy = f"{seconds} = {value / 1000:g}" if number else seconds
        return f"unknown key; times are in seconds: write {remedy}"
    if name not in known and place.model is root:
        for section, field in root.model_fields.items():
            for model in _models(field.annotation):
                if name in model.model_fields:
                    return f"unknown key; did you mean {section}.{name}?"
    return f"unknown key; {_offer(name, known)}"


def _offer(text: str, known: Sequence[str]) -> str:
    near = get_close_matches(text, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"

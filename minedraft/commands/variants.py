"""What `minedraft compare` compares: every combination of a file's variants and the values on every axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from minedraft.commands.arrival_rate import at_rate
from minedraft.commands.errors import CommandError
from minedraft.config import ConfigError, RunConfig, named_variants, parse_config, read_tree
from minedraft.config_tree import Override, parse_values

DEFAULT_MODES: Final = ("ar", "sd", "psd")
RATE: Final = "rate"


class Variant(NamedTuple):
    """A run to compare.

    Attributes:
        name: of this run.
        line: its name without the value on the sweep's axis: what a line in a figure is called.
        x: that value; None without a sweep.
        config: all of it.
    """

    name: str
    line: str
    x: float | None
    config: RunConfig


class Choice(NamedTuple):
    """One value on an axis.

    Attributes:
        name: part of the variant's name.
        override: what it sets; None for an arrival rate, which is set in its own way.
        x: the value on the sweep's axis; None on all others.
    """

    name: str
    override: Override | None
    x: float | None = None


class Axes(NamedTuple):
    """What is varied, as the user wrote it.

    Attributes:
        modes: values of `--mode`.
        policies: values of `--policy`; several for one slot are an axis.
        vary: texts of `--vary`, an axis each.
        over: text of `--over`, the sweep's axis; None for no sweep.
        rates: text of `--rates`, a sweep over arrival rates; None likewise.
    """

    modes: Sequence[str] = ()
    policies: Sequence[Override] = ()
    vary: Sequence[str] = ()
    over: str | None = None
    rates: str | None = None

    @property
    def x_name(self) -> str | None:
        """What the sweep's axis is called; None without a sweep."""
        if self.rates is not None:
            return RATE
        return None if self.over is None else _short(self.over.partition("=")[0])


def make_variants(path: str | None, axes: Axes, overrides: Sequence[Override]) -> list[Variant]:
    """Every combination, checked. With no axis but the sweep's and no variants in the file the modes are compared.

    Args:
        path: of the configuration; None for the defaults.
        axes: what is varied.
        overrides: hold in all of them.

    Raises:
        ConfigError: a configuration can't be used.
        CommandError: an axis can't be read.
    """
    source = path or "options"
    tree = read_tree(path)
    bases = named_variants(tree, source) or [("", tree)]
    choices = [*_mode_axis(axes.modes), *_policy_axes(axes.policies), *(_vary_axis(text) for text in axes.vary)]
    if not choices and len(bases) == 1 and not bases[0][0]:
        choices = _mode_axis(DEFAULT_MODES)
    choices += _sweep_axis(axes)
    for axis in choices:
        _check_distinct(axis)
    variants = [
        _variant(base, source, base_name, choices, chosen, overrides)
        for (base_name, base), chosen in product(bases, product(*choices))
    ]
    names = [variant.name for variant in variants]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise CommandError(f"{source}: two variants are called {twice!r}; give each a name of its own")
    return variants


def _variant(
    base: dict[str, Any],
    source: str,
    base_name: str,
    axes: Sequence[Sequence[Choice]],
    chosen: Sequence[Choice],
    overrides: Sequence[Override],
) -> Variant:
    named = [choice for choice, axis in zip(chosen, axes, strict=True) if len(axis) > 1]
    name = ", ".join([part for part in (base_name, *(choice.name for choice in named)) if part])
    line = ", ".join([part for part in (base_name, *(choice.name for choice in named if choice.x is None)) if part])
    varied = [choice.override for choice in chosen if choice.override is not None]
    # What holds in all variants does so inside of a table that is varied as a whole, too.
    inside = [one for one in overrides if any(one.key.startswith(f"{other.key}.") for other in varied)]
    settings = [*overrides, *varied, *inside]
    x = next((choice.x for choice in chosen if choice.x is not None), None)
    try:
        config = parse_config(base, source=source, overrides=settings)
        if x is not None and chosen[-1].override is None:
            config = at_rate(config, x)
    except ConfigError as error:
        raise ConfigError(f"{error} [variant {name}]" if name else str(error)) from None
    return Variant(name or config.mode, line or config.mode, x, config)


def _check_distinct(axis: Sequence[Choice]) -> None:
    values = [(choice.x, choice.override and choice.override.value) for choice in axis]
    for i, (choice, value) in enumerate(zip(axis, values, strict=True)):
        if value in values[:i]:
            origin = f"--rates {choice.x:g}" if choice.override is None else choice.override.origin
            raise CommandError(f"{origin}: is given twice; leave one out")


def _mode_axis(modes: Sequence[str]) -> list[list[Choice]]:
    choices = [Choice(mode, Override("mode", mode, f"--mode {mode}")) for mode in modes]
    return [choices] if choices else []


def _policy_axes(policies: Sequence[Override]) -> list[list[Choice]]:
    axes: dict[str, list[Choice]] = {}
    for override in policies:
        axes.setdefault(override.key, []).append(Choice(str(override.value), override))
    return list(axes.values())


def _vary_axis(text: str, option: str = "--vary") -> list[Choice]:
    key, equals, rest = text.partition("=")
    values: list[Any] = parse_values(rest)
    if not equals or not all(key.split(".")) or not values:
        raise CommandError(f"{option} {text!r}: write it as dotted.key=value,value")
    short = _short(key)
    return [Choice(f"{short}={_brief(value)}", Override(key, value, f"{option} {key}={value}")) for value in values]


def _sweep_axis(axes: Axes) -> list[list[Choice]]:
    """The sweep's axis, in rising order; none without a sweep."""
    if axes.rates is not None and axes.over is not None:
        raise CommandError("--rates and --over: a table has one axis of its own; give one of them, and --vary for more")
    if axes.rates is not None:
        rates = _numbers(parse_values(axes.rates), f"--rates {axes.rates}")
        if min(rates) <= 0.0:
            raise CommandError(f"--rates {axes.rates}: must be above 0, in requests per second")
        choices = [Choice(f"{RATE}={rate:g}", None, rate) for rate in rates]
    elif axes.over is not None:
        found = _vary_axis(axes.over, "--over")
        values = _numbers([choice.override.value for choice in found if choice.override], f"--over {axes.over}")
        choices = [choice._replace(x=x) for choice, x in zip(found, values, strict=True)]
    else:
        return []
    return [sorted(choices, key=lambda choice: choice.x or 0.0)]


def _numbers(values: Sequence[Any], origin: str) -> list[float]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CommandError(f"{origin}: {value!r} is no number; write the values as 1,2,4")
    if not values:
        raise CommandError(f"{origin}: no values; write them as 1,2,4")
    return [float(value) for value in values]


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _brief(value: Any) -> str:
    """A value as part of a name."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}={_brief(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)

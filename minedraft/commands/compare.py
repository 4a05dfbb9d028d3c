"""`minedraft compare`: several runs side by side, over the same requests with the same luck."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from minedraft.commands.errors import CommandError, InterruptedRunError
from minedraft.commands.report import Column, as_json, check_writable, print_report, write_json
from minedraft.commands.simulate import new_collector, simulate
from minedraft.config import ConfigError, RunConfig, named_variants, parse_config, read_tree
from minedraft.config_tree import Override, parse_values

DEFAULT_MODES = ("ar", "sd", "psd")


class Choice(NamedTuple):
    """One value on an axis.

    Attributes:
        name: part of the variant's name.
        override: what it sets.
    """

    name: str
    override: Override


def compare_command(
    path: str | None,
    modes: Sequence[str],
    policies: Sequence[Override],
    vary: Sequence[str],
    overrides: Sequence[Override],
    json_path: str | None,
) -> None:
    """Run all variants, print one table, write the JSON.

    Raises:
        ConfigError: a configuration can't be used; none has run.
        CommandError: a run failed; what was done by then has been written.
    """
    check_writable(json_path)
    variants = make_variants(path, modes, policies, vary, overrides)
    columns: list[Column] = []
    for name, config in variants:
        outcome = simulate(config, new_collector(config), label=name)
        columns.append(Column(name, config.mode, config.scheduler_config(), outcome))
        if isinstance(outcome.failure, InterruptedRunError):
            break
    if json_path is not None:
        runs = [
            {**as_json(column, "compare", config.seed), "config": config.to_dict()}
            for column, (_, config) in zip(columns, variants, strict=False)
        ]
        write_json(json_path, {"variants": runs})
    if json_path != "-":
        print_report(columns, title=f"Simulated runs, seed {variants[0][1].seed}")
    for column in columns:
        if column.outcome.error is not None:
            raise CommandError(f"{column.name}: {column.outcome.error}", column.outcome.error.exit_code)


def make_variants(
    path: str | None,
    modes: Sequence[str],
    policies: Sequence[Override],
    vary: Sequence[str],
    overrides: Sequence[Override],
) -> list[tuple[str, RunConfig]]:
    """Every combination of the file's variants and the values on every axis.

    Several `--mode`, several `--policy` of one slot and a `--vary` make an axis each. With no axis and no variants
    the three modes are compared.

    Raises:
        ConfigError: a configuration can't be used.
        CommandError: a `--vary` can't be read.
    """
    source = path or "options"
    tree = read_tree(path)
    bases = named_variants(tree, source) or [("", tree)]
    axes = [*_mode_axis(modes), *_policy_axes(policies), *(_vary_axis(text) for text in vary)]
    if not axes and len(bases) == 1 and not bases[0][0]:
        axes = _mode_axis(DEFAULT_MODES)
    variants = []
    for (base_name, base), choices in product(bases, product(*axes)):
        named = [choice.name for choice, axis in zip(choices, axes, strict=True) if len(axis) > 1]
        name = ", ".join([part for part in (base_name, *named) if part])
        settings = [*overrides, *(choice.override for choice in choices)]
        try:
            config = parse_config(base, source=source, overrides=settings)
        except ConfigError as error:
            raise ConfigError(f"{error} [variant {name}]" if name else str(error)) from None
        variants.append((name or config.mode, config))
    return variants


def _mode_axis(modes: Sequence[str]) -> list[list[Choice]]:
    choices = [Choice(mode, Override("mode", mode, f"--mode {mode}")) for mode in dict.fromkeys(modes)]
    return [choices] if choices else []


def _policy_axes(policies: Sequence[Override]) -> list[list[Choice]]:
    axes: dict[str, list[Choice]] = {}
    for override in policies:
        axes.setdefault(override.key, []).append(Choice(str(override.value), override))
    return list(axes.values())


def _vary_axis(text: str) -> list[Choice]:
    key, equals, rest = text.partition("=")
    values: list[Any] = parse_values(rest)
    if not equals or not all(key.split(".")) or not values:
        raise CommandError(f"--vary {text!r}: write it as dotted.key=value,value")
    short = key.rpartition(".")[2]
    return [Choice(f"{short}={_brief(value)}", Override(key, value, f"--vary {key}={value}")) for value in values]


def _brief(value: Any) -> str:
    """A value as part of a name."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}={_brief(item)}" for key, item in value.items()) + "}"
    return str(value)

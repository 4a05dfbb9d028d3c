"""`minedraft theory`: the closed forms for one setting, as tables and sentences or as JSON."""

from __future__ import annotations

from typing import Final

from minedraft.commands.errors import CommandError
from minedraft.commands.report import check_writable, write_json
from minedraft.commands.theory_json import as_json
from minedraft.commands.theory_report import print_theory
from minedraft.commands.theory_setting import TheoryOptions, TheorySetting
from minedraft.theory.claims import claims
from minedraft.theory.draft_length import draft_cost_ends
from minedraft.theory.extra import MissingTheoryExtraError
from minedraft.theory.stages import StageLines, StageTimes
from minedraft.theory.study import Study
from minedraft.theory.tokens import check_rates, constant_rates

MOST_DRAFTS: Final = 64
TRIED_DRAFTS: Final = 16  # longest round tried for the best k, at a constant rate
MOST_COUNT: Final = 1_000_000
LEAST_MS: Final = 1e-6
MOST_MS: Final = 1e9


def theory_command(options: TheoryOptions, json_path: str | None) -> None:
    """Compute and show.

    Raises:
        CommandError: an option can't be used, or the `theory` extra is missing.
    """
    check_writable(json_path)
    study, alpha = _study(options)
    try:
        ends = draft_cost_ends(alpha, 0.37) if alpha is not None and 0.0 < alpha < 1.0 else None
        setting = TheorySetting(options, study, claims(), alpha, ends)
    except MissingTheoryExtraError as error:
        raise CommandError(str(error)) from error
    if json_path is not None:
        write_json(json_path, as_json(setting))
    if json_path != "-":
        print_theory(setting)


def _study(options: TheoryOptions) -> tuple[Study, float | None]:
    """The setting, and alpha if acceptance is a constant rate."""
    _check_counts(options)
    rates, alpha = _acceptance(options)
    lines = _lines(options)
    at_m = lines.at(options.k)
    at_2m = StageTimes(
        at_m.verify_s if options.verify_2m_ms is None else _seconds("--verify-2m-ms", options.verify_2m_ms),
        at_m.draft_s if options.draft_2m_ms is None else _seconds("--draft-2m-ms", options.draft_2m_ms, zero=True),
        at_m.overhead_s,
    )
    devices = options.target_devices, options.draft_devices
    return Study(lines, options.k, rates, options.m, at_2m, *devices), alpha


def _check_counts(options: TheoryOptions) -> None:
    bounds = {
        "-k": (options.k, 1, MOST_DRAFTS),
        "-m": (options.m, 1, MOST_COUNT),
        "--target-devices": (options.target_devices, 1, MOST_COUNT),
        "--draft-devices": (options.draft_devices, 0, MOST_COUNT),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise CommandError(f"{name} {value}: must be a whole number from {least} to {most}")


def _seconds(name: str, value_ms: float, *, zero: bool = False) -> float:
    if not (LEAST_MS <= value_ms <= MOST_MS or (zero and value_ms == 0.0)):
        least = f"0, or from {LEAST_MS:g}" if zero else f"from {LEAST_MS:g}"
        raise CommandError(f"{name} {value_ms:g}: must be {least} to {MOST_MS:g} milliseconds")
    return value_ms / 1000.0


def _lines(options: TheoryOptions) -> StageLines:
    """Stage times over k. What is given holds at this k: V is then the same at every other, t is in proportion to k."""
    from minedraft.sim.cost import paper_cost

    try:
        published = paper_cost(options.drafter)
    except ValueError as error:
        raise CommandError(f"--drafter {options.drafter}: {error}") from error
    verify = published.verify_base_s, published.verify_per_token_s
    draft = published.draft_base_s, published.draft_per_token_s
    if options.verify_ms is not None:
        verify = _seconds("--verify-ms", options.verify_ms), 0.0
    if options.draft_ms is not None:
        draft = 0.0, _seconds("--draft-ms", options.draft_ms, zero=True) / options.k
    return StageLines(*verify, *draft, _seconds("--overhead-ms", options.overhead_ms, zero=True))


def _acceptance(options: TheoryOptions) -> tuple[tuple[float, ...], float | None]:
    """Rates by position, and alpha if one constant rate was given."""
    origin = f"--acceptance {options.acceptance}"
    try:
        numbers = [float(part) for part in options.acceptance.split(",")]
    except ValueError as error:
        remedy = "write a rate such as 0.7, or one unconditional rate per position such as 0.73,0.52,0.35"
        raise CommandError(f"{origin}: {remedy}") from error
    try:
        if len(numbers) == 1:
            return constant_rates(numbers[0], max(TRIED_DRAFTS, options.k)), numbers[0]
        rates = check_rates(numbers)
    except ValueError as error:
        raise CommandError(f"{origin}: {error}") from error
    if len(rates) < options.k:
        raise CommandError(f"{origin}: {len(rates)} rates for -k {options.k}; give one per draft, or a smaller k")
    return rates, None

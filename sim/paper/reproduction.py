"""All claims, or some of them, worked out (`reproduce`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from minedraft.sim.paper import (
    claims_balance,
    claims_gains,
    claims_requests,
    claims_stages,
    claims_sweeps,
    claims_theory,
)
from minedraft.sim.paper.bench import Bench
from minedraft.sim.paper.calibration import Calibration, calibrate
from minedraft.sim.paper.gains import PUBLISHED, GainTable
from minedraft.sim.paper.setup import QWEN
from minedraft.sim.paper.trial import Trial
from minedraft.sim.paper.verdict import Line

THEORY: Final = tuple(f"T{i}" for i in range(1, 13))
EXPERIMENT: Final = tuple(f"E{i}" for i in range(1, 19))
CLAIMS: Final = (*THEORY, *EXPERIMENT)

_HEADS: Final = ("S6", "S7")
SETTINGS_OF: Final = {
    "E2": QWEN,
    "E3": QWEN,
    "E4": QWEN,
    "E5": (*QWEN, "S5"),
    "E6": ("S5",),
    "E7": _HEADS,
    "E8": PUBLISHED,
    "E15": PUBLISHED,
}
"""Claims about gains, and the settings that each is about."""
STAGES: Final = ("E1", "E18")
SWEEPS: Final = ("E9", "E10", "E11", "E13")
REQUESTS: Final = ("E12", "E14", "E16")
BALANCE: Final = ("E17",)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came of it.

    Attributes:
        lines: one per figure, in the order of the claims.
        calibration: what was fitted; None if no claim needed it.
        table: gains by setting and data set; None likewise.
        bench: every run.
    """

    lines: tuple[Line, ...]
    calibration: Calibration | None
    table: GainTable | None
    bench: Bench


def reproduce(bench: Bench, wanted: Sequence[str] = CLAIMS) -> Reproduction:
    """Run what the wanted claims need, and judge them.

    Args:
        bench: where to run, and how much.
        wanted: of `CLAIMS`.

    Raises:
        MissingTheoryExtraError: scipy isn't there.
    """
    found: list[Line] = []
    if _any(wanted, THEORY):
        bench.prepare(claims_theory.trials(bench, wanted), "theory")
        found += claims_theory.lines(bench, wanted)
    if _any(wanted, BALANCE):
        found += claims_balance.lines()
    calibration, table = None, None
    if _any(wanted, (*SETTINGS_OF, *STAGES, *SWEEPS, *REQUESTS)):
        settings = _settings(wanted)
        calibration = calibrate(bench, settings)
        table = GainTable(bench, calibration, settings)
        table.prepare(_others(bench, calibration, wanted))
        found += _experiment_lines(bench, calibration, table, wanted)
    chosen = [line for line in found if line.claim in wanted]
    chosen.sort(key=lambda line: CLAIMS.index(line.claim))
    return Reproduction(tuple(chosen), calibration, table, bench)


def _any(wanted: Sequence[str], claims: Sequence[str]) -> bool:
    return any(claim in wanted for claim in claims)


def _settings(wanted: Sequence[str]) -> tuple[str, ...]:
    needed = [name for claim, names in SETTINGS_OF.items() if claim in wanted for name in names]
    return tuple(name for name in PUBLISHED if name in needed)


def _others(bench: Bench, calibration: Calibration, wanted: Sequence[str]) -> list[Trial]:
    """Runs that aren't about gains; they go along with those that are."""
    found: list[Trial] = []
    if _any(wanted, STAGES):
        found += claims_stages.trials(bench, calibration)
    if _any(wanted, SWEEPS):
        found += claims_sweeps.trials(bench, calibration)
    if _any(wanted, REQUESTS):
        found += claims_requests.trials(bench, calibration)
    return found


def _experiment_lines(bench: Bench, calibration: Calibration, table: GainTable, wanted: Sequence[str]) -> list[Line]:
    found = claims_gains.lines(bench, table, calibration) if table.settings else []
    if _any(wanted, STAGES):
        found += claims_stages.lines(bench, calibration)
    if _any(wanted, SWEEPS):
        found += claims_sweeps.lines(bench, calibration)
    if _any(wanted, REQUESTS):
        found += claims_requests.lines(bench, calibration)
    return found

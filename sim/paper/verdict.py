"""A claim of the paper, or a figure of one, held against ours (`Line`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple


class Verdict(StrEnum):
    """How a line ends."""

    MET = "met"
    MISSED = "missed"
    NOT_COMPARABLE = "not comparable"


class Basis(StrEnum):
    """Where our figure comes from.

    Attributes:
        EXACT: a closed form or a search; nothing is fitted.
        INPUT: it went in: a published stage time.
        FITTED: a number was chosen so that this comes out.
        PREDICTED: simulated, with nothing chosen for it.
        WHAT_IF: simulated; the paper has no such figure.
    """

    EXACT = "exact"
    INPUT = "input"
    FITTED = "fitted"
    PREDICTED = "predicted"
    WHAT_IF = "what-if"


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison.

    Attributes:
        claim: T1 … T12, E1 … E18.
        what: the figure, with its setting and unit.
        paper: the paper's, as text.
        ours: ours, as text.
        tolerance: as text; empty for orders and signs.
        verdict: whether ours lies within it.
        basis: where ours comes from.
        note: why it is missed, or what to know.
        paper_value: the paper's as a number, if it is one.
        our_value: ours.
        is_number: counted among the claims with numbers; False for signs, orders, inequalities.
    """

    claim: str
    what: str
    paper: str
    ours: str
    tolerance: str
    verdict: Verdict
    basis: Basis
    note: str = ""
    paper_value: float = math.nan
    our_value: float = math.nan
    is_number: bool = True

    @property
    def is_theory(self) -> bool:
        """T claims."""
        return self.claim.startswith("T")


def _verdict(holds: bool) -> Verdict:
    return Verdict.MET if holds else Verdict.MISSED


class Shown(NamedTuple):
    """How a figure and its tolerance are meant.

    Attributes:
        unit: "%", "ms" and so on; tolerances of percentages are in points.
        decimals: shown.
        relative: the tolerance is a share of the paper's figure.
    """

    unit: str = ""
    decimals: int = 2
    relative: bool = False

    def text(self, value: float) -> str:
        """A figure without its unit."""
        return f"{value:.{self.decimals}f}"

    @property
    def suffix(self) -> str:
        """The unit, ready to be put behind a figure."""
        return f" {self.unit}" if self.unit else ""

    def tolerance_text(self, tolerance: float) -> str:
        """Plus or minus."""
        if self.relative:
            return f"±{100 * tolerance:g} %"
        return f"±{tolerance:g}{' pp' if self.unit == '%' else ''}"

    def allowed(self, paper: float, tolerance: float) -> float:
        """The largest difference."""
        return tolerance * abs(paper) if self.relative else tolerance


PLAIN: Final = Shown()
PERCENT: Final = Shown("%", 1)
SPEED: Final = Shown("tok/s", 0, relative=True)


def figure(
    claim: str,
    what: str,
    paper: float,
    ours: float,
    tolerance: float,
    basis: Basis,
    shown: Shown = PLAIN,
    note: str = "",
) -> Line:
    """A number against a number."""
    holds = abs(ours - paper) <= shown.allowed(paper, tolerance)
    paper_s, our_s = (f"{shown.text(value)}{shown.suffix}" for value in (paper, ours))
    tolerance_s = shown.tolerance_text(tolerance)
    return Line(claim, what, paper_s, our_s, tolerance_s, _verdict(holds), basis, note, paper, ours)


def within(
    claim: str,
    what: str,
    paper: tuple[float, float],
    ours: float,
    tolerance: float,
    basis: Basis,
    shown: Shown = PLAIN,
    note: str = "",
) -> Line:
    """A number against a range, widened by the tolerance at both ends."""
    low, high = paper
    holds = low - shown.allowed(low, tolerance) <= ours <= high + shown.allowed(high, tolerance)
    paper_s = f"{shown.text(low)} … {shown.text(high)}{shown.suffix}"
    our_s = f"{shown.text(ours)}{shown.suffix}"
    tolerance_s = shown.tolerance_text(tolerance) if tolerance else "in range"
    return Line(claim, what, paper_s, our_s, tolerance_s, _verdict(holds), basis, note, our_value=ours)


def explained(line: Line, reason: str) -> Line:
    """The line, with a reason if it is missed."""
    if line.verdict is not Verdict.MISSED:
        return line
    return replace(line, note=f"{line.note}; {reason}" if line.note else reason)


def order(claim: str, what: str, paper: str, ours: str, holds: bool, basis: Basis, note: str = "") -> Line:
    """A sign, an order or an inequality."""
    return Line(claim, what, paper, ours, "", _verdict(holds), basis, note, is_number=False)


MUST_BE_MET: Final = 0.8
"""Share of the E claims' numbers that has to lie within its tolerance."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Lines counted: how many are met, of how many that can be compared."""

    num_met: int
    num_lines: int

    @classmethod
    def of(cls, lines: list[Line]) -> Tally:
        """Of some lines."""
        counted = [line for line in lines if line.verdict is not Verdict.NOT_COMPARABLE]
        return cls(sum(line.verdict is Verdict.MET for line in counted), len(counted))

    def __str__(self) -> str:
        return f"{self.num_met} of {self.num_lines}"

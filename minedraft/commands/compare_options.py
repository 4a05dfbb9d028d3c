"""Options of `minedraft compare` (`CompareOptions`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minedraft.statistics import DEFAULT_CONFIDENCE


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How to compare, and what to show.

    Attributes:
        num_seeds: each variant runs under so many seeds, the configuration's and those after it.
        jobs: processes at work at a time.
        confidence: of intervals.
        baseline: name of the variant that others are compared with; None for the first.
        metrics: JSON names of the figures to show; none for the usual ones.
        find_share: look for the highest arrival rate at which this share of the requests keeps the SLO.
        json_path: see the options of the command line, as all that follows.
        csv_path: of a sweep or of several seeds.
        figure_path: of a sweep.
    """

    num_seeds: int = 1
    jobs: int = 1
    confidence: float = DEFAULT_CONFIDENCE
    baseline: str | None = None
    metrics: Sequence[str] = ()
    find_share: float | None = None
    json_path: str | None = None
    csv_path: str | None = None
    figure_path: str | None = None

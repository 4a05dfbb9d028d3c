"""A variant under several seeds, and what that says of it and of its difference to a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minedraft.commands.drive import Outcome
from minedraft.commands.errors import CommandError
from minedraft.commands.figures import all_names
from minedraft.commands.report import Column, as_json
from minedraft.commands.variants import Variant
from minedraft.config import RunConfig
from minedraft.statistics import Estimate, Pairing, mean_estimate, pairing
from minedraft.steady_state import still_growing


@dataclass(frozen=True)
class Repeated:
    """What came of a variant.

    Attributes:
        variant: what ran.
        outcomes: by seed; only of runs that went to their end.
        confidence: of all intervals.
    """

    variant: Variant
    outcomes: dict[int, Outcome]
    confidence: float

    @cached_property
    def _flat(self) -> dict[int, dict[str, Any]]:
        return {seed: outcome.summary.to_dict() for seed, outcome in self.outcomes.items()}

    @property
    def steady(self) -> bool:
        """Whether no growing backlog is to be seen, all seeds taken together."""
        if self.variant.config.closed_loop:
            return True
        summaries = [outcome.summary for outcome in self.outcomes.values()]
        if not summaries:
            return True
        return not still_growing(
            [one.backlog_by_tenth for one in summaries],
            filling_share=sum(one.filling_share for one in summaries) / len(summaries),
            waiting_share=sum(one.waiting_share for one in summaries) / len(summaries),
        )

    def values(self, name: str) -> dict[int, float]:
        """A figure by seed; nothing if the runs don't have it."""
        return {seed: float(flat[name]) for seed, flat in self._flat.items() if flat[name] is not None}

    def estimate(self, name: str) -> Estimate | None:
        """A figure with its interval; None if no run has it."""
        values = list(self.values(name).values())
        return mean_estimate(values, self.confidence) if values else None

    def against(self, baseline: Repeated, name: str) -> Pairing | None:
        """The figure compared with the baseline's, over the seeds that both have; None if there are none."""
        ours, theirs = self.values(name), baseline.values(name)
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds:
            return None
        return pairing([theirs[seed] for seed in seeds], [ours[seed] for seed in seeds], self.confidence)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The same run with other random numbers."""
    return config.model_copy(update={"seed": seed})


def baseline_of(repeated: Repeated, all_of_them: Sequence[Repeated], line: str) -> Repeated | None:
    """What a variant is compared with: the baseline at the same place of the sweep; None for the baseline itself."""
    if repeated.variant.line == line:
        return None
    return next(
        (other for other in all_of_them if other.variant.line == line and other.variant.x == repeated.variant.x), None
    )


def find_line(name: str | None, variants: Sequence[Variant]) -> str:
    """The baseline's name, checked.

    Raises:
        CommandError: there is no such variant.
    """
    lines = list(dict.fromkeys(variant.line for variant in variants))
    if name is not None and name not in lines:
        raise CommandError(f"--baseline {name}: no such variant; there are {', '.join(map(repr, lines))}")
    return name or lines[0]


def repeated_json(repeated: Repeated, baseline: Repeated | None) -> dict[str, Any]:
    """A variant as JSON: every run, an interval for every figure, and the paired comparison with the baseline."""
    variant = repeated.variant
    columns = {
        seed: Column(variant.name, variant.config.mode, variant.config.scheduler_config(), outcome)
        for seed, outcome in repeated.outcomes.items()
    }
    estimates = {name: repeated.estimate(name) for name in all_names()}
    pairs = {} if baseline is None else {name: repeated.against(baseline, name) for name in all_names()}
    return {
        "name": variant.name,
        "mode": variant.config.mode,
        "line": variant.line,
        "x": variant.x,
        "seeds": list(repeated.outcomes),
        "steady_state": repeated.steady,
        "estimates": {name: estimate_json(estimate) for name, estimate in estimates.items() if estimate is not None},
        "baseline": None if baseline is None else baseline.variant.name,
        "against_baseline": {name: _pairing_json(pair) for name, pair in pairs.items() if pair is not None},
        "runs": [as_json(column, "compare", seed) for seed, column in columns.items()],
        "config": variant.config.to_dict(),
    }


def estimate_json(estimate: Estimate, no_difference: float | None = None) -> dict[str, Any]:
    """An estimate; with a value that means "no difference" also whether the interval decides that there is one."""
    found: dict[str, Any] = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    if no_difference is not None:
        found["decided"] = estimate.excludes(no_difference)
    return found


def _pairing_json(pair: Pairing) -> dict[str, Any]:
    return {
        "difference": estimate_json(pair.difference, 0.0),
        "ratio": None if pair.ratio is None else estimate_json(pair.ratio, 1.0),
        "correlation": pair.correlation,
        "seeds_saved": pair.seeds_saved,
    }

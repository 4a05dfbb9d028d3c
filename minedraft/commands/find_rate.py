"""`minedraft compare --find-rate`: how much load each variant bears before its SLO breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

import minedraft
from minedraft.commands.compare_options import CompareOptions
from minedraft.commands.compare_seeds import seeds_of
from minedraft.commands.errors import CommandError, InterruptedRunError
from minedraft.commands.figures import Figure
from minedraft.commands.many_runs import carry_out
from minedraft.commands.rate_search import HIGHEST_RATE, LOWEST_RATE, Found, Search, search
from minedraft.commands.repeated import Repeated, estimate_json, find_line, with_seed
from minedraft.commands.report import Column, as_json, console, fairness, not_steady, write_json
from minedraft.commands.seeds_report import comparison_text
from minedraft.commands.variants import Variant
from minedraft.statistics import Estimate, Pairing, mean_estimate, pairing

RATE: Final = Figure("highest_rate", "highest rate (req/s)", 3)


class Limit:
    """The highest rate of a variant, by seed.

    Args:
        variant: which.
        confidence: of intervals.

    Attributes:
        found: by seed, of searches that were finished.
    """

    def __init__(self, variant: Variant, confidence: float) -> None:
        self.variant = variant
        self.confidence = confidence
        self.found: dict[int, Found] = {}

    @property
    def num_devices(self) -> int:
        """Of both groups, as the runs had them."""
        summary = next(iter(self.found.values())).outcome.summary
        return summary.num_target_devices + summary.num_draft_devices

    @property
    def estimate(self) -> Estimate | None:
        """Mean of the rates; None unless every seed has one."""
        rates = [found.rate for found in self.found.values() if found.rate is not None]
        return mean_estimate(rates, self.confidence) if rates and len(rates) == len(self.found) else None

    @property
    def steady(self) -> bool:
        """Whether the runs at the rates found were in steady state."""
        outcomes = {seed: found.outcome for seed, found in self.found.items()}
        return Repeated(self.variant, outcomes, self.confidence).steady

    def against(self, other: Limit) -> Pairing | None:
        """Compared with another's, over the seeds at which both have one."""
        pairs = [
            (theirs.rate, ours.rate)
            for seed, ours in self.found.items()
            if (theirs := other.found.get(seed)) is not None and theirs.rate is not None and ours.rate is not None
        ]
        if not pairs or self.estimate is None or other.estimate is None:
            return None
        return pairing([rate for rate, _ in pairs], [rate for _, rate in pairs], self.confidence)


def find_rates(variants: Sequence[Variant], options: CompareOptions) -> None:
    """Search, print, write.

    Raises:
        CommandError: there is no SLO, or arrivals have no rate; or a run failed or was interrupted, and what was done
            by then has been written.
    """
    assert options.find_share is not None
    for variant in variants:
        if variant.config.slo is None:
            raise CommandError("--find-rate: needs limits to keep; add --goodput ttft:500,tpot:50 (milliseconds)")
    line = find_line(options.baseline, variants)
    limits, failure = _search_all(variants, options)
    if options.json_path is not None:
        write_json(options.json_path, _as_json(limits, line, options))
    if options.json_path != "-" and any(limit.found for limit in limits):
        _print(limits, line, options)
    if failure is not None:
        raise failure


def _search_all(variants: Sequence[Variant], options: CompareOptions) -> tuple[list[Limit], CommandError | None]:
    share = options.find_share or 0.0
    limits = [Limit(variant, options.confidence) for variant in variants]
    places = [(limit, seed) for seed in seeds_of(variants, options.num_seeds) for limit in limits]
    tasks = [Search(with_seed(limit.variant.config, seed), share) for limit, seed in places]
    found, failure = carry_out(search, tasks, options.jobs, "searching")
    for (limit, seed), one in zip(places, found, strict=True):
        if one is not None:
            limit.found[seed] = one
    if isinstance(failure, InterruptedRunError):
        done = sum(one is not None for one in found)
        failure = InterruptedRunError(f"interrupted: {done} of {len(tasks)} searches were finished")
    return limits, failure


def _print(limits: Sequence[Limit], line: str, options: CompareOptions) -> None:
    out = console()
    slo = limits[0].variant.config.slo
    assert slo is not None
    kept = ", ".join(f"{name.removesuffix('_ms').upper()} <= {value:g} ms" for name, value in _given(slo))
    share = 100.0 * (options.find_share or 0.0)
    first = limits[0].variant.config.seed
    seeds = f"seed {first}" if options.num_seeds == 1 else f"seeds {first} to {first + options.num_seeds - 1}"
    out.print(f"Highest arrival rate at which {share:g} % of the requests keep {kept}; {seeds}\n")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("", "requests/s", "per device", f"against {line}"):
        table.add_column(Text(name), justify="right" if name and "against" not in name else "left")
    base = next((limit for limit in limits if limit.variant.line == line), limits[0])
    for limit in limits:
        table.add_row(*map(Text, _cells(limit, base)))
    out.print(table, "")
    for note in _notes(limits, options):
        out.print(note, style="dim")


def _given(slo: Any) -> list[tuple[str, float]]:
    return [(name, value) for name, value in slo.arguments().items() if value is not None]


def _cells(limit: Limit, base: Limit) -> list[str]:
    estimate = limit.estimate
    if estimate is None:
        return [limit.variant.name, _nowhere(limit), "", ""]
    mark = "" if limit.steady else " *"
    pair = None if limit is base else limit.against(base)
    per_device = f"{estimate.value / limit.num_devices:.3f}"
    return [limit.variant.name, RATE.with_interval(estimate) + mark, per_device, comparison_text(pair, RATE)]


def _nowhere(limit: Limit) -> str:
    beyond = [found.kept for found in limit.found.values() if found.rate is None]
    if not beyond:
        return "-"
    if all(beyond):
        return f"above {HIGHEST_RATE:g}"
    return f"none above {LOWEST_RATE:g}" if not any(beyond) else "not found"


def _notes(limits: Sequence[Limit], options: CompareOptions) -> list[str]:
    done = [limit for limit in limits if limit.found]
    columns = [
        Column(limit.variant.line, limit.variant.config.mode, limit.variant.config.scheduler_config(), found.outcome)
        for limit in done
        for found in list(limit.found.values())[:1]
    ]
    found = [fairness(columns)] if any(column.mode not in ("ar", "sd") for column in columns) else []
    runs = sum(one.num_runs for limit in done for one in limit.found.values())
    found.append(
        f"By bisection to within 1 %, {runs} runs; under one seed the same requests in the same pattern."
        + (f" ± and [] are {100.0 * options.confidence:g} % intervals over seeds." if options.num_seeds > 1 else "")
        + " A run of few requests bears more than a service that never ends: try more requests."
    )
    growing = [limit.variant.name for limit in done if limit.estimate is not None and not limit.steady]
    if growing:
        found.append(f"* {not_steady(growing)}")
    if any(one.rate is None and one.kept for limit in done for one in limit.found.values()):
        found.append("Where no limit was found, the SLO is kept however fast so few requests arrive: use more.")
    return found


def _as_json(limits: Sequence[Limit], line: str, options: CompareOptions) -> dict[str, Any]:
    base = next((limit for limit in limits if limit.variant.line == line), limits[0])
    return {
        "minedraft": minedraft.__version__,
        "command": "compare",
        "find_rate": options.find_share,
        "baseline": line,
        "confidence": options.confidence,
        "variants": [_limit_json(limit, None if limit is base else base) for limit in limits],
    }


def _limit_json(limit: Limit, base: Limit | None) -> dict[str, Any]:
    config, estimate = limit.variant.config, limit.estimate
    pair = None if base is None else limit.against(base)
    ratio = None if pair is None else pair.ratio
    column = (limit.variant.name, config.mode, config.scheduler_config())
    return {
        "name": limit.variant.name,
        "mode": config.mode,
        "seeds": list(limit.found),
        "highest_rates": [found.rate for found in limit.found.values()],
        "kept_at_the_last": [found.kept for found in limit.found.values()],
        "highest_rate": None if estimate is None else estimate_json(estimate),
        "ratio_to_baseline": None if ratio is None else estimate_json(ratio, 1.0),
        "steady_state": limit.steady,
        "runs": [as_json(Column(*column, found.outcome), "compare", seed) for seed, found in limit.found.items()],
        "config": config.to_dict(),
    }

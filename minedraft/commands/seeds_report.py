"""Tables of figures over seeds: a block per figure, or rows over the values of a sweep; and the notes below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from minedraft.commands.figures import LARGE, Figure
from minedraft.commands.repeated import Repeated, baseline_of
from minedraft.commands.report import Column, fairness, not_steady
from minedraft.commands.variants import Variant
from minedraft.config_workload import TraceWorkloadTable
from minedraft.statistics import Estimate, Pairing

OPEN: Final = "?"  # at a comparison that decides nothing
SAME: Final = "="  # at one without any difference under any seed
UNSTEADY: Final = "*"
FEW_TIMES: Final = 10.0  # shown without decimals from here on
TAIL_REQUESTS: Final = 1000  # below, a 99th percentile rests on fewer than ten requests


def blocks_table(repeated: Sequence[Repeated], figures: Sequence[Figure], line: str, title: str) -> Table:
    """A block per figure with a row per variant; narrow, however many variants there are."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    several = any(len(one.outcomes) > 1 for one in repeated)
    table.add_column("")
    table.add_column("mean" if several else "", justify="right")
    if len(repeated) > 1:
        table.add_column(Text(f"against {line}"), justify="left", overflow="fold")
    for figure in figures:
        rows = [(one, one.estimate(figure.name)) for one in repeated]
        if all(estimate is None for _, estimate in rows):
            continue
        table.add_row(Text(figure.label, style="bold"))
        for one, estimate in rows:
            cells = [f"  {one.variant.name}", "-" if estimate is None else figure.with_interval(estimate)]
            base = baseline_of(one, repeated, line)
            if len(repeated) > 1:
                cells.append("" if base is None else comparison_text(one.against(base, figure.name), figure))
            table.add_row(*map(Text, cells))
    return table


def sweep_table(repeated: Sequence[Repeated], figure: Figure, line: str, x_name: str) -> Table:
    """One figure: a row per value of the sweep, a column per line."""
    lines = list(dict.fromkeys(one.variant.line for one in repeated))
    table = Table(
        title=Text(figure.label, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column(x_name, justify="right")
    for name in lines:
        table.add_column(Text(name), justify="right")
    by_x = sorted(repeated, key=lambda one: one.variant.x or 0.0)
    for x, group in groupby(by_x, key=lambda one: one.variant.x):
        here = list(group)
        of_line = {one.variant.line: one for one in here}
        cells = [_sweep_cell(of_line.get(name), here, figure, line) for name in lines]
        table.add_row(f"{x:g}", *map(Text, cells))
    return table


def _sweep_cell(one: Repeated | None, here: Sequence[Repeated], figure: Figure, line: str) -> str:
    estimate = None if one is None else one.estimate(figure.name)
    if one is None or estimate is None:
        return "-"
    text = ("" if one.steady else UNSTEADY) + figure.with_interval(estimate)
    base = baseline_of(one, here, line)
    pair = None if base is None else one.against(base, figure.name)
    return text if pair is None else f"{text} {comparison_text(pair, figure, brief=True)}"


def comparison_text(pair: Pairing | None, figure: Figure, *, brief: bool = False) -> str:
    """A ratio, or for shares and where zeros forbid a ratio a difference, with its interval; `OPEN` if undecided."""
    if pair is None:
        return ""
    if pair.ratio is not None and not figure.is_share:
        return _with_ends(pair.ratio, 1.0, ratio_text, brief)
    return _with_ends(pair.difference, 0.0, lambda value: _signed(figure, value), brief)


def _with_ends(estimate: Estimate, no_difference: float, text: Callable[[float], str], brief: bool) -> str:
    found = text(estimate.value)
    if estimate.low is None or estimate.high is None:
        return found
    mark = "" if estimate.excludes(no_difference) else OPEN
    if estimate.low == estimate.high == no_difference:
        mark = SAME
    if brief:
        return f"{mark or ' '} {found}"  # the mark first, so that numbers stand below each other
    ends = ", ".join(text(end).removesuffix("x") for end in (estimate.low, estimate.high))
    return f"{found} [{ends}] {mark}".rstrip()


def ratio_text(value: float) -> str:
    """As 1.141x."""
    decimals = 3 if value < 10.0 else 1
    return f"{value:,.{decimals}f}x" if value < LARGE else f"{value:,.0f}x"


def _signed(figure: Figure, value: float) -> str:
    text = figure.text(value)
    return text if text.startswith("-") else f"+{text}"


def notes(repeated: Sequence[Repeated], figures: Sequence[Figure], line: str, confidence: float) -> list[str]:
    """What a reader must know to trust the tables, and what went wrong."""
    with_runs = [one for one in repeated if one.outcomes]
    columns = [
        Column(one.variant.line, one.variant.config.mode, one.variant.config.scheduler_config(), outcome)
        for one in with_runs
        for outcome in list(one.outcomes.values())[:1]
    ]
    found = []
    if any(column.mode not in ("ar", "sd") for column in columns):
        found.append(fairness(columns))
    found += _about_replicas(with_runs)
    found += _about_intervals(with_runs, line, confidence)
    worth = _worth(with_runs, figures, line)
    found += [worth] if worth else []
    growing = _grouped([one.variant for one in with_runs if not one.steady])
    if growing:
        found.append(f"{UNSTEADY if with_runs[0].variant.x is not None else ''} {not_steady(growing)}".strip())
    found += _about_workload(with_runs, figures)
    for one in with_runs:
        refused = [outcome for outcome in one.outcomes.values() if outcome.num_refused and outcome.summary.completed]
        if refused:
            number = sum(outcome.num_refused for outcome in refused)
            found.append(f"{one.variant.name}: requests not served: {number}; the first: {refused[0].detail}")
    return found


def _grouped(variants: Sequence[Variant]) -> list[str]:
    """Names, with the places of a sweep in brackets behind their line."""
    places: dict[str, list[float]] = {}
    for variant in variants:
        places.setdefault(variant.line, []).extend([] if variant.x is None else [variant.x])
    return [f"{line} ({', '.join(f'{x:g}' for x in xs)})" if xs else line for line, xs in places.items()]


def _about_replicas(repeated: Sequence[Repeated]) -> list[str]:
    """What figures of several targets beside each other count."""
    stars = _grouped([one.variant for one in repeated if any(outcome.replicas for outcome in one.outcomes.values())])
    if not stars:
        return []
    text = f"Targets beside each other in {', '.join(stars)}: running requests are those of all, "
    return [f"{text}requests per verify step and imbalance those of one."]


def _about_intervals(repeated: Sequence[Repeated], line: str, confidence: float) -> list[str]:
    several = any(len(one.outcomes) > 1 for one in repeated)
    found = []
    if several:
        found.append(
            f"Means over seeds; ± is half of the {100.0 * confidence:g} % interval, Student's t over one value per "
            "seed (a percentile is that of the seed's own run)."
        )
    if len({one.variant.line for one in repeated}) > 1:
        pairs = f"Against {line!r} under the same seed: same arrivals, lengths and acceptance luck. "
        pairs += "Ratios, and differences of what is in percent."
        if several:
            pairs += (
                f" Geometric means with paired intervals; {OPEN} is undecided, no difference lies in the interval; "
                f"{SAME} is equal under every seed. Each holds by itself: {_one_in(confidence)} is decided by chance."
            )
        found.append(pairs)
    return found


def _one_in(confidence: float) -> str:
    """How often an interval misses, in words."""
    return f"of {1.0 / (1.0 - confidence):.0f} comparisons without a difference about one"


def _worth(repeated: Sequence[Repeated], figures: Sequence[Figure], line: str) -> str | None:
    """What common random numbers were worth for the first figure that is shown."""
    for figure in figures:
        bases = [(one, baseline_of(one, repeated, line)) for one in repeated]
        pairs = [one.against(base, figure.name) for one, base in bases if base is not None]
        worth = sorted([pair.seeds_saved for pair in pairs if pair is not None and pair.seeds_saved is not None])
        if worth:
            low, high = [_times_text(times) for times in (worth[0], worth[-1])]
            times = low if low == high else f"{low} to {high}"
            return (
                f"The pairs were worth {times} times as many runs with independent seeds (by the variance of the "
                f"difference in {figure.label})."
            )
    return None


def _times_text(times: float) -> str:
    if times >= LARGE:
        return f"over {LARGE:,.0f}"
    return f"{times:.{0 if times >= FEW_TIMES else 1}f}"


def _about_workload(repeated: Sequence[Repeated], figures: Sequence[Figure]) -> list[str]:
    found = []
    workloads = [one.variant.config.workload for one in repeated]
    several = any(len(one.outcomes) > 1 for one in repeated)
    if several and any(isinstance(workload, TraceWorkloadTable) for workload in workloads):
        found.append(
            "A recorded trace is the same under every seed (drawn arrivals excepted): its intervals show the luck of "
            "acceptance, not that of traffic."
        )
    fewest = min((outcome.summary.completed for one in repeated for outcome in one.outcomes.values()), default=0)
    if fewest < TAIL_REQUESTS and any(figure.name.startswith("p99_") for figure in figures):
        rest = f"rests on the {fewest // 100} slowest" if fewest >= 200 else "is all but the slowest one's"
        found.append(f"A P99 over {fewest} requests {rest}; more requests steady it.")
    return found

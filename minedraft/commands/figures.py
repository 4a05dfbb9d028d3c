"""Figures of a run by their JSON name: what they are called in tables, and how they are shown (`Figure`)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import Final, NamedTuple

from minedraft.commands.errors import CommandError
from minedraft.metrics import MetricsCollector
from minedraft.statistics import Estimate
from minedraft.summary import Slo

LARGE: Final = 1000.0  # shown without decimals from here on


class Figure(NamedTuple):
    """How to show a figure.

    Attributes:
        name: its key in the JSON of a run.
        label: its name in tables.
        decimals: below `LARGE`.
        scale: 100 for shares, which are shown in percent.
    """

    name: str
    label: str
    decimals: int = 1
    scale: float = 1.0

    @property
    def is_share(self) -> bool:
        """Whether variants are compared by difference; all others by ratio."""
        return self.scale != 1.0

    def text(self, value: float) -> str:
        """One value."""
        value *= self.scale
        return f"{value:,.{self._decimals_of(value)}f}"

    def with_interval(self, estimate: Estimate) -> str:
        """A mean, and ± half its interval if it has one, to the same digit."""
        half = estimate.half_width
        if half is None:
            return self.text(estimate.value)
        decimals = self._decimals_of(self.scale * estimate.value)
        return f"{self.text(estimate.value)} ± {self.scale * half:,.{decimals}f}"

    def _decimals_of(self, shown: float) -> int:
        return 0 if abs(shown) >= LARGE else self.decimals


KNOWN: Final = (
    Figure("request_throughput", "Request throughput (req/s)", 3),
    Figure("request_goodput", "Request goodput (req/s)", 3),
    Figure("slo_attainment", "Requests that keep the SLO (%)", 1, 100.0),
    Figure("output_throughput", "Output throughput (tok/s)"),
    Figure("output_throughput_per_device", "Output per device (tok/s)"),
    Figure("makespan", "Makespan (s)", 2),
    Figure("mean_ttft_ms", "Mean TTFT (ms)"),
    Figure("median_ttft_ms", "Median TTFT (ms)"),
    Figure("p99_ttft_ms", "P99 TTFT (ms)"),
    Figure("mean_tpot_ms", "Mean TPOT (ms)"),
    Figure("median_tpot_ms", "Median TPOT (ms)"),
    Figure("p99_tpot_ms", "P99 TPOT (ms)"),
    Figure("mean_e2el_ms", "Mean E2EL (ms)"),
    Figure("p99_e2el_ms", "P99 E2EL (ms)"),
    Figure("mean_queue_ms", "Mean queueing (ms)"),
    Figure("spec_decode_acceptance_length", "Acceptance length", 3),
    Figure("target_utilisation", "Target utilisation (%)", 1, 100.0),
    Figure("draft_utilisation", "Drafter utilisation (%)", 1, 100.0),
    Figure("overlapped_draft_share", "Drafting overlapped (%)", 1, 100.0),
    Figure("empty_batch_share", "Another batch empty (%)", 1, 100.0),
    Figure("mean_running_requests", "Mean running requests", 2),
)
BY_DEFAULT: Final = (
    "output_throughput",
    "output_throughput_per_device",
    "request_goodput",
    "slo_attainment",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "target_utilisation",
    "overlapped_draft_share",
    "empty_batch_share",
)
OVER_LOAD: Final = ("output_throughput", "request_goodput", "slo_attainment", "p99_ttft_ms", "mean_tpot_ms")
OF_SLO: Final = ("request_goodput", "slo_attainment")


@cache
def all_names() -> tuple[str, ...]:
    """Every figure of a run that is one number."""
    nothing = MetricsCollector(slo=Slo()).summarize().to_dict()
    return tuple(name for name, value in nothing.items() if isinstance(value, int | float))


def chosen(names: Sequence[str], default: Sequence[str], *, slo: bool) -> list[Figure]:
    """The figures to show.

    Args:
        names: as the user wrote them; none for the default.
        default: names; those that need an SLO are left out without one.
        slo: whether every run has one.

    Raises:
        CommandError: there is no such figure, or it needs an SLO.
    """
    for name in names:
        if name not in all_names():
            near = get_close_matches(name, all_names(), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(all_names())}"
            raise CommandError(f"--metric {name}: no such figure; {hint}")
        if name in OF_SLO and not slo:
            raise CommandError(f"--metric {name}: needs limits to keep; add --goodput ttft:500,tpot:50 (milliseconds)")
    wanted = dict.fromkeys(names) if names else [name for name in default if slo or name not in OF_SLO]
    known = {figure.name: figure for figure in KNOWN}
    return [known.get(name, Figure(name, name)) for name in wanted]

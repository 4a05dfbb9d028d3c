"""Delta and Up as the authors define them (appendix B.3), for every setting and data set (`GainTable`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from minedraft.sim.paper.bench import Bench
from minedraft.sim.paper.calibration import Calibration, gains_with
from minedraft.sim.paper.setup import LONG_PROMPTS, QWEN
from minedraft.sim.paper.trial import Figures, Trial

PUBLISHED: Final = (*QWEN, "S5", "S6", "S7")
"""Settings with published gains."""

CellTrials = dict[tuple[str, int, int], Trial]
"""By mode, k and e."""

SCREEN: Final = 0.10
"""TETRIS variants that lie this far below the best in the runs of the fit (161 requests) aren't tried again."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting on one data set.

    Attributes:
        plain: SD by k.
        psd: MineDraft by (k, e).
    """

    plain: dict[int, Figures]
    psd: dict[tuple[int, int], Figures]

    def throughput_gain(self, k: int, extra: int) -> float:
        """Over plain SD at the same k."""
        return self.psd[k, extra].throughput / self.plain[k].throughput - 1.0

    def time_saved(self, k: int, extra: int) -> float:
        """Share of makespan per request."""
        return 1.0 - self.psd[k, extra].latency_s / self.plain[k].latency_s

    @property
    def best(self) -> tuple[int, int]:
        """The (k, e) of the largest throughput gain."""
        return max(self.psd, key=lambda variant: (self.throughput_gain(*variant), variant))

    @property
    def delta(self) -> float:
        """The largest throughput gain."""
        return self.throughput_gain(*self.best)

    @property
    def delta_latency(self) -> float:
        """The largest share of time saved."""
        return max(self.time_saved(*variant) for variant in self.psd)

    def curve(self) -> dict[int, float]:
        """The best variant's throughput gain by k."""
        gains: dict[int, float] = {}
        for k, extra in self.psd:
            gains[k] = max(gains.get(k, -1.0), self.throughput_gain(k, extra))
        return gains

    @property
    def prompt_share(self) -> float:
        """Time for prompts over time for decoding, in plain SD at the k of the largest gain."""
        return self.plain[self.best[0]].prompt_share


class GainTable:
    """All cells that have figures.

    Args:
        bench: where to run.
        calibration: with what.
        settings: which ones, of `PUBLISHED`.
    """

    def __init__(self, bench: Bench, calibration: Calibration, settings: tuple[str, ...] = PUBLISHED) -> None:
        self.settings = settings
        self.datasets = bench.scale.datasets
        self._bench = bench
        self._calibration = calibration
        self.cells: dict[tuple[str, str], Cell] = {}

    def prepare(self, others: Iterable[Trial] = ()) -> None:
        """Run all cells, with the variants that may be the best ones, beside `others`."""
        cells = {
            (name, dataset): self.trials(name, dataset, self._chosen(name))
            for name in self.settings
            for dataset in self.datasets
        }
        self._bench.prepare([*others, *(trial for made in cells.values() for trial in made.values())], "simulating")
        for key, made in cells.items():
            self.cells[key] = Cell(
                {k: self._bench[trial] for (mode, k, _), trial in made.items() if mode == "sd"},
                {(k, extra): self._bench[trial] for (mode, k, extra), trial in made.items() if mode == "psd"},
            )

    def trials(self, name: str, dataset: str, chosen: list[tuple[int, int]]) -> CellTrials:
        """Of one cell, by mode, k and e."""
        size = self._bench.scale.num_requests(dataset)
        made: CellTrials = {
            ("sd", k, 0): self._calibration.trial(name, dataset, "sd", k, size) for k in self._bench.scale.draft_lengths
        }
        for k, extra in chosen:
            made["psd", k, extra] = self._calibration.trial(name, dataset, "psd", k, size, extra=extra)
        return made

    def _chosen(self, name: str) -> list[tuple[int, int]]:
        """MineDraft alone at every k, and TETRIS where the runs of the fit say that it may be the best."""
        calibration = self._calibration
        bare = calibration.without_host_work()
        gains = gains_with(self._bench, bare, name, calibration.host_row_of(name))
        least = max(gains.values()) - SCREEN
        return [variant for variant, gain in gains.items() if not variant[1] or gain >= least]

    def of(self, name: str) -> dict[str, Cell]:
        """A setting's cells by data set."""
        return {dataset: self.cells[name, dataset] for dataset in self.datasets}

    def by_length(self, name: str) -> tuple[list[Cell], list[Cell]]:
        """A setting's cells with short prompts, and those with long ones."""
        cells = self.of(name)
        short = [cell for dataset, cell in cells.items() if dataset not in LONG_PROMPTS]
        return short, [cell for dataset, cell in cells.items() if dataset in LONG_PROMPTS]

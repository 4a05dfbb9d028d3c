"""Carries out trials, many at a time and none twice (`Bench`), and says how much of the paper to run (`Scale`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from minedraft.sim.paper.setup import DATASETS, DRAFT_LENGTHS, EXTRAS, QWEN, load_prompts
from minedraft.sim.paper.trial import Figures, Trial, run

RunAll = Callable[[Sequence[Trial], str], list[Figures]]
"""Figures of trials, in their order; the text says what it is about, for a progress bar."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to run.

    Attributes:
        name: full or quick.
        datasets: of the four.
        draft_lengths: values of k over which the largest gain is looked for.
        extras: values of TETRIS's e; 0 is MineDraft alone.
        most_requests: of a data set; the paper has 1000, and 161 for Spec-Bench.
        sweep_requests: where m or the number of samples varies, or CUDA graphs are tried.
        long_requests: where the length of the run matters; the paper's 1000.
        identities: settings and k for which a closed form is simulated.
        samples: values of n.
    """

    name: str
    datasets: tuple[str, ...] = DATASETS
    draft_lengths: tuple[int, ...] = DRAFT_LENGTHS
    extras: tuple[int, ...] = EXTRAS
    most_requests: int = 1000
    sweep_requests: int = 1000
    long_requests: int = 1000
    identities: tuple[tuple[str, int], ...] = tuple((name, k) for name in QWEN for k in (3, 4))
    samples: tuple[int, ...] = (1, 2, 3)

    def num_requests(self, dataset: str) -> int:
        """Prompts of a data set."""
        return min(self.most_requests, load_prompts(dataset).num_requests)


FULL: Final = Scale("full")
QUICK: Final = Scale(
    "quick",
    datasets=("arena", "spec-bench"),
    draft_lengths=(2, 3, 5),
    extras=(0,),
    most_requests=240,
    sweep_requests=240,
    long_requests=500,
    identities=(("S2", 3),),
    samples=(1, 2),
)


def one_by_one(trials: Sequence[Trial], label: str) -> list[Figures]:
    """A `RunAll` in this process, without a word."""
    return [run(trial) for trial in trials]


class Bench:
    """Figures of trials by trial.

    Args:
        scale: how much to run.
        run_all: carries trials out.
    """

    def __init__(self, scale: Scale, run_all: RunAll = one_by_one) -> None:
        self.scale = scale
        self._run_all = run_all
        self._found: dict[Trial, Figures] = {}

    def prepare(self, trials: Iterable[Trial], label: str) -> None:
        """Carry out those that haven't been, together."""
        missing = [trial for trial in dict.fromkeys(trials) if trial not in self._found]
        # Long ones first, so that no processor is left with one at the end.
        missing.sort(key=_work, reverse=True)
        if missing:
            self._found.update(zip(missing, self._run_all(missing, label), strict=True))

    def __getitem__(self, trial: Trial) -> Figures:
        """Of one trial, carried out now if it hasn't been."""
        if trial not in self._found:
            self.prepare([trial], trial.setting)
        return self._found[trial]

    @property
    def num_trials(self) -> int:
        """Carried out so far."""
        return len(self._found)

    def items(self) -> list[tuple[Trial, Figures]]:
        """All of them, in an order that doesn't depend on how they were carried out."""
        return sorted(self._found.items(), key=lambda item: repr(item[0]))


def _work(trial: Trial) -> tuple[float, str]:
    return trial.num_requests * trial.output_len * (1.0 + 0.5 * min(1, trial.extra)), repr(trial)

"""What a setting of the paper is here: models, GPUs, requests (`Setting`, `PromptSet`), read from `data/paper.toml`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from minedraft.sim.presets import read_presets

OUTPUT_LEN: Final = 256  # "256 output tokens, ignore EOS" (section 6.1)
DRAFT_LENGTHS: Final = (1, 2, 3, 4, 5)
EXTRAS: Final = (0, 1, 2, 3)  # MineDraft alone, and with TETRIS and e = 1, 2, 3 drafts more than are verified
TARGET_DEVICES: Final = 4
DRAFT_DEVICES: Final = 1
QWEN: Final = ("S1", "S2", "S3")
DATASETS: Final = ("arena", "sharegpt", "spec-bench", "tough")
LONG_PROMPTS: Final = ("sharegpt", "spec-bench")
SHORT_PROMPTS: Final = ("arena", "tough")


@dataclass(frozen=True, slots=True)
class Setting:
    """Models and GPUs of one of the paper's settings.

    Attributes:
        name: S1 to S8, in the order of the paper's sections.
        target: a preset of `data/models.toml`, on four GPUs.
        draft: another, on one.
        gpu: a preset of `data/gpus.toml`.
        batch_size: m, requests per verification.
        nsight: stage times are published (Fig. 25); else they are a roofline's, in eager mode.
    """

    name: str
    target: str
    draft: str
    gpu: str
    batch_size: int
    nsight: bool

    @property
    def has_head(self) -> bool:
        """Whether the drafter is an EAGLE head."""
        return self.draft.startswith("eagle")


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompt lengths of a data set: lognormal, cut (not clipped) to a range; a `minedraft.sim.workload.Lengths`.

    Attributes:
        num_requests: prompts in the paper's run.
        mean: tokens, before the cut.
        sigma: standard deviation of the logarithm.
        least: tokens of the shortest prompt kept.
        most: of the longest.
        about: where this comes from.
    """

    num_requests: int
    mean: float
    sigma: float
    least: int
    most: int
    about: str

    def values(self, rng: np.random.Generator) -> Iterator[int]:
        """Lengths, without end."""
        mu = math.log(self.mean) - self.sigma**2 / 2.0
        while True:
            drawn = np.rint(rng.lognormal(mu, self.sigma, 4096))
            yield from map(int, drawn[(drawn >= self.least) & (drawn <= self.most)])


def paper() -> Mapping[str, Any]:
    """All of `data/paper.toml`."""
    return read_presets("paper.toml")


@cache
def load_setting(name: str) -> Setting:
    """A setting by name."""
    return Setting(name, **paper()["settings"][name])


@cache
def load_prompts(name: str) -> PromptSet:
    """A data set by name."""
    return PromptSet(**paper()["datasets"][name])


def published_gain(setting: str, metric: str, dataset: str) -> float:
    """A cell of Figs. 3, 4, 9 to 12, in percent; `metric` is throughput_delta, latency_up and so on."""
    value: float = paper()["gains"][setting][metric][dataset]
    return value


def published(name: str) -> float:
    """One of the paper's other numbers."""
    value: float = paper()["numbers"][name]
    return value

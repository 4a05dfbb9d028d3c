"""Lengths of several kinds of requests in one stream (`MixtureLength`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from minedraft.sim.workload import Lengths

_CHUNK: Final = 1024  # draws per call into numpy


@dataclass(frozen=True, slots=True)
class MixtureLength:
    """Each length comes from one of several distributions, chosen at random: short chats among long documents, say.

    Prompt and output lengths are drawn independently: a long prompt says nothing of its answer.

    Attributes:
        parts: distributions, each with its weight: how often it is chosen, relative to the others; above 0.

    Raises:
        ValueError: no parts, or a weight that is not positive and finite.
    """

    parts: tuple[tuple[float, Lengths], ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("MixtureLength.parts is empty; give at least one")
        for i, (weight, _) in enumerate(self.parts):
            if not 0.0 < weight < math.inf:
                raise ValueError(f"MixtureLength.parts[{i}] is weighted {weight}; a weight must be finite and > 0")

    def values(self, rng: np.random.Generator) -> Iterator[int]:
        """See `minedraft.sim.workload.Lengths`. The choice and every part have random numbers of their own."""
        of_choice, *of_parts = rng.spawn(1 + len(self.parts))
        streams = [lengths.values(stream) for (_, lengths), stream in zip(self.parts, of_parts, strict=True)]
        weights = np.array([weight for weight, _ in self.parts])
        ends = weights.cumsum() / weights.sum()
        ends[-1] = 1.0  # whatever the rounding
        while True:
            for place in np.searchsorted(ends, of_choice.random(_CHUNK), side="right").tolist():
                yield next(streams[place])

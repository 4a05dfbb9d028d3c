"""Published acceptance of real drafters, by name: `data/acceptance.toml`.

Where rates per draft were published, or lengths for every k, these are used as they are, for any k up to theirs. Where
there is one length for one k, a constant rate is fitted that yields it at that k; for a smaller k that is a model. (Of
EAGLE-1 on Llama-3-8B it says 1.84 tokens at k = 2, fitted at k = 4, where 1.89 were measured.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from minedraft.sim.acceptance import SyntheticRates
from minedraft.sim.presets import offer, read_presets


@dataclass(frozen=True, slots=True)
class AcceptancePreset:
    """What was published of a target and its drafter.

    Attributes:
        name: of the preset.
        source: where the figures come from.
        setting: models, data and sampling.
        rates: unconditional, per draft; as many as were published, or fitted.
    """

    name: str
    source: str
    setting: str
    rates: tuple[float, ...]

    def build(self, num_speculative_tokens: int, *, seed: int = 0) -> SyntheticRates:
        """The acceptance model.

        Raises:
            ValueError: more drafts than the published figures are for.
        """
        if num_speculative_tokens > len(self.rates):
            raise ValueError(
                f"name is {self.name!r}, whose figures are for up to {len(self.rates)} speculative tokens, not "
                f"{num_speculative_tokens}; lower scheduler.num_speculative_tokens, or give rates of your own"
            )
        return SyntheticRates(self.rates, seed=seed)


def load_acceptance(name: str) -> AcceptancePreset:
    """A preset.

    Raises:
        ValueError: there is none of that name; near matches are offered.
    """
    presets = read_presets("acceptance.toml")
    entry = presets.get(name.lower())
    if entry is None:
        raise ValueError(f"name is {name!r}, which is no acceptance preset; {offer(name, presets)}")
    return AcceptancePreset(name.lower(), entry["source"], entry["setting"], _rates_of(entry))


def _rates_of(entry: Mapping[str, Any]) -> tuple[float, ...]:
    """Unconditional rates per draft, whatever was published."""
    if "length" in entry:
        return _constant_rates(entry["length"], entry["num_draft"])
    read: Mapping[str, Callable[[Sequence[float]], Sequence[float]]] = {
        "rates": tuple,
        "conditional": lambda rates: list(accumulate(rates, lambda before, rate: before * rate)),
        # Lengths have two decimals, which is what is left of a difference once rounding noise is gone.
        "lengths": lambda lengths: [round(after - before, 2) for before, after in pairwise((1.0, *lengths))],
    }
    key = next(key for key in read if key in entry)
    return tuple(read[key](entry[key]))


def _constant_rates(length: float, num_draft: int) -> tuple[float, ...]:
    """alpha, alpha^2, … up to the power `num_draft` with 1 + their sum = `length`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):  # to the last bit
        alpha = (low + high) / 2.0
        if sum(alpha**i for i in range(num_draft + 1)) < length:
            low = alpha
        else:
            high = alpha
    return tuple([high**i for i in range(1, num_draft + 1)])

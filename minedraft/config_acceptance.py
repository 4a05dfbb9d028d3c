"""`[acceptance]`: how many drafts are accepted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from minedraft.config_base import Table, building, with_kind


class AcceptanceTable(Table):
    """What all acceptance models share: `draft_probs` reports their rates to selection policies."""

    draft_probs: bool = False

    def arguments(self) -> dict[str, Any]:
        """See `Table`; `draft_probs` is the world's."""
        return {name: value for name, value in super().arguments().items() if name != "draft_probs"}


class SyntheticAcceptanceTable(AcceptanceTable):
    """vLLM's two settings, of which exactly one is given."""

    kind: Literal["synthetic"]
    synthetic_acceptance_rates: Annotated[tuple[float, ...] | None, Field(strict=False)] = None
    synthetic_acceptance_length: float | None = None

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import SyntheticLength, SyntheticRates

        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if (rates is None) == (length is None):
            raise ValueError("give exactly one of synthetic_acceptance_rates and synthetic_acceptance_length")
        if length is not None:
            return SyntheticLength(length, max(1, num_speculative_tokens), seed=seed)
        assert rates is not None
        if len(rates) < num_speculative_tokens:
            raise ValueError(
                f"synthetic_acceptance_rates is a list of {len(rates)} for scheduler.num_speculative_tokens = "
                f"{num_speculative_tokens}; give one rate per speculative token"
            )
        return SyntheticRates(rates, seed=seed)


class ConstantAcceptanceTable(AcceptanceTable):
    """See `minedraft.sim.acceptance.ConstantRate`."""

    kind: Literal["constant"] = "constant"
    alpha: float = 0.7

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import ConstantRate

        return ConstantRate(self.alpha, seed=seed)


class BetaAcceptanceTable(AcceptanceTable):
    """See `minedraft.sim.acceptance.BetaRate`."""

    kind: Literal["beta"]
    mean: float
    concentration: float

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import BetaRate

        return BetaRate(self.mean, self.concentration, seed=seed)


class RisingAcceptanceTable(AcceptanceTable):
    """See `minedraft.sim.acceptance.RisingRate`."""

    kind: Literal["rising"]
    first: float
    limit: float
    rise: float = 0.5

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import RisingRate

        return RisingRate(self.first, self.limit, self.rise, seed=seed)


class PresetAcceptanceTable(AcceptanceTable):
    """Published figures of a real drafter, see `minedraft.sim.acceptance_presets`."""

    kind: Literal["preset"]
    name: str

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance_presets import load_acceptance

        return load_acceptance(self.name).build(num_speculative_tokens, seed=seed)


class LogAcceptanceTable(AcceptanceTable):
    """A recorded log or journal, see `minedraft.sim.acceptance_log` and `minedraft.sim.acceptance_replay`.

    Attributes:
        path: of the file, relative to the configuration's.
        by_id: each request replays the recorded one of its own id, instead of one drawn by lot.
    """

    kind: Literal["log"]
    path: str
    by_id: bool = False

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance_log import read_acceptance_log
        from minedraft.sim.acceptance_replay import LoggedAcceptance

        with building("acceptance.path"):
            requests = read_acceptance_log(self.path)
        return LoggedAcceptance(requests, by_id=self.by_id, seed=seed)


Acceptance = Annotated[
    SyntheticAcceptanceTable
    | ConstantAcceptanceTable
    | BetaAcceptanceTable
    | RisingAcceptanceTable
    | PresetAcceptanceTable
    | LogAcceptanceTable,
    Field(discriminator="kind"),
    with_kind(
        "constant",
        synthetic_acceptance_rates="synthetic",
        synthetic_acceptance_length="synthetic",
        mean="beta",
        concentration="beta",
        first="rising",
        limit="rising",
        name="preset",
        path="log",
    ),
]

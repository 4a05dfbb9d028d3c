"""`[drafting]` and `[link]`: who drafts and how, and what joins the drafter's devices to the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from minedraft.config_base import StepSeconds, Table, building, shorthand
from minedraft.config_cost import Cost, GpuCostTable, GpuGroupTable, PaperCostTable, StepCostTable
from minedraft.config_messages import FieldError

PAPERS_VOCABULARY = 151936
"""Of Qwen3-32B, the target of kind "paper"."""


class DraftingTable(Table):
    """See `minedraft.sim.methods`.

    Attributes:
        method: how drafts come about, by vLLM's names; left out, it is what `cost.draft.model` is made for.
        parallel_drafting: all k tokens in one pass.
        lookup_s: "ngram" only, see `minedraft.sim.methods.LookupCost`, as for the next one.
        lookup_per_context_token_s: "ngram" only.
        match_rate: "ngram" only, chance that a lookup finds anything; left out, it always does.
    """

    method: Literal["draft_model", "eagle", "eagle3", "mtp", "ngram"] | None = None
    parallel_drafting: bool = False
    lookup_s: StepSeconds | None = None
    lookup_per_context_token_s: StepSeconds | None = None
    match_rate: float | None = None

    @property
    def on_host(self) -> bool:
        """Whether there is no drafter's device and no draft KV."""
        return self.method == "ngram"

    def build(self, cost: Cost) -> Any:
        """The `DraftingMethod`, checked against what the cost model says of the drafter.

        Raises:
            FieldError: they don't fit.
        """
        from minedraft.sim.methods import METHODS, method_of

        drafter, target = _shape(cost, "draft"), _shape(cost, "target")
        if self.method is not None:
            method = METHODS[self.method]
        else:
            method = METHODS["draft_model"] if drafter is None else method_of(drafter)
        self._check(method, cost)
        if drafter is not None and target is not None and not method.on_host:
            _check_drafter(method, target, drafter)
        return method

    def limits(self, cost: Cost) -> dict[str, Any]:
        """Fields of `SchedulerConfig` that follow from the method."""
        if self.on_host:
            return {"num_draft_blocks": 0, "draft_keeps_kv": False, "draft_follows_target": True}
        return {"draft_follows_target": True} if self.build(cost).is_head else {}

    def _check(self, method: Any, cost: Cost) -> None:
        names = ("lookup_s", "lookup_per_context_token_s", "match_rate")
        lookups = [name for name in names if getattr(self, name) is not None]
        if lookups and not method.on_host:
            raise FieldError(
                f"drafting.{lookups[0]}", f'is given, but method is {method.name!r}; set method = "ngram", or remove it'
            )
        if self.parallel_drafting and method.on_host:
            raise FieldError("drafting.parallel_drafting", 'is true, but method "ngram" has no passes; remove it')
        if isinstance(cost, PaperCostTable) and not method.on_host and (method.is_head or self.parallel_drafting):
            field, value = ("parallel_drafting", "true") if self.parallel_drafting else ("method", repr(method.name))
            raise FieldError(
                f"drafting.{field}",
                f'is {value}, but cost kind "paper" has times of draft models in k passes only; use kind "roofline"',
            )

    def build_cost(self, cost: Cost) -> Any:
        """The `CostModel` of a run that drafts like this."""
        from minedraft.sim.methods import LookupCost, in_one_pass

        method = self.build(cost)
        if method.on_host:
            with building("drafting"):
                return LookupCost(without_drafter(cost).build(), **self._lookup())
        model = cost.build(fuses_once=method.name == "eagle3") if isinstance(cost, GpuCostTable) else cost.build()
        return in_one_pass(model) if self.parallel_drafting else model

    def build_num_drafted(self, seed: int) -> Any:
        """What a drafter comes up with, for `SimBackend`; None for all that it is asked for."""
        from minedraft.sim.methods import LookupMatches

        if self.match_rate is None:
            return None
        with building("drafting"):
            return LookupMatches(self.match_rate, seed)

    def _lookup(self) -> dict[str, float]:
        given = {name: getattr(self, name) for name in ("lookup_s", "lookup_per_context_token_s")}
        return {name: value for name, value in given.items() if value is not None}


def without_drafter(cost: Cost) -> Cost:
    """The same table without its drafter, so that the target has its devices for itself."""
    return cost.model_copy(update={"draft": None}) if isinstance(cost, StepCostTable) else cost


def _shape(cost: Cost, group: Literal["target", "draft"]) -> Any:
    """The `ModelShape` of a group; None if the cost model doesn't know."""
    table = getattr(cost, group, None)
    return table.build_shape(f"cost.{group}") if isinstance(table, GpuGroupTable) else None


def _check_drafter(method: Any, target: Any, drafter: Any) -> None:
    from minedraft.sim.methods import check_drafter

    with building("cost.draft"):
        check_drafter(method, target, drafter)


class LinkTable(Table):
    """See `minedraft.sim.links`.

    Attributes:
        preset: a key of `sim/data/links.toml`.
        latency_s: instead of the preset's.
        bytes_per_s: what large messages reach in one direction, instead of the preset's.
        payload: what is sent, and so where the scheduler and the rejection sampling are.
        vocab_size: of the target, where the cost model doesn't know it.
        draft_vocab_size: of the drafter, likewise.
        hidden_size: of the target, likewise.
    """

    preset: str | None = None
    latency_s: StepSeconds | None = None
    bytes_per_s: float | None = None
    payload: Literal["token_ids", "draft_probs", "target_probs"] = "token_ids"
    vocab_size: int | None = Field(default=None, ge=1)
    draft_vocab_size: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=1)

    def build(self, cost: Cost, method: Any) -> Any:
        """The `Traffic`; `method` is the `DraftingMethod`.

        Raises:
            FieldError: a size is missing, or the link isn't whole.
        """
        from minedraft.sim.links import Traffic

        target, drafter = _shape(cost, "target"), _shape(cost, "draft")
        vocab_size = self.vocab_size or (target.vocab_size if target else 0)
        if isinstance(cost, PaperCostTable):
            vocab_size = vocab_size or PAPERS_VOCABULARY
        if self.payload != "token_ids" and not vocab_size:
            raise FieldError(
                "link.vocab_size", f'is missing; payload "{self.payload}" sends a number per entry, such as 151936'
            )
        state_size = self._state_size(method, target)
        draft_vocab_size = self.draft_vocab_size
        if draft_vocab_size is None:
            draft_vocab_size = (drafter.head_vocab_size or drafter.vocab_size) if drafter else 0
        return Traffic(self._build_link(), self.payload, vocab_size, draft_vocab_size, state_size)

    def _state_size(self, method: Any, target: Any) -> int:
        if not method.is_head:
            return 0
        hidden_size = self.hidden_size or (target.hidden_size if target else 0)
        if not hidden_size:
            raise FieldError(
                "link.hidden_size",
                f"is missing; {method.name!r} reads hidden states of the target: add hidden_size = 5120",
            )
        return int(method.num_states * hidden_size)

    def _build_link(self) -> Any:
        from minedraft.sim.links import Link, load_link

        if self.bytes_per_s is not None and self.bytes_per_s < 1.0:
            raise FieldError("link.bytes_per_s", f"is {self.bytes_per_s:g}, must be >= 1, such as 25e9")
        if self.preset is None and (self.latency_s is None or self.bytes_per_s is None):
            missing = "bytes_per_s" if self.bytes_per_s is None and self.latency_s is not None else "preset"
            remedy = "give a preset" if missing == "preset" else "add it"
            raise FieldError(f"link.{missing}", f'is missing; {remedy}, or write link = "pcie4-x16"')
        with building("link.preset"):
            link = Link(0.0, 1.0) if self.preset is None else load_link(self.preset)
        if self.latency_s is not None:
            link = replace(link, latency_s=self.latency_s)
        if self.bytes_per_s is not None:
            link = replace(link, peak_bytes_per_s=self.bytes_per_s, efficiency=1.0)
        return link


Link = Annotated[LinkTable | None, shorthand("preset", (str,))]


def check_place(mode: str, drafting: DraftingTable, link: LinkTable | None, cost: Cost, *, world: bool) -> None:
    """Refuse drafting methods and links where they mean nothing.

    Args:
        mode: of the run.
        drafting: the table.
        link: the table.
        cost: the table.
        world: the run is simulated.

    Raises:
        FieldError: a table is given that nobody would heed.
    """
    if not world:
        given = "drafting" if drafting.model_fields_set else "link" if link is not None else ""
        if given:
            raise FieldError(given, "is of the simulated world only; remove it")
    elif mode.startswith("pearl"):
        if link is not None:
            raise FieldError("link", f"isn't modelled in mode {mode}; remove it")
        method = drafting.build(cost)
        if method.on_host or method.is_head:
            why = (
                "a head reads the states that the verification yields"
                if method.is_head
                else "it has no device to do so"
            )
            raise FieldError(
                "drafting.method", f"is {method.name!r}, which can't draft during verification: {why}; use mode psd"
            )

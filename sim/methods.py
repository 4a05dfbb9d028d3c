"""Drafting methods: what each asks of devices, links and the draft's KV, and how it changes a cost model.

| method | a pass of | passes for k tokens | KV | reads of the target |
|---|---|---|---|---|
| `draft_model` | a small model | k | its own | token ids |
| `eagle` | one layer and the target's output head | k | of one layer | ids, last hidden state |
| `eagle3` | one layer and an output head of its own | k | of one layer | ids, three hidden states |
| `mtp` | one layer and the target's output head | k | of one layer | ids, last hidden state |
| `ngram` | nothing: a lookup on the host's CPU | none | none | token ids |

With *parallel drafting* a model or head is trained to fill k - 1 mask tokens, so that all k tokens come out of one pass
that is k - 1 tokens wider (PARD, arXiv 2504.18583, from a draft model; P-EAGLE from a head; vLLM calls it so too).

A head reads the target's states, so it can't ingest a prompt before the target has computed it, and with devices of its
own it waits for the states to arrive (`minedraft.sim.links`). EAGLE: arXiv 2401.15077; EAGLE-3: arXiv 2503.01840; MTP
modules that run one after another are priced as EAGLE heads are.

Left out: trees (all drafts are chains), and the accepted drafts that a head runs over again with the target's states in
its first pass, at most k more rows of it.

How well a method guesses is the acceptance model's business; published rates of several are presets there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import compress
from operator import add, mul
from typing import Final

from minedraft.request import RequestId
from minedraft.sim.cost import ConstantCost, CostModel, LinearCost
from minedraft.sim.models import ModelShape
from minedraft.sim.presets import read_presets
from minedraft.sim.steps import CostError, StepCost
from minedraft.work import DraftWork, VerifyWork


@dataclass(frozen=True, slots=True)
class DraftingMethod:
    """One row of the module's table.

    Attributes:
        name: as in vLLM's `speculative_config`.
        num_fused_inputs: vectors that a head's projection joins into one; 0 for a whole model.
        num_states: hidden states of the target per position that it reads.
        on_host: it runs on the host's CPU and keeps no KV.
    """

    name: str
    num_fused_inputs: int = 0
    num_states: int = 0
    on_host: bool = False

    @property
    def is_head(self) -> bool:
        """Whether it reads the target's hidden states."""
        return self.num_states > 0


METHODS: Final[Mapping[str, DraftingMethod]] = {
    "draft_model": DraftingMethod("draft_model"),
    "eagle": DraftingMethod("eagle", num_fused_inputs=2, num_states=1),
    "eagle3": DraftingMethod("eagle3", num_fused_inputs=3, num_states=3),
    "mtp": DraftingMethod("mtp", num_fused_inputs=2, num_states=1),
    "ngram": DraftingMethod("ngram", on_host=True),
}


def method_of(shape: ModelShape) -> DraftingMethod:
    """The method that a drafter's shape is made for.

    Raises:
        ValueError: there is none.
    """
    for method in METHODS.values():
        if method.num_fused_inputs == shape.num_fused_inputs:
            return method
    raise ValueError(
        f"num_fused_inputs is {shape.num_fused_inputs}, which no drafting method has; known are 0, 2 and 3"
    )


def check_drafter(method: DraftingMethod, target: ModelShape, draft: ModelShape) -> None:
    """Whether a drafter is what a method needs, and a head is its target's.

    Raises:
        ValueError: it isn't; the message says what would do.
    """
    if draft.num_fused_inputs != method.num_fused_inputs:
        what = "a whole model" if not draft.num_fused_inputs else f"a head of the kind {method_of(draft).name!r}"
        heads = ", ".join(repr(name) for name in heads_for(target, method)) if method.is_head else ""
        remedy = f"take {heads}, or " if heads else ""
        raise ValueError(
            f"model is {draft.name!r}, {what}, but drafting.method is {method.name!r}; "
            f"{remedy}set drafting.method = {method_of(draft).name!r}"
        )
    if method.is_head and draft.state_size != method.num_states * target.hidden_size:
        heads = ", ".join(repr(name) for name in heads_for(target, method))
        raise ValueError(
            f"model is {draft.name!r}, which reads states of {draft.state_size // method.num_states} numbers, but "
            f"{target.name!r} has {target.hidden_size}; take a head of its own{f', such as {heads}' if heads else ''}"
        )


def heads_for(target: ModelShape, method: DraftingMethod) -> tuple[str, ...]:
    """Names of the preset heads for a target, known by their names."""
    names = read_presets("models.toml")
    family = {name for name in names if target.name.startswith(name)}
    return tuple(
        name
        for name, entry in names.items()
        if entry.get("num_fused_inputs") == method.num_fused_inputs and name.partition("-")[2] in family
    )


# --- all k tokens in one pass


class OnePassConstantCost(ConstantCost):
    """`ConstantCost` with one pass however many tokens are drafted: t = draft_base_s + draft_per_token_s."""

    __slots__ = ()

    def draft_s(self, work: DraftWork) -> float:
        """See the class docstring."""
        return self.draft_base_s + self.draft_per_token_s if any(work.num_draft) else self.draft_ingest_s


class OnePassLinearCost(LinearCost):
    """`LinearCost` with one `draft_base_s`, and each context read once; the tokens cost what they did."""

    __slots__ = ()

    def draft_s(self, work: DraftWork) -> float:
        """See the class docstring."""
        num_draft = work.num_draft
        if not any(num_draft):
            return super().draft_s(work)
        num_ingesting = num_draft.count(0)
        return (
            self.draft_base_s
            + (self.draft_per_seq_s + self.draft_per_token_s) * sum(num_draft)
            + self.draft_per_context_token_s * sum(compress(work.num_computed, num_draft))
            + self.draft_prefill_per_seq_s * num_ingesting
            + self.draft_prefill_per_token_s * (sum(work.num_new) - len(num_draft) + num_ingesting)
        )


class OnePassStepCost(StepCost):
    """`StepCost` with one pass of the drafter: k - 1 mask tokens behind the new ones, and k logits."""

    __slots__ = ()

    def draft_s(self, work: DraftWork) -> float:
        """See the class docstring."""
        if self.drafter is None:
            raise CostError("cost.draft: is missing, and a drafter is asked for; add [cost.draft], or run with mode ar")
        num_seqs = len(work.num_new)
        if not num_seqs:
            return 0.0
        masks = tuple([k - 1 if k else 0 for k in work.num_draft])
        widths = tuple(map(add, work.num_new, masks))
        num_pairs = sum(map(mul, widths, work.num_computed)) + (sum(map(mul, widths, widths)) + sum(widths)) / 2
        return self.drafter.step_s(num_seqs, sum(widths), sum(work.num_computed), num_pairs, sum(work.num_draft))


def in_one_pass(cost: CostModel) -> CostModel:
    """The same cost model under parallel drafting.

    Raises:
        ValueError: it isn't one of `ConstantCost`, `LinearCost` and `StepCost`.
    """
    if isinstance(cost, ConstantCost):
        return OnePassConstantCost(**asdict(cost))
    if isinstance(cost, LinearCost):
        return OnePassLinearCost(**asdict(cost))
    if isinstance(cost, StepCost):
        return OnePassStepCost(cost.target, cost.drafter)
    raise ValueError(f"a {type(cost).__name__} can't draft in one pass; its draft_s must say so by itself")


# --- prompt lookup


@dataclass(frozen=True, slots=True)
class LookupCost:
    """Prompt lookup (n-gram drafting): the target's cost model, and a search of each request's own tokens on the host.

    The defaults are vLLM 0.32's compiled lookup (n-grams of 2 to 4 tokens), measured by us on one core of an AMD EPYC
    at 2.4 GHz: 1.2 us with 256 tokens, 2.2 us with 1024, 6.1 us with 4096, 11.7 us with 8192.

    Attributes:
        verifier: prices verifications.
        lookup_s: seconds per request that is drafted.
        lookup_per_context_token_s: seconds per token of its context.

    Raises:
        ValueError: a figure is negative, infinite or NaN.
    """

    verifier: CostModel
    lookup_s: float = 0.9e-6
    lookup_per_context_token_s: float = 1.3e-9

    def __post_init__(self) -> None:
        for name in ("lookup_s", "lookup_per_context_token_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"LookupCost.{name} is {getattr(self, name)}, must be a finite number of seconds >= 0")

    def verify_s(self, work: VerifyWork) -> float:
        """The target's."""
        return self.verifier.verify_s(work)

    def draft_s(self, work: DraftWork) -> float:
        """One search per drafted request, one after another."""
        context: int = sum(compress(map(add, work.num_computed, work.num_new), work.num_draft))
        num_searches = len(work.num_draft) - work.num_draft.count(0)
        return self.lookup_s * num_searches + self.lookup_per_context_token_s * context


@dataclass(frozen=True, slots=True)
class LookupMatches:
    """Which lookups find anything: each with the same chance, the others draft nothing in their round.

    A lookup's luck depends on the seed, the request and its number of tokens alone. With matches modelled here, the
    acceptance model is to say how good a draft is that was found; else it says how good a round is.

    Attributes:
        rate: chance of a match.
        seed: of the matches.

    Raises:
        ValueError: the rate is outside [0, 1].
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"match_rate is {self.rate}, must be in [0, 1]")

    def __call__(self, work: DraftWork) -> tuple[int, ...]:
        """Tokens drafted per entry: all that were asked for, or none."""
        columns = zip(work.request_ids, work.num_computed, work.num_new, work.num_draft, strict=True)
        return tuple([k if k and self._finds(name, computed + new) else 0 for name, computed, new, k in columns])

    def _finds(self, request_id: RequestId, num_tokens: int) -> bool:
        key = f"{self.seed}/lookup/{num_tokens}/{request_id}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") < self.rate * 2.0**64

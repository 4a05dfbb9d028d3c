"""What a policy is: seven one-method protocols, the values they exchange, the bundle, and lookup by name.

Law of policies: a policy *decides*, it never mutates. Its arguments are read-only views, its answer is checked by the
scheduler before anything is done with it (`PolicyError` if it is illegal). It is deterministic given what it sees and
its own seed, sees nothing of the future (no true output length, no coming acceptance), and is quick: it runs between
two steps of the target.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import metadata
from typing import Any, Final, NamedTuple, Protocol

from minedraft.batch import BatchView
from minedraft.sequence import SequenceView


class PolicyError(Exception):
    """A policy returned an illegal decision, or raised; the message names slot, policy and fault."""

    @property
    def slot(self) -> str:
        """Whose decision it was: every message begins with it."""
        return str(self).partition(" policy")[0]


class Mode(enum.StrEnum):
    """How the two device groups share the work."""

    AR = "ar"  # autoregressive: one batch, no drafts
    SD = "sd"  # sequential speculative decoding: one batch, draft then verify
    PSD = "psd"  # batch-parallel: N >= 2 batches, drafting of one hides behind verification of another


class PreemptionMode(enum.StrEnum):
    """What a victim loses."""

    RECOMPUTE = "recompute"  # all KV in both pools; it waits for re-admission
    DROP_DRAFT_KV = "drop-draft-kv"  # its draft KV only: costs speed, never text; frees draft blocks only


class Victim(NamedTuple):
    """A preemption policy's choice."""

    seq: SequenceView
    mode: PreemptionMode


class KVNeed(NamedTuple):
    """Why a victim is wanted.

    Attributes:
        pool: "target" or "draft".
        num_blocks: blocks that are missing.
        block_size: tokens per block of that pool.
        seq: for whom.
    """

    pool: str
    num_blocks: int
    block_size: int
    seq: SequenceView


class Move(NamedTuple):
    """A rebalancing decision: a member of an IDLE batch goes to another batch."""

    seq: SequenceView
    to_batch: int


class Draft(NamedTuple):
    """A request's drafts before selection.

    Attributes:
        seq: whose.
        num_drafted: how many.
        probs: the drafter's probability of each drafted token; empty if the world has none.
    """

    seq: SequenceView
    num_drafted: int
    probs: tuple[float, ...]


class LoadView(Protocol):
    """The whole system in numbers, as of now."""

    @property
    def now_s(self) -> float:
        """Time of the decision, seconds on the backend's clock."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait, preempted ones included."""
        ...

    @property
    def num_running(self) -> int:
        """Requests in a sub-batch."""
        ...

    @property
    def mode(self) -> Mode:
        """Mode in force."""
        ...

    @property
    def drafter_up(self) -> bool:
        """Whether a drafter is there."""
        ...

    @property
    def num_free_target_blocks(self) -> int:
        """Free blocks of the target pool."""
        ...

    @property
    def num_free_draft_blocks(self) -> int:
        """Free blocks of the draft pool; 0 if there is none."""
        ...

    @property
    def num_rounds(self) -> int:
        """Verifications done, counted per request and only where drafts were verified."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified so far."""
        ...

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted so far."""
        ...


class AdmissionPolicy(Protocol):
    """Who is admitted first."""

    def rank(self, seq: SequenceView) -> float | tuple[float, ...]:
        """Sort key of a waiting request; the smaller goes first.

        Asked once when the request arrives and once after each preemption, so that ordering the queue costs
        O(log n) per request instead of O(n) per step. Ties: preempted before never-started, then arrival order.
        """
        ...


class AssignmentPolicy(Protocol):
    """Which sub-batch a request joins."""

    def choose_batch(self, seq: SequenceView, batches: Sequence[BatchView]) -> int:
        """Position in `batches` (never empty) of one that `has_room`; at least one has."""
        ...


class RebalancePolicy(Protocol):
    """Who changes sub-batch."""

    def moves(self, batches: Sequence[BatchView]) -> Sequence[Move]:
        """Moves of members of IDLE batches; `Move.to_batch` is a position in `batches`. Mostly empty."""
        ...


class DraftLengthPolicy(Protocol):
    """How much to draft.

    A policy whose answer is the same for all requests of a batch may also have the method
    `num_draft_tokens_of_all(batch, load) -> int`; the scheduler then asks once per batch instead of once per request,
    which makes rounds several times cheaper (see `minedraft.steady`). It must give what `num_draft_tokens` would, or
    more than that wherever this is a request's own bound. A subclass that overrides the one overrides the other too.
    """

    def num_draft_tokens(self, seq: SequenceView, batch: BatchView, load: LoadView) -> int:
        """Wanted k >= 0 for this request in this round; the scheduler cuts it to what limits allow."""
        ...


class SelectionPolicy(Protocol):
    """Which drafts are verified.

    A policy that always keeps everything may set `keeps_all = True`, which spares building its arguments. One that has
    nothing to choose unless `SchedulerConfig.draft_capacity` is given may set `needs_capacity = True`: configurations
    without are refused.
    """

    keeps_all: bool

    def select(self, drafts: Sequence[Draft], capacity: int) -> Sequence[int]:
        """How many of each request's drafts to verify, from the front; the sum may not exceed `capacity`."""
        ...


class PreemptionPolicy(Protocol):
    """Who gives way when a pool is short."""

    def choose_victim(self, candidates: Sequence[SequenceView], need: KVNeed) -> Victim:
        """One of `candidates` (never empty, in order of arrival) and what it loses."""
        ...


class ModePolicy(Protocol):
    """How the device groups share the work from now on."""

    def choose_mode(self, load: LoadView) -> Mode:
        """Asked before every scheduling decision; must be cheap, and slow to change its mind."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy per slot."""

    admission: AdmissionPolicy
    assignment: AssignmentPolicy
    rebalance: RebalancePolicy
    draft_length: DraftLengthPolicy
    selection: SelectionPolicy
    preemption: PreemptionPolicy
    mode: ModePolicy

    @property
    def keeps_all(self) -> bool:
        """Whether the selection has said that it keeps everything, so that nobody need work out what it would read."""
        return bool(getattr(self.selection, "keeps_all", False))

    @property
    def needs_capacity(self) -> bool:
        """Whether the selection has said that it has nothing to choose without a `draft_capacity`."""
        return bool(getattr(self.selection, "needs_capacity", False))


SLOTS: Final = tuple(field.name for field in fields(Policies))

# Slot -> name -> where the class is. The same lookup serves the built-in names, dotted paths and entry points.
BUILTIN: Final[dict[str, dict[str, str]]] = {
    "admission": {
        "fcfs": "minedraft.policies.admission:Fcfs",
        "priority": "minedraft.policies.admission:Priority",
        "shortest-prompt": "minedraft.policies.admission:ShortestPrompt",
    },
    "assignment": {
        "fewest-requests": "minedraft.policies.assignment:FewestRequests",
        "least-tokens": "minedraft.policies.assignment:LeastTokens",
        "in-phase": "minedraft.policies.assignment:InPhase",
    },
    "rebalance": {
        "never": "minedraft.policies.rebalance:Never",
        "split-on-empty": "minedraft.policies.rebalance:SplitOnEmpty",
        "keep-within": "minedraft.policies.rebalance:KeepWithin",
    },
    "draft_length": {
        "fixed": "minedraft.policies.draft_length:Fixed",
        "by-batch-size": "minedraft.policies.draft_length:ByBatchSize",
    },
    "selection": {
        "all": "minedraft.policies.selection:All",
        "tetris": "minedraft.policies.selection:Tetris",
        "tetris-unbiased": "minedraft.policies.selection:TetrisUnbiased",
    },
    "preemption": {
        "newest": "minedraft.policies.preemption:Newest",
        "least-urgent": "minedraft.policies.preemption:LeastUrgent",
        "cost-aware": "minedraft.policies.preemption:CostAware",
    },
    "mode": {"fixed": "minedraft.policies.mode:Fixed"},
}

DEFAULT_NAMES: Final[dict[str, str]] = {
    "admission": "fcfs",
    "assignment": "fewest-requests",
    "rebalance": "split-on-empty",
    "draft_length": "fixed",
    "selection": "all",
    "preemption": "newest",
    "mode": "fixed",
}

ENTRY_POINT_GROUP: Final = "minedraft.policies"

_METHODS: Final = {
    "admission": "rank",
    "assignment": "choose_batch",
    "rebalance": "moves",
    "draft_length": "num_draft_tokens",
    "selection": "select",
    "preemption": "choose_victim",
    "mode": "choose_mode",
}


# What an option may be annotated with to be checked, and what to call it.
_PLAIN_TYPES: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "None": "left out",
}


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Split `NAME,key=value,...` into the name and its options.

    Values are read as int, float, true/false, or text.

    Raises:
        ValueError: an option has no `=`.
    """
    name, *rest = [part.strip() for part in text.split(",")]
    options: dict[str, Any] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"policy option {part!r} in {text!r}: write it as key=value")
        options[key.strip().replace("-", "_")] = _parse_value(value.strip())
    return name, options


def _parse_value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def load_policy(slot: str, spec: str, options: Mapping[str, Any] | None = None) -> Any:
    """Make the policy for a slot.

    Args:
        slot: one of `SLOTS`.
        spec: a built-in name, `package.module:Class`, or the name of an entry point in the group
            `minedraft.policies` (as `slot.name`, or just `name`); options may follow as `,key=value`.
        options: keyword arguments for the class, over those in `spec`.

    Raises:
        ValueError: no such slot or name (near matches are offered), the class can't be imported or made with these
            options, or lacks the slot's method.
    """
    if slot not in _METHODS:
        raise ValueError(f"no policy slot {slot!r}; the slots are {', '.join(SLOTS)}")
    name, arguments = parse_spec(spec)
    arguments.update(options or {})
    factory = _find(slot, name)
    _check_options(f"policy {slot}={name}", factory, arguments)
    try:
        policy = factory(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {slot}={name}: {error}") from error
    except Exception as error:  # a user's constructor may raise anything
        raise ValueError(f"policy {slot}={name}: {type(error).__name__}: {error}") from error
    if not callable(getattr(policy, _METHODS[slot], None)):
        raise ValueError(f"policy {slot}={name}: {type(policy).__name__} has no method {_METHODS[slot]!r}")
    return policy


def _check_options(origin: str, factory: Any, arguments: Mapping[str, Any]) -> None:
    """Say of options in the user's words what Python would say in its own; what a signature can't tell is let pass."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # no Python function, and so without a signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in arguments:
        if key not in parameters:
            known = f"its options are {', '.join(parameters)}" if parameters else "it has none"
            raise ValueError(f"{origin}: no option {key!r}; {known}")
    for key, value in arguments.items():
        wanted = str(parameters[key].annotation).split(" | ")
        if all(part in _PLAIN_TYPES for part in wanted) and type(value).__name__ not in _accepted(wanted):
            raise ValueError(f"{origin}: {key} is {value!r}, must be {' or '.join(_PLAIN_TYPES[w] for w in wanted)}")


def _accepted(wanted: Sequence[str]) -> set[str]:
    names = {"NoneType" if name == "None" else name for name in wanted}
    return names | {"int"} if "float" in names else names


def _find(slot: str, name: str) -> Any:
    target = BUILTIN[slot].get(name)
    if target is None and ":" in name:
        target = name
    if target is not None:
        return _import(slot, name, target)
    entry_points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    for wanted in (f"{slot}.{name}", name):
        for entry_point in entry_points:
            if entry_point.name == wanted:
                return _import(slot, name, entry_point.value)
    known = list(BUILTIN[slot]) + sorted(
        point.name.removeprefix(f"{slot}.") for point in entry_points if point.name.startswith(f"{slot}.")
    )
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}, or give package.module:Class"
    raise ValueError(f"no {slot} policy {name!r}: {hint}")


def _import(slot: str, name: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # so may a user's module
        raise ValueError(f"policy {slot}={name}: cannot load {target!r}: {error}") from error
    return found


def load_policies(
    specs: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Policies:
    """Make a full bundle; slots that `specs` doesn't name get `DEFAULT_NAMES`.

    Raises:
        ValueError: see `load_policy`.
    """
    names = {**DEFAULT_NAMES, **dict(specs)}
    options = options or {}
    made = {slot: load_policy(slot, spec, options.get(slot)) for slot, spec in names.items()}
    return Policies(**made)

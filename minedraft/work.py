"""The values that cross the seam: work for the two device groups, and the events that come back.

Law of this file: counts, ids and times only. Columns (parallel tuples) rather than one object per entry,
because these are built on the serving path for every step of every batch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from minedraft.request import FinishReason, Request, RequestId


class ZeroDraft(enum.IntEnum):
    """Why a verified entry carried no drafts (k = 0)."""

    NONE = 0  # it did carry drafts
    NO_SPECULATION = 1  # the mode is autoregressive
    PREFILL = 2  # prompt tokens remain uncomputed
    OPTED_OUT = 3  # the request asked for none
    LENGTH_LIMIT = 4  # max_tokens or a model's context limit leaves no room
    POLICY = 5  # the draft-length policy said 0
    DRAFTER_DOWN = 6  # no drafter is there
    DRAFT_FAILED = 7  # the draft work failed, was late, or the drafter proposed nothing
    CATCH_UP = 8  # the drafter has yet to ingest committed tokens
    DRAFT_KV = 9  # the draft pool has no room
    TARGET_KV = 10  # the target pool has no room for drafts (speculation never preempts)
    TOKEN_BUDGET = 11  # the step's token budget is spent
    SELECTION = 12  # the selection policy kept none


NUM_ZERO_DRAFT_CAUSES: Final = len(ZeroDraft)

PREFILL: Final = ZeroDraft.PREFILL  # a name of its own, see `minedraft.batch`


class DraftWork(NamedTuple):
    """One job for the drafter: catch up with the committed tokens of some requests, then draft.

    Entry i: drop `request_ids[i]`'s draft KV beyond `num_computed[i]` positions, ingest the next `num_new[i]`
    committed tokens, then draft `num_draft[i]` tokens. `num_draft[i] > 0` only if the ingestion reaches the last
    committed token.

    A work whose `num_draft` are all 0 only takes tokens in. It may be in flight beside the verification of the same
    requests, which have drafts of their own or none: its result changes neither. (I3: a request is never drafted and
    verified at once; ingestion is neither.)

    Attributes:
        work_id: unique in the run, increasing.
        batch: index of the sub-batch.
        request_ids: whose tokens.
        incarnations: with the id, names one stay of a request in the running set; a draft KV kept for another
            incarnation of the same id is void.
        rounds: the request's round number; (id, incarnation, round) names a draft, which is used at most once.
        num_computed: valid draft-KV positions to keep (rewind to here first).
        num_new: committed tokens to ingest after those.
        num_draft: tokens to draft, k.
        freed: (id, incarnation) pairs whose draft KV is to be dropped before anything else.
    """

    work_id: int
    batch: int
    request_ids: tuple[RequestId, ...]
    incarnations: tuple[int, ...]
    rounds: tuple[int, ...]
    num_computed: tuple[int, ...]
    num_new: tuple[int, ...]
    num_draft: tuple[int, ...]
    freed: tuple[tuple[RequestId, int], ...]


class VerifyWork(NamedTuple):
    """One target forward over a sub-batch: prompt chunks and draft verification in one uniform step.

    Entry i: drop `request_ids[i]`'s target KV beyond `num_computed[i]`, compute the next `num_new[i]` committed
    tokens and verify `num_draft[i]` drafts behind them. If the new tokens reach the last committed one
    (`is_last[i]`), the target yields accepted + 1 tokens; otherwise it was a prompt chunk and yields none.

    Attributes:
        work_id: unique in the run, increasing.
        batch: index of the sub-batch.
        request_ids: whose tokens.
        incarnations: see `DraftWork`.
        rounds: the round whose draft is consumed here.
        num_computed: valid target-KV positions to keep.
        num_new: committed tokens to compute.
        num_draft: drafts to verify; the first `num_draft[i]` of what was drafted under this key.
        is_last: whether the entry yields tokens.
        zero_draft: entries with k = 0 counted by cause, indexed by `ZeroDraft`.
        batch_sizes: members of every sub-batch at this moment.
        freed: (id, incarnation) pairs whose target KV is to be dropped before anything else.
    """

    work_id: int
    batch: int
    request_ids: tuple[RequestId, ...]
    incarnations: tuple[int, ...]
    rounds: tuple[int, ...]
    num_computed: tuple[int, ...]
    num_new: tuple[int, ...]
    num_draft: tuple[int, ...]
    is_last: tuple[bool, ...]
    zero_draft: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    freed: tuple[tuple[RequestId, int], ...]


Work = DraftWork | VerifyWork


class DraftResult(NamedTuple):
    """What the drafter did, columns aligned with the work's entries.

    Attributes:
        num_drafted: tokens drafted per entry, 0 <= num_drafted[i] <= num_draft[i].
        probs: drafted tokens' probabilities per entry (for selection policies), or None if the world has none.
    """

    num_drafted: tuple[int, ...]
    probs: tuple[tuple[float, ...], ...] | None = None


class VerifyResult(NamedTuple):
    """What the target did, columns aligned with the work's entries.

    Attributes:
        num_accepted: accepted drafts per entry, 0 <= num_accepted[i] <= num_draft[i].
        num_committed: tokens that became output: accepted + 1, cut at the first stop boundary; 0 for a prompt
            chunk that is not the last.
        finish_reasons: why an entry ended in this step, None if it goes on; or None if no entry ended. The
            world reports what only it can see (EOS, stop strings) and may leave the length limit to the core.
    """

    num_accepted: tuple[int, ...]
    num_committed: tuple[int, ...]
    finish_reasons: tuple[FinishReason | None, ...] | None = None


class RequestArrived(NamedTuple):
    """A request has come in."""

    request: Request


class RequestAborted(NamedTuple):
    """The client is gone; unknown or finished ids are ignored."""

    request_id: RequestId


class RequestDisplaced(NamedTuple):
    """The world has dropped a request's KV by itself; it goes back to waiting and keeps its place. Unknown: ignored.

    Attributes:
        request_id: of a waiting or running request. A result for it that is still to come changes nothing.
        num_tokens: its committed tokens, prompt included, as the world counts them.
    """

    request_id: RequestId
    num_tokens: int


class WorkDone(NamedTuple):
    """A work is complete.

    Attributes:
        work_id: of the submitted work.
        result: `DraftResult` for a `DraftWork`, `VerifyResult` for a `VerifyWork`.
        started_s: when the device began it, in seconds on the backend's clock.
        ended_s: when the device was done; the event may be seen later.
    """

    work_id: int
    result: DraftResult | VerifyResult
    started_s: float
    ended_s: float


class WorkFailed(NamedTuple):
    """A work came to nothing; no token of it counts.

    Attributes:
        work_id: of the submitted work.
        message: what the world knows of the cause.
    """

    work_id: int
    message: str


class DrafterLost(NamedTuple):
    """The drafter is gone with all its KV; its work in flight, if any, will not come back."""

    message: str


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """A drafter with empty KV is there."""


Event = RequestArrived | RequestAborted | RequestDisplaced | WorkDone | WorkFailed | DrafterLost | DrafterReady


class WorldError(Exception):
    """The world broke the contract of the seam (an unknown work id, impossible counts)."""


# The constructor of a NamedTuple is a Python function, and costs twice what these do, also in compiled code. They are
# for who makes such values at every step.


def draft_work(
    work_id: int,
    batch: int,
    request_ids: tuple[RequestId, ...],
    incarnations: tuple[int, ...],
    rounds: tuple[int, ...],
    num_computed: tuple[int, ...],
    num_new: tuple[int, ...],
    num_draft: tuple[int, ...],
    freed: tuple[tuple[RequestId, int], ...],
) -> DraftWork:
    """Make a `DraftWork`."""
    return tuple.__new__(
        DraftWork, (work_id, batch, request_ids, incarnations, rounds, num_computed, num_new, num_draft, freed)
    )


def verify_work(
    work_id: int,
    batch: int,
    request_ids: tuple[RequestId, ...],
    incarnations: tuple[int, ...],
    rounds: tuple[int, ...],
    num_computed: tuple[int, ...],
    num_new: tuple[int, ...],
    num_draft: tuple[int, ...],
    is_last: tuple[bool, ...],
    zero_draft: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    freed: tuple[tuple[RequestId, int], ...],
) -> VerifyWork:
    """Make a `VerifyWork`."""
    return tuple.__new__(
        VerifyWork,
        (
            work_id,
            batch,
            request_ids,
            incarnations,
            rounds,
            num_computed,
            num_new,
            num_draft,
            is_last,
            zero_draft,
            batch_sizes,
            freed,
        ),
    )


def draft_result(num_drafted: tuple[int, ...], probs: tuple[tuple[float, ...], ...] | None = None) -> DraftResult:
    """Make a `DraftResult`."""
    return tuple.__new__(DraftResult, (num_drafted, probs))


def verify_result(
    num_accepted: tuple[int, ...],
    num_committed: tuple[int, ...],
    finish_reasons: tuple[FinishReason | None, ...] | None = None,
) -> VerifyResult:
    """Make a `VerifyResult`."""
    return tuple.__new__(VerifyResult, (num_accepted, num_committed, finish_reasons))


def work_done(work_id: int, result: DraftResult | VerifyResult, started_s: float, ended_s: float) -> WorkDone:
    """Make a `WorkDone`."""
    return tuple.__new__(WorkDone, (work_id, result, started_s, ended_s))

"""The verify half of a round: what the target computes, and committing what it accepted."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Any, Final

from minedraft.batch import IDLE_PHASE, Batch
from minedraft.memory_pressure import reserve_target
from minedraft.policy import Draft, PolicyError
from minedraft.request import FinishReason, RequestOutput
from minedraft.sequence import SequenceState
from minedraft.state import SchedulerState
from minedraft.steady import DRAFTED, Ended
from minedraft.work import NUM_ZERO_DRAFT_CAUSES, PREFILL, VerifyResult, VerifyWork, WorldError, ZeroDraft, verify_work

NO_ZERO_DRAFTS: Final = (0,) * NUM_ZERO_DRAFT_CAUSES


class VerifyInFlight:
    """A submitted verify work and whom it is for."""

    __slots__ = ("seqs", "work")

    def __init__(self, work: VerifyWork, seqs: tuple[SequenceState, ...]) -> None:
        self.work = work
        self.seqs = seqs


def build_verify(state: SchedulerState, batch: Batch, work_id: int) -> VerifyInFlight | None:
    """Make the verify work of a DRAFTED batch: decoding members first, prompt chunks with what budget is left.

    Target blocks for drafts are reserved here and not before (I7).

    Returns:
        The work, or None if every member was preempted on the way.

    Raises:
        PolicyError: an illegal selection or victim.
    """
    if not state.keeps_all_drafts:
        _select(state, batch)
    columns = batch.columns
    if columns.stage != DRAFTED:
        columns.settle()
    seqs, drafts = _place_decodes(state, batch)
    if batch.phase is IDLE_PHASE:
        return None  # all gave way; whoever was incoming has joined, and starts with a round of its own
    num_steady = len(columns.seqs)
    if num_steady == len(batch.members):
        columns.work_id = work_id
        return VerifyInFlight(_steady_work(state, batch, work_id), tuple(seqs))
    num_new = [1] * len(seqs)
    is_last = [True] * len(seqs)
    if len(seqs) < len(batch.members):
        budget = state.config.max_num_batched_tokens - len(seqs) - sum(drafts)
        _place_prefills(batch, budget, seqs, num_new, is_last)
        drafts += [0] * (len(seqs) - len(drafts))
    if not seqs:
        return None
    if num_steady:
        columns.work_id = work_id
    others = seqs[num_steady:] if num_steady else seqs
    work = verify_work(
        work_id,
        batch.index,
        columns.request_ids + tuple([seq.request_id for seq in others]),
        columns.incarnations + tuple([seq.incarnation for seq in others]),
        columns.rounds + tuple([seq.round for seq in others]),
        columns.computed + tuple([seq.num_tokens - seq.num_uncomputed for seq in others]),
        tuple(num_new),
        tuple(drafts),
        tuple(is_last),
        _count_causes(state, others, drafts),
        state.batches.sizes(),
        tuple(state.target_freed),
    )
    state.target_freed.clear()
    return VerifyInFlight(work, tuple(seqs))


def _steady_work(state: SchedulerState, batch: Batch, work_id: int) -> VerifyWork:
    """The work of a batch of which every member is in the columns."""
    columns = batch.columns
    size = len(columns.seqs)
    work = verify_work(
        work_id,
        batch.index,
        columns.request_ids,
        columns.incarnations,
        columns.rounds,
        columns.computed,
        (1,) * size,
        (columns.k,) * size,
        (True,) * size,
        NO_ZERO_DRAFTS,
        state.batches.sizes(),
        tuple(state.target_freed),
    )
    state.target_freed.clear()
    return work


def _select(state: SchedulerState, batch: Batch) -> None:
    """Ask the selection policy which drafts are worth verifying."""
    policy: Any = state.policies.selection  # its answer may be anything until it is checked
    capacity = state.config.draft_capacity
    drafts = [Draft(seq.view, seq.num_drafted, seq.probs) for seq in batch.members.values() if seq.num_drafted]
    if not drafts:
        return
    first = state.sequences[drafts[0].seq.request_id].round % len(drafts)
    drafts = drafts[first:] + drafts[:first]  # not always the same ones are looked at last
    total = sum(draft.num_drafted for draft in drafts)
    capacity = total if capacity is None else min(capacity, total)
    try:
        kept = [operator.index(count) for count in policy.select(drafts, capacity)]
    except Exception as error:
        raise PolicyError(f"selection policy failed: {error}") from error
    if len(kept) != len(drafts):
        raise PolicyError(f"selection policy returned {len(kept)} counts for {len(drafts)} requests")
    if sum(kept) > capacity:
        raise PolicyError(f"selection policy kept {sum(kept)} drafts, capacity is {capacity}")
    for draft, count in zip(drafts, kept, strict=True):
        if not 0 <= count <= draft.num_drafted:
            raise PolicyError(f"selection policy kept {count} of {draft.num_drafted} for {draft.seq.request_id!r}")
    for draft, count in zip(drafts, kept, strict=True):
        seq = state.sequences[draft.seq.request_id]
        seq.num_selected = count
        if not count:
            seq.zero_cause = ZeroDraft.SELECTION


def _place_decodes(state: SchedulerState, batch: Batch) -> tuple[list[SequenceState], list[int]]:
    """Decoding members with the drafts that the target pool has room for."""
    try:
        return _reserve_decodes(state, batch)
    except PolicyError:
        for seq in batch.members.values():  # blocks for drafts go back: nothing is verified
            if seq.target_capacity:
                seq.target_capacity = state.target_pool.trim(seq.request_id, seq.num_tokens)
        raise


def _reserve_decodes(state: SchedulerState, batch: Batch) -> tuple[list[SequenceState], list[int]]:
    columns = batch.columns
    if columns.seqs and not columns.reserve_targets(state.target_pool):
        columns.rest()
    steady = columns.seqs.copy()
    drafts = [columns.k] * len(steady)
    if len(steady) == len(batch.members):
        return steady, drafts
    decodes = [seq for seq in batch.members.values() if seq.num_uncomputed == 1 and seq.columns is None]
    for seq in decodes:
        wanted = seq.num_tokens + seq.num_selected
        if wanted > seq.target_capacity:
            capacity = state.target_pool.reserve(seq.request_id, wanted)
            if not capacity:
                columns.give_up_targets(state.target_pool)
                decodes = [seq for seq in batch.members.values() if seq.num_uncomputed == 1]
                return _squeeze_decodes(state, batch, decodes)
            seq.target_capacity = capacity
    return steady + decodes, drafts + [seq.num_selected for seq in decodes]


def _squeeze_decodes(
    state: SchedulerState, batch: Batch, decodes: list[SequenceState]
) -> tuple[list[SequenceState], list[int]]:
    """The same in a pool that is short: drafts are cut, and others may lose their blocks."""
    seqs: list[SequenceState] = []
    drafts: list[int] = []
    for seq in decodes:
        num_draft = seq.num_selected
        if seq.num_tokens + num_draft > seq.target_capacity:
            if seq.batch != batch.index:  # it gave way for one before it
                continue
            wanted = num_draft
            num_draft = reserve_target(state, seq, num_draft, seqs)
            if num_draft < 0:
                seq.clear_draft()
                seq.round += 1
                continue
            if wanted and not num_draft:
                seq.zero_cause = ZeroDraft.TARGET_KV
        seqs.append(seq)
        drafts.append(num_draft)
    return seqs, drafts


def _place_prefills(
    batch: Batch, budget: int, seqs: list[SequenceState], num_new: list[int], is_last: list[bool]
) -> None:
    """Prompt chunks, oldest member first, within what is left of the token budget."""
    for seq in batch.members.values():
        remaining = seq.num_uncomputed
        if remaining == 1:
            continue
        if budget <= 0:
            return
        seq.zero_cause = PREFILL
        chunk = min(remaining, budget)
        assert seq.num_tokens - remaining + chunk <= seq.target_capacity, seq.request_id
        budget -= chunk
        seqs.append(seq)
        num_new.append(chunk)
        is_last.append(chunk == remaining)


def _count_causes(state: SchedulerState, others: list[SequenceState], drafts: list[int]) -> tuple[int, ...]:
    """Why entries have no drafts; `others` are the last ones, and all before them have some."""
    if 0 not in drafts:
        return NO_ZERO_DRAFTS
    counts = [0] * NUM_ZERO_DRAFT_CAUSES
    if not state.speculating and not any(drafts):
        counts[ZeroDraft.NO_SPECULATION] = len(others)
        return tuple(counts)
    first = len(drafts) - len(others)
    for i, seq in enumerate(others):
        if not drafts[first + i]:
            counts[seq.zero_cause] += 1
    return tuple(counts)


def apply_verify(
    state: SchedulerState, batch: Batch, in_flight: VerifyInFlight, result: VerifyResult
) -> list[RequestOutput]:
    """Commit a finished verification; entries whose sequence was aborted meanwhile change nothing.

    Returns:
        The requests that ended with it.

    Raises:
        WorldError: the result doesn't fit the work (I5).
    """
    work, seqs = in_flight.work, in_flight.seqs
    accepted, committed, reasons = result
    if len(accepted) != len(seqs) or len(committed) != len(seqs):
        raise WorldError(f"verify work {work.work_id} has {len(seqs)} entries, its result {len(accepted)}")
    columns = batch.columns
    if columns.seqs and columns.work_id == work.work_id:
        first = len(columns.seqs)
        ended = _commit_columns(state, batch, in_flight, result)
        if first < len(seqs):
            ended += _commit(state, batch, in_flight, result, first)
    elif reasons is None and committed == work.is_last and not any(work.num_draft) and not any(accepted):
        ended = _commit_plain(state, batch, in_flight)
    else:
        ended = _commit(state, batch, in_flight, result)
    return [state.finish(seq, reason) for seq, reason in ended]


def _commit_columns(state: SchedulerState, batch: Batch, in_flight: VerifyInFlight, result: VerifyResult) -> Ended:
    """Commit what the first entries of a step, the members of the columns, accepted."""
    work, columns = in_flight.work, batch.columns
    accepted, committed, reasons = result
    size = len(columns.seqs)
    if size < len(accepted):
        accepted, committed = accepted[:size], committed[:size]
    usual = tuple(map(operator.add, accepted, repeat(1)))
    is_usual = committed == usual
    counts = set(accepted)
    if not is_usual or min(counts) < 0 or max(counts) > columns.k:
        for i in range(size):
            if committed[i] != usual[i] or not 0 <= accepted[i] <= columns.k:
                _check_cut(work, i, accepted[i], committed[i], None if reasons is None else reasons[i])
    columns.commit(accepted, committed)
    assert state.draft_pool is not None
    columns.trim(state.target_pool, state.draft_pool)
    num_accepted = sum(accepted)
    batch.num_tokens += num_accepted + size if is_usual else sum(committed)
    state.num_rounds += size
    state.num_draft_tokens += size * columns.k
    state.num_accepted_tokens += num_accepted
    return columns.ended(reasons)


def _commit_plain(state: SchedulerState, batch: Batch, in_flight: VerifyInFlight) -> Ended:
    """Commit a step that verified no drafts and in which the world saw nobody end: one token per last entry."""
    work, seqs = in_flight.work, in_flight.seqs
    ended: Ended = []
    total = 0
    # Here and in `_commit` not strict, since mypyc turns only this into a loop without iterators.
    for seq, incarnation, num_new, last in zip(seqs, work.incarnations, work.num_new, work.is_last):  # noqa: B905
        if seq.incarnation != incarnation:
            continue
        if seq.num_drafted:  # drafted, but not selected or not fitting
            if seq.draft_capacity:
                _rewind_draft_kv(state, seq, 0)
            seq.clear_draft()
        seq.round += 1
        if not last:
            seq.num_uncomputed -= num_new
            continue
        if num_new != 1:
            seq.num_uncomputed = 1
        total += 1
        seq.num_tokens = num_tokens = seq.num_tokens + 1
        if num_tokens >= seq.limit:
            ended.append((seq, FinishReason.LENGTH))
    batch.num_tokens += total
    return ended


def _commit(
    state: SchedulerState, batch: Batch, in_flight: VerifyInFlight, result: VerifyResult, first: int = 0
) -> Ended:
    """Commit any step, from its entry number `first` on."""
    work, seqs = in_flight.work, in_flight.seqs
    accepted, committed, reasons = result
    ended: Ended = []
    block_size = state.target_pool.block_size
    total = rounds = drafts = accepts = 0
    incarnations, new, is_last = work.incarnations, work.num_new, work.is_last
    num_drafts = work.num_draft
    if first:
        seqs, incarnations, num_drafts = seqs[first:], incarnations[first:], num_drafts[first:]
        accepted, committed = accepted[first:], committed[first:]
    for j, (seq, incarnation, num_draft, num_accepted, num_committed) in enumerate(
        zip(seqs, incarnations, num_drafts, accepted, committed)  # noqa: B905
    ):
        i = first + j
        last = is_last[i]
        reason = None if reasons is None else reasons[i]
        if num_committed != (num_accepted + 1 if last else 0) or num_accepted > num_draft or num_accepted < 0:
            _check_cut(work, i, num_accepted, num_committed, reason)
        if seq.incarnation != incarnation:
            continue
        if num_draft:
            rounds += 1
            drafts += num_draft
            accepts += num_accepted
            seq.num_rounds += 1
            seq.num_draft_tokens += num_draft
            seq.num_accepted_tokens += num_accepted
        if seq.num_drafted:
            if seq.draft_capacity:
                _rewind_draft_kv(state, seq, num_accepted)
            seq.num_drafted = seq.num_selected = 0
            seq.probs = ()
        seq.round += 1
        seq.num_uncomputed = 1 if last else seq.num_uncomputed - new[i]
        seq.num_tokens = num_tokens = seq.num_tokens + num_committed
        total += num_committed
        if num_draft > num_accepted and seq.target_capacity - num_tokens >= block_size - 1:
            # The last token is not computed yet.
            seq.target_capacity = state.target_pool.trim(seq.request_id, num_tokens - 1)
        if reason is not None:
            ended.append((seq, reason))
        elif num_tokens >= seq.limit:
            ended.append((seq, FinishReason.LENGTH))
    batch.num_tokens += total
    state.num_rounds += rounds
    state.num_draft_tokens += drafts
    state.num_accepted_tokens += accepts
    return ended


def _rewind_draft_kv(state: SchedulerState, seq: SequenceState, num_accepted: int) -> None:
    """Keep the drafter's KV of the drafts that became text.

    The drafter wrote KV for all drafts but the last one, so after full acceptance it lags by two tokens (I8).
    """
    assert state.draft_pool is not None
    last_written = seq.num_drafted - 1
    valid = seq.num_tokens + (num_accepted if num_accepted < last_written else last_written)
    seq.num_draft_computed = valid
    if seq.draft_capacity - valid >= state.draft_pool.block_size:
        seq.draft_capacity = state.draft_pool.trim(seq.request_id, valid)


def _check_cut(work: VerifyWork, i: int, num_accepted: int, num_committed: int, reason: FinishReason | None) -> None:
    """A short commit is legal only where the request ended at a stop boundary."""
    most = num_accepted + 1 if work.is_last[i] else 0
    if 0 <= num_accepted <= work.num_draft[i] and 0 <= num_committed <= most and reason is not None:
        return
    raise WorldError(
        f"verify work {work.work_id}, request {work.request_ids[i]!r}: accepted {num_accepted} of "
        f"{work.num_draft[i]}, committed {num_committed}, finish reason {reason}"
    )


def cancel_verify(state: SchedulerState, in_flight: VerifyInFlight) -> None:
    """The work came to nothing: no token counts, its drafts are used up and their blocks go back."""
    state.batches.batches[in_flight.work.batch].columns.settle()
    for seq, incarnation in zip(in_flight.seqs, in_flight.work.incarnations, strict=True):
        if seq.incarnation == incarnation:
            seq.clear_draft()
            seq.round += 1  # a draft made anew gets a key of its own
            seq.target_capacity = state.target_pool.trim(seq.request_id, seq.num_tokens)

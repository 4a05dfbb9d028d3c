"""The draft half of a round: who drafts how much, what the drafter must ingest first, and taking the result in."""

from __future__ import annotations

import operator
from typing import Any

from minedraft.batch import Batch
from minedraft.kv_cache import KVPool, blocks_for
from minedraft.memory_pressure import reserve_draft
from minedraft.policy import PolicyError
from minedraft.sequence import SequenceState
from minedraft.state import SchedulerState
from minedraft.steady import Columns
from minedraft.work import PREFILL, DraftResult, DraftWork, WorldError, ZeroDraft, draft_work

# After a round the drafter lags by one committed token, or two if every draft was accepted.
MAX_ROUTINE_INGEST = 2


class DraftInFlight:
    """A submitted draft work and whom it is for."""

    __slots__ = ("is_ingestion", "seqs", "work")

    def __init__(self, work: DraftWork, seqs: tuple[SequenceState, ...], is_ingestion: bool = False) -> None:
        self.work = work
        self.seqs = seqs
        self.is_ingestion = is_ingestion  # see `ingestion.py`


class _Entries:
    """Columns of a draft work under construction."""

    __slots__ = ("drafts", "new", "seqs", "starts")

    def __init__(self) -> None:
        self.seqs: list[SequenceState] = []
        self.starts: list[int] = []
        self.new: list[int] = []
        self.drafts: list[int] = []

    def add(self, seq: SequenceState, start: int, num_new: int, num_draft: int) -> None:
        self.seqs.append(seq)
        self.starts.append(start)
        self.new.append(num_new)
        self.drafts.append(num_draft)

    def add_columns(self, columns: Columns) -> None:
        """The members of the columns, first of all."""
        self.seqs = columns.seqs.copy()
        self.starts = list(columns.starts)
        self.new = list(columns.new)
        self.drafts = [columns.k] * len(columns.seqs)


def can_draft(seq: SequenceState) -> bool:
    """Whether a sequence could use drafts in this round: decoding, opted in, and not at its length limit.

    The first round of a stay is its prompt's, even if all but one token is cached or there is only one: engines take no
    drafts for a request that joins.
    """
    return (
        seq.max_draft > 0
        and seq.num_uncomputed == 1
        and seq.round > 0
        and seq.num_tokens + 2 <= seq.draft_limit  # k = 1 and the bonus token
    )


def lags_behind(state: SchedulerState, seq: SequenceState) -> bool:
    """Whether the drafter has so much to take in of a request that it does so beside the target's work.

    What is being taken in counts as done: that is worth waiting for.
    """
    config = state.config
    missing = seq.num_tokens - seq.num_draft_computed - seq.num_ingesting
    return config.draft_ingests_beside and missing > config.catch_up_limit


def _obstacle(state: SchedulerState, seq: SequenceState) -> ZeroDraft:
    """Why the drafter could do nothing for a request that could use drafts, even if it were free; NONE if it could.

    A drafter that is never busy beside the target is simply asked.
    """
    if not state.drafter_up:
        return ZeroDraft.DRAFTER_DOWN
    if not state.config.draft_ingests_beside:
        return ZeroDraft.NONE
    if not seq.draft_capacity and not state.has_draft_room(seq.num_tokens):
        return ZeroDraft.DRAFT_KV
    return ZeroDraft.CATCH_UP if lags_behind(state, seq) else ZeroDraft.NONE


def wants_draft(state: SchedulerState, batch: Batch) -> bool:
    """Whether some member could use drafts and the draft-length policy would give it any.

    Raises:
        PolicyError: an illegal draft length.
    """
    if not state.speculating or not state.drafter_up:
        return False
    if batch.columns.seqs:
        if _length_of_all(state, batch) and batch.columns.has_room():
            return True
        batch.columns.refresh()
    once = state.asks_once_per_batch
    for seq in batch.members.values():
        if not can_draft(seq):
            continue
        is_close = seq.draft_capacity and seq.num_tokens - seq.num_draft_computed <= MAX_ROUTINE_INGEST
        if not is_close and _obstacle(state, seq):
            continue
        if once:
            return _length_of_all(state, batch) > 0
        if _wanted_length(state, batch, seq) > 0:
            return True
    return False


def _wanted_length(state: SchedulerState, batch: Batch, seq: SequenceState) -> int:
    policy: Any = state.policies.draft_length  # its answer may be anything until it is checked
    try:
        wanted: object = policy.num_draft_tokens(seq.view, batch.view, state.load)
    except Exception as error:
        raise PolicyError(f"draft_length policy failed on {seq.request_id!r}: {error}") from error
    return wanted if type(wanted) is int and wanted >= 0 else _checked_length(repr(seq.request_id), wanted)


def _length_of_all(state: SchedulerState, batch: Batch) -> int:
    """Drafts for every member of a batch, where the policy need not look at each."""
    policy: Any = state.policies.draft_length
    try:
        wanted: object = policy.num_draft_tokens_of_all(batch.view, state.load)
    except Exception as error:
        raise PolicyError(f"draft_length policy failed on batch {batch.index}: {error}") from error
    wanted = wanted if type(wanted) is int and wanted >= 0 else _checked_length(f"batch {batch.index}", wanted)
    return min(wanted, state.config.num_speculative_tokens)


def mark_undrafted(state: SchedulerState, batch: Batch) -> None:
    """Note why each member has k = 0 in this round: nothing is drafted for this batch."""
    batch.columns.settle()
    for seq in batch.members.values():
        if can_draft(seq):
            seq.zero_cause = _obstacle(state, seq) or ZeroDraft.POLICY
            continue
        seq.zero_cause = _standing_cause(seq)
        if seq.draft_capacity and seq.num_tokens + 2 > seq.draft_limit:
            state.drop_draft_kv(seq)  # it is never drafted again


def _standing_cause(seq: SequenceState) -> ZeroDraft:
    if seq.num_uncomputed > 1 or not seq.round:
        return PREFILL
    return ZeroDraft.LENGTH_LIMIT if seq.max_draft else seq.no_draft_cause


def build_draft(state: SchedulerState, batch: Batch, work_id: int) -> DraftInFlight | None:
    """Plan the draft half of a batch's round and make the work for it.

    Decoding members get their k. Prompts, and whoever lags far behind, are taken in beside the target's work (see
    `ingestion.py`), since a work for a batch closes it to newcomers and keeps it from a target that falls idle. A
    drafter that has no time of its own beside the target ingests them here; even then a batch of nothing but prompts
    gets no work.

    Args:
        state: the scheduler's state; the drafter is there and free.
        batch: an IDLE batch with members.
        work_id: for the work.

    Returns:
        The work, or None if nothing can be drafted in this round.

    Raises:
        PolicyError: an illegal draft length or victim.
    """
    columns = batch.columns
    if state.has_steady_rounds and (columns.seqs or len(batch.members) >= columns.least_members):
        _fill_columns(state, batch)
    decodes, prefills, num_lagging = _sort_others(batch)
    num_decodes = len(columns.seqs) + len(decodes)
    spare = _draft_allowance(state, num_decodes, prefills)
    if columns.seqs and not _plan_columns(state, batch, decodes, spare, num_decodes):
        decodes, prefills, num_lagging = _sort_others(batch)
    if len(columns.seqs) == len(batch.members):
        return _steady_work(state, batch, work_id)
    entries = _Entries()
    if columns.seqs:
        entries.add_columns(columns)
        spare -= columns.k * len(columns.seqs)
    config = state.config
    bulk = min(config.catch_up_limit, config.draft_budget - MAX_ROUTINE_INGEST * (num_decodes - num_lagging))
    if decodes:
        bulk = _plan_decodes(state, batch, decodes, entries, spare, bulk)
    if not entries.seqs or (config.draft_ingests_beside and not any(entries.drafts)):
        return None
    if not config.draft_ingests_beside and not config.draft_follows_target:
        _plan_prefills(batch, prefills, entries, bulk)
    return _make_work(state, batch, work_id, entries)


def _steady_work(state: SchedulerState, batch: Batch, work_id: int) -> DraftInFlight:
    """The work of a batch of which every member is in the columns."""
    columns = batch.columns
    columns.start_drafting(work_id)
    work = draft_work(
        work_id,
        batch.index,
        columns.request_ids,
        columns.incarnations,
        columns.rounds,
        columns.starts,
        columns.new,
        (columns.k,) * len(columns.seqs),
        tuple(state.draft_freed),
    )
    state.draft_freed.clear()
    return DraftInFlight(work, tuple(columns.seqs))


def _fill_columns(state: SchedulerState, batch: Batch) -> None:
    """Find out for whom this round is a steady one."""
    columns = batch.columns
    columns.set_length(_length_of_all(state, batch))
    if len(columns.seqs) < len(batch.members) and columns.may_admit(len(batch.members)):
        for seq in batch.members.values():
            if seq.columns is None and columns.fits(seq):
                columns.admit(seq)
    columns.remove_limited()


def _plan_columns(
    state: SchedulerState, batch: Batch, decodes: list[SequenceState], spare: int, num_decodes: int
) -> bool:
    """Whether there is room for all drafts of the columns and of the others; if not, the columns are settled.

    Where somebody has to go short or to give way, the order in which they are asked matters.
    """
    columns, pool = batch.columns, state.draft_pool
    assert pool is not None
    if spare < num_decodes * state.config.num_speculative_tokens:
        columns.settle()
    elif not columns.reserve_drafts(pool):
        columns.rest()
    elif decodes and not _has_room_for(state, pool, decodes):
        columns.give_up_drafts(pool)
    return bool(columns.seqs)


def _has_room_for(state: SchedulerState, pool: KVPool, seqs: list[SequenceState]) -> bool:
    """Whether the draft pool has room for all these sequences may want, in whatever order they are served."""
    needed = 0
    for seq in seqs:
        if seq.max_draft:
            reach = seq.num_tokens + state.config.num_speculative_tokens - 1
            needed += max(0, blocks_for(reach, pool.block_size) - seq.draft_capacity // pool.block_size)
            if not seq.draft_capacity:
                needed += len(state.running)  # see `has_draft_room`
    return needed <= pool.num_free_blocks


def _sort_others(batch: Batch) -> tuple[list[SequenceState], list[SequenceState], int]:
    """Of the members that are not in the columns: who decodes, who doesn't, and how many of the former lag behind."""
    decodes: list[SequenceState] = []
    prefills: list[SequenceState] = []
    num_lagging = 0
    if len(batch.columns.seqs) == len(batch.members):
        return decodes, prefills, num_lagging
    for seq in batch.members.values():
        if seq.columns is not None:
            continue
        if seq.num_uncomputed == 1 and seq.round:
            decodes.append(seq)
            num_lagging += seq.num_tokens - seq.num_draft_computed > MAX_ROUTINE_INGEST
        else:
            prefills.append(seq)
            seq.zero_cause = PREFILL
    return decodes, prefills, num_lagging


def _plan_decodes(
    state: SchedulerState,
    batch: Batch,
    decodes: list[SequenceState],
    entries: _Entries,
    spare: int,
    bulk: int,
) -> int:
    """Add the decoding members that are not in the columns; returns what is left of the budget for bulk ingestion.

    This loop runs for every request of every round: it is written out flat, and whatever is rare is called. It repeats
    `_wanted_length` in line, since that call alone was a tenth of the core's cost per request.
    """
    policy: Any = state.policies.draft_length
    choose = policy.num_draft_tokens
    index, batch_view, load = batch.index, batch.view, state.load
    once, num_victims, wanted = state.asks_once_per_batch, -1, 0
    if spare < len(decodes) * state.config.num_speculative_tokens:
        first = decodes[0].round % len(decodes) if decodes else 0  # not always the same ones go short
        decodes = decodes[first:] + decodes[:first]
    for seq in decodes:
        if seq.batch != index:  # it gave way to one before it
            continue
        num_tokens = seq.num_tokens
        num_draft = seq.draft_limit - num_tokens - 1
        if seq.max_draft < num_draft:
            num_draft = seq.max_draft
        if num_draft <= 0:
            seq.zero_cause = _standing_cause(seq)
            if seq.draft_capacity:  # it is never drafted again
                state.drop_draft_kv(seq)
            continue
        if not once:
            try:
                answer: object = choose(seq.view, batch_view, load)
            except Exception as error:
                raise PolicyError(f"draft_length policy failed on {seq.request_id!r}: {error}") from error
            wanted = answer if type(answer) is int and answer >= 0 else _checked_length(repr(seq.request_id), answer)
        elif num_victims != state.num_victims:  # at first, and when the batch may have become smaller
            num_victims = state.num_victims
            wanted = _length_of_all(state, batch)
        if wanted < num_draft:
            num_draft = wanted
        if spare < num_draft:
            num_draft = spare
        if not num_draft:
            seq.zero_cause = ZeroDraft.TOKEN_BUDGET if wanted else ZeroDraft.POLICY
            continue
        if num_tokens + num_draft - 1 > seq.draft_capacity:
            num_draft = _fit_draft_kv(state, seq, num_draft, entries.seqs)
            if seq.draft_capacity < num_tokens:
                continue
        start = seq.num_draft_computed
        if start >= num_tokens:  # the last token must be fed again to draft from it
            start = num_tokens - 1
        num_new = num_tokens - start
        if num_new > MAX_ROUTINE_INGEST:
            num_new, num_draft = _ingest_in_bulk(seq, num_new, num_draft, bulk)
            bulk -= num_new
            if not num_new:
                continue
        spare -= num_draft
        entries.add(seq, start, num_new, num_draft)
    return bulk


def _ingest_in_bulk(seq: SequenceState, num_new: int, num_draft: int, bulk: int) -> tuple[int, int]:
    """Tokens to ingest and to draft for a drafter that lags far behind: all and k, or what the budget allows and 0."""
    if num_new <= bulk:
        return num_new, num_draft
    seq.zero_cause = ZeroDraft.CATCH_UP
    return bulk, 0


def _checked_length(whom: str, wanted: object) -> int:
    """An answer of the draft-length policy that is not a plain int >= 0."""
    try:
        count = operator.index(wanted)  # type: ignore[arg-type]
    except TypeError as error:
        raise PolicyError(f"draft_length policy wants {wanted!r} drafts for {whom}") from error
    if count < 0:
        raise PolicyError(f"draft_length policy wants {count} drafts for {whom}; must be >= 0")
    return count


def _draft_allowance(state: SchedulerState, num_decodes: int, prefills: list[SequenceState]) -> int:
    """Drafts that the step's token budget has room for, with half of it kept for prompts that wait to be computed."""
    budget = state.config.max_num_batched_tokens
    reserved = 0
    if prefills:
        remaining = sum(seq.num_uncomputed for seq in prefills)
        reserved = max(len(prefills), min(remaining, budget // 2))
    return max(0, budget - num_decodes - reserved)


def _fit_draft_kv(state: SchedulerState, seq: SequenceState, num_draft: int, placed: list[SequenceState]) -> int:
    """Room for the drafts in the draft pool (the last draft's KV is never written); shortens k if need be.

    Who holds draft KV may grow at the cost of later arrivals. Who holds none comes back only into room that is free,
    with a block to spare for each running request: else the pool's requests would evict each other in turn, and the
    drafter would spend its time ingesting contexts again.
    """
    pool = state.draft_pool
    assert pool is not None
    needed = seq.num_tokens + num_draft - 1
    if not seq.draft_capacity and not state.has_draft_room(needed):
        seq.zero_cause = ZeroDraft.DRAFT_KV
        return 0
    capacity = reserve_draft(state, seq, needed, placed)
    if capacity < seq.num_tokens:
        capacity = reserve_draft(state, seq, seq.num_tokens, placed)
    num_draft = min(num_draft, max(0, capacity - seq.num_tokens + 1))
    if not num_draft:
        seq.zero_cause = ZeroDraft.DRAFT_KV
    return num_draft


def _plan_prefills(batch: Batch, prefills: list[SequenceState], entries: _Entries, bulk: int) -> None:
    """Let the drafter ingest prompts while the target has yet to compute them."""
    for seq in prefills:
        num_new = min(seq.num_tokens - seq.num_draft_computed, bulk)
        if num_new > 0 and seq.max_draft and seq.batch == batch.index and seq.draft_capacity >= seq.num_tokens:
            bulk -= num_new
            entries.add(seq, seq.num_draft_computed, num_new, 0)


def _make_work(state: SchedulerState, batch: Batch, work_id: int, entries: _Entries) -> DraftInFlight:
    seqs, columns = entries.seqs, batch.columns
    num_steady = len(columns.seqs)
    columns.note_round()
    if num_steady:
        columns.start_drafting(work_id)
    others = seqs[num_steady:] if num_steady else seqs
    for seq in others:
        seq.drafting = seq.in_drafter = True
    work = draft_work(
        work_id,
        batch.index,
        columns.request_ids + tuple([seq.request_id for seq in others]),
        columns.incarnations + tuple([seq.incarnation for seq in others]),
        columns.rounds + tuple([seq.round for seq in others]),
        tuple(entries.starts),
        tuple(entries.new),
        tuple(entries.drafts),
        tuple(state.draft_freed),
    )
    state.draft_freed.clear()
    return DraftInFlight(work, tuple(seqs))


def apply_draft(state: SchedulerState, in_flight: DraftInFlight, result: DraftResult) -> None:
    """Take a finished draft work in; entries whose sequence left or lost its draft KV meanwhile change nothing.

    Raises:
        WorldError: the result doesn't fit the work.
    """
    work, seqs = in_flight.work, in_flight.seqs
    drafted, probs = result.num_drafted, result.probs
    if len(drafted) != len(seqs) or (probs is not None and len(probs) != len(seqs)):
        raise WorldError(f"draft work {work.work_id} has {len(seqs)} entries, its result {len(drafted)}")
    if probs is not None and state.has_steady_rounds:
        state.has_steady_rounds = False  # each request's own have to be kept
        state.settle()
    wanted = work.num_draft
    if drafted != wanted:
        _check_counts(work, drafted)
    columns = state.batches.batches[work.batch].columns
    incarnations, starts, new = work.incarnations, work.num_computed, work.num_new
    if columns.seqs and columns.work_id == work.work_id:
        if drafted == wanted:
            first = len(columns.seqs)
            columns.take_drafts()
            if first == len(seqs):
                return
            seqs, incarnations, starts, new = seqs[first:], incarnations[first:], starts[first:], new[first:]
            drafted, wanted = drafted[first:], wanted[first:]
        else:
            columns.settle()
    # Not strict, since mypyc turns only this into a loop without iterators: they are half of the cost of a small batch.
    for i, (seq, incarnation, start, num_new, count) in enumerate(
        zip(seqs, incarnations, starts, new, drafted)  # noqa: B905
    ):
        if seq.incarnation != incarnation or not seq.drafting:
            continue
        seq.drafting = False
        seq.num_draft_computed = start + num_new
        if count:
            seq.num_drafted = seq.num_selected = count
            if probs is not None:
                seq.probs = probs[i]
        elif wanted[i]:
            seq.zero_cause = ZeroDraft.DRAFT_FAILED


def _check_counts(work: DraftWork, drafted: tuple[int, ...]) -> None:
    for request_id, wanted, count in zip(work.request_ids, work.num_draft, drafted, strict=True):
        if not 0 <= count <= wanted:
            raise WorldError(f"draft work {work.work_id}: {count} drafts for {request_id!r}, asked for {wanted}")


def cancel_draft(state: SchedulerState, in_flight: DraftInFlight, cause: ZeroDraft) -> None:
    """The work came to nothing: its sequences go on without drafts."""
    work = in_flight.work
    state.batches.batches[work.batch].columns.settle()
    columns = zip(in_flight.seqs, work.incarnations, work.num_computed, work.num_draft, strict=True)
    for seq, incarnation, kept, wanted in columns:
        if seq.incarnation == incarnation and seq.drafting:
            seq.drafting = False
            seq.num_draft_computed = kept  # the drafter may have rewound to here before it failed
            if wanted:
                seq.zero_cause = cause

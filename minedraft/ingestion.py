"""Ingestion: the drafter takes in committed tokens beside the target's work, when it has nothing to draft.

An ingestion is a `DraftWork` that asks for no drafts. It is no round: its batch keeps its phase, stays open to
newcomers and is verified meanwhile. I3 in full: a request is never *drafted* and verified at once, and to ingest is
neither. It may run beside the prompt's own verification, since the drafter gets committed tokens only, which never
change.

What it must not cost is time, the target's or that of a batch that could be drafted. It begins only while the target is
busy and nothing can be drafted, and takes in about as much as the target computes meanwhile, so that it ends with the
target's step where the drafter is as much faster at prompts as it is smaller. A batch of which nobody can be drafted
before the drafter has caught up is verified without drafts (`drafting.wants_draft`).

Where the drafter has no time of its own beside the target (`SchedulerConfig.draft_ingests_beside`), there are none, and
who lags behind catches up in rounds.
"""

from __future__ import annotations

from minedraft.batch import Batch
from minedraft.drafting import MAX_ROUTINE_INGEST, DraftInFlight, lags_behind
from minedraft.sequence import SequenceState
from minedraft.state import SchedulerState
from minedraft.work import DraftResult, DraftWork, VerifyWork, WorldError, ZeroDraft


def build_ingestion(state: SchedulerState, verifying: VerifyWork, work_id: int) -> DraftInFlight | None:
    """Make a work of what the drafter can take in now: of the batch that is verified, or else of the next one.

    Args:
        state: the scheduler's state; the drafter is there, free, and has nothing to draft.
        verifying: what the target does meanwhile.
        work_id: for the work.

    Returns:
        The work, or None if the drafter lags behind nowhere.
    """
    batches = state.batches.batches
    for offset in range(len(batches)):
        batch = batches[(verifying.batch + offset) % len(batches)]
        seqs = _who_lags(state, batch)
        if seqs:
            made = _build(state, batch, seqs, verifying, work_id)
            if made is not None:
                return made
    return None


def _who_lags(state: SchedulerState, batch: Batch) -> list[SequenceState]:
    found: list[SequenceState] = []
    if len(batch.columns.seqs) < len(batch.members):
        for seq in batch.members.values():
            missing = seq.num_tokens - seq.num_draft_computed
            if missing > MAX_ROUTINE_INGEST and seq.columns is None and _num_to_ingest(state, seq) > 0:
                found.append(seq)
    return found


def _num_to_ingest(state: SchedulerState, seq: SequenceState) -> int:
    """Tokens that the drafter can take in; a few of a request that decodes are left to its next draft work."""
    if not seq.max_draft or seq.num_drafted or seq.num_tokens + 2 > seq.draft_limit:
        return 0
    known = seq.num_computed if state.config.draft_follows_target else seq.num_tokens
    missing = known - seq.num_draft_computed
    if missing <= MAX_ROUTINE_INGEST:
        return 0
    if seq.num_uncomputed > 1 or not seq.round:
        return missing
    return missing if seq.zero_cause is ZeroDraft.CATCH_UP or lags_behind(state, seq) else 0


def _build(
    state: SchedulerState, batch: Batch, lagging: list[SequenceState], verifying: VerifyWork, work_id: int
) -> DraftInFlight | None:
    config = state.config
    budget = min(config.draft_budget, max(config.catch_up_limit, sum(verifying.num_new)))
    seqs: list[SequenceState] = []
    starts: list[int] = []
    new: list[int] = []
    for seq in lagging:
        start = seq.num_draft_computed
        num_new = min(_num_to_ingest(state, seq), _room(state, seq) - start, budget)
        if num_new > 0:
            budget -= num_new
            seq.num_ingesting = num_new
            seq.in_drafter = True
            seqs.append(seq)
            starts.append(start)
            new.append(num_new)
    if not seqs:
        return None
    work = DraftWork(
        work_id,
        batch.index,
        tuple([seq.request_id for seq in seqs]),
        tuple([seq.incarnation for seq in seqs]),
        tuple([seq.round for seq in seqs]),
        tuple(starts),
        tuple(new),
        (0,) * len(seqs),
        tuple(state.draft_freed),
    )
    state.draft_freed.clear()
    return DraftInFlight(work, tuple(seqs), is_ingestion=True)


def _room(state: SchedulerState, seq: SequenceState) -> int:
    """Tokens that its draft blocks can hold: all it has, if there are free blocks; nobody gives way for it.

    Who holds none is let in as a newcomer is.
    """
    pool, num_tokens = state.draft_pool, seq.num_tokens
    assert pool is not None
    if num_tokens > seq.draft_capacity and (seq.draft_capacity or state.has_draft_room(num_tokens)):
        seq.draft_capacity = pool.reserve(seq.request_id, num_tokens) or seq.draft_capacity
    return seq.draft_capacity


def apply_ingestion(in_flight: DraftInFlight, result: DraftResult) -> None:
    """Note what the drafter has; entries whose sequence left or lost its draft KV meanwhile change nothing.

    Raises:
        WorldError: the result doesn't fit the work.
    """
    work = in_flight.work
    if len(result.num_drafted) != len(in_flight.seqs) or any(result.num_drafted):
        raise WorldError(f"draft work {work.work_id} asks {len(in_flight.seqs)} times for nothing, its result {result}")
    columns = zip(in_flight.seqs, work.incarnations, work.num_computed, work.num_new, strict=True)
    for seq, incarnation, num_computed, num_new in columns:
        if seq.incarnation == incarnation and seq.num_ingesting:
            seq.num_ingesting = 0
            seq.num_draft_computed = num_computed + num_new


def cancel_ingestion(in_flight: DraftInFlight) -> None:
    """The work came to nothing; what the drafter had before is still there."""
    for seq, incarnation in zip(in_flight.seqs, in_flight.work.incarnations, strict=True):
        if seq.incarnation == incarnation:
            seq.num_ingesting = 0

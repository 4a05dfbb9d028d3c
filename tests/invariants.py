"""The invariants I1–I11 of a scheduler between two events, checked from outside."""

from __future__ import annotations

from minedraft.batch import BatchPhase
from minedraft.drafting import wants_draft
from minedraft.kv_cache import NoPool, blocks_for
from minedraft.request import SequenceStatus
from minedraft.scheduler import Scheduler
from minedraft.sequence import SequenceState
from minedraft.work import DraftWork, VerifyWork, Work


def is_ingestion(scheduler: Scheduler, work: DraftWork) -> bool:
    """Whether a draft work is none of a batch's rounds."""
    return scheduler.config.draft_ingests_beside and not any(work.num_draft)


def check_state(scheduler: Scheduler) -> None:
    """I1, I2, I3, I6, I7, I8, I9 and I17 on the state as it stands."""
    state = scheduler.state
    config = scheduler.config
    waiting = state.waiting.live()
    # I1: everybody who arrived and has not ended waits or runs, and nobody does both.
    assert state.num_arrived == state.num_finished + len(waiting) + len(state.running)
    assert len(waiting) == state.waiting.num_live
    assert set(state.sequences) == {seq.request_id for seq in waiting} | set(state.running)
    assert not {seq.request_id for seq in waiting} & set(state.running)
    # I2 and the phases.
    state.batches.check_integrity(list(state.running.values()))
    assert len(state.running) <= config.running_limit  # I9
    # I17: whoever can run has something under way, and a free target leaves nobody who could use it.
    assert scheduler.num_in_flight or not state.sequences, "requests are alive, but nothing is planned"
    if not any(batch.phase is BatchPhase.VERIFYING for batch in state.batches.batches):
        for batch in state.batches.batches:
            assert batch.phase is not BatchPhase.DRAFTED, "a free target, and a batch that waits for it"
            if batch.phase is BatchPhase.IDLE and batch.members:
                assert wants_draft(state, batch), "a free target, and a batch with nothing to draft"
    _check_pools(scheduler)
    verifying = {b.index for b in state.batches.batches if b.phase is BatchPhase.VERIFYING}
    drafting = {b.index for b in state.batches.batches if b.phase is BatchPhase.DRAFTING}
    for seq in state.running.values():
        assert seq.status is SequenceStatus.RUNNING
        assert 0 <= seq.num_computed < seq.num_tokens <= seq.limit
        assert not (seq.drafting and seq.batch in verifying), "drafted and verified at once"  # I3
        assert not seq.drafting or seq.batch in drafting
        _check_ingestion(scheduler, seq)
        assert seq.num_selected <= seq.num_drafted <= config.num_speculative_tokens
        assert seq.num_draft_computed <= seq.num_tokens  # I8
        assert seq.num_draft_computed <= seq.draft_capacity
        if seq.batch not in verifying:
            # I7: nothing is held for drafts that are not being verified.
            held = state.target_pool.held_blocks(seq.request_id)
            assert held <= blocks_for(seq.num_tokens, config.block_size), (seq.request_id, held, seq.num_tokens)
    for seq in waiting:
        assert seq.target_capacity == seq.draft_capacity == seq.num_computed == seq.num_drafted == 0
        assert seq.num_uncomputed == seq.num_tokens
        assert not seq.drafting
        assert not seq.num_ingesting


def _check_ingestion(scheduler: Scheduler, seq: SequenceState) -> None:
    """I3 and I8: who is in an ingestion has no drafts, and the drafter gets committed tokens that it has room for."""
    if not seq.num_ingesting:
        return
    config = scheduler.config
    assert config.draft_ingests_beside
    assert scheduler.num_in_flight, "an ingestion that is not in flight"
    assert not seq.drafting, "drafted while the drafter takes its tokens in"
    assert not seq.num_drafted
    assert seq.columns is None
    assert seq.in_drafter
    reach = seq.num_draft_computed + seq.num_ingesting
    assert reach <= min(seq.draft_capacity, seq.num_computed if config.draft_follows_target else seq.num_tokens)


def _check_pools(scheduler: Scheduler) -> None:
    """I6: conservation per pool; only running requests own blocks; cached capacities are true."""
    state = scheduler.state
    for pool, attribute in ((state.target_pool, "target_capacity"), (state.draft_pool, "draft_capacity")):
        if pool is None:
            continue
        if isinstance(pool, NoPool):
            assert not any(pool.held_blocks(seq.request_id) for seq in state.running.values())
            continue
        pool.check_integrity()
        assert set(pool.owners()) <= set(state.running)
        for freed in (state.target_freed, state.draft_freed):
            assert len(freed) == len(set(freed)), "told twice to forget"
        for seq in state.running.values():
            assert pool.held_blocks(seq.request_id) * pool.block_size == getattr(seq, attribute)


def check_work(scheduler: Scheduler, work: Work) -> None:
    """I3, I7, I9, I10 on a work at the moment of its submission."""
    state, config = scheduler.state, scheduler.config
    state.refresh()
    assert work.request_ids, "an empty work"
    assert len(set(work.request_ids)) == len(work.request_ids)
    columns = [column for column in work if isinstance(column, tuple)]
    widths = {len(column) for column in columns[:6]}
    assert widths == {len(work.request_ids)}
    batch = state.batches.batches[work.batch]
    assert len(work.request_ids) <= config.max_batch_size
    for i, request_id in enumerate(work.request_ids):
        seq = state.running.get(request_id)
        if seq is None or seq.incarnation != work.incarnations[i]:
            continue  # preempted by what was decided later in the same call; its result will be ignored
        assert state.batches.batches[seq.batch].members[request_id] is seq
        assert seq.incarnation == work.incarnations[i]
        k = work.num_draft[i]
        reach = work.num_computed[i] + work.num_new[i] + k
        assert k >= 0
        if k:
            assert seq.num_tokens + k + 1 <= seq.limit  # I9
            assert seq.num_tokens + k + 1 <= config.draft_len
        if isinstance(work, VerifyWork):
            assert batch.phase is BatchPhase.VERIFYING
            assert seq.batch == work.batch
            assert k <= seq.num_selected <= seq.num_drafted  # I10, prefix-closed by being a count
            held = state.target_pool.held_blocks(request_id)
            assert held * config.block_size >= reach  # I7: the reservation covers the reach ...
            assert held <= blocks_for(seq.num_tokens + k, config.block_size) + 1  # ... and little more
        else:
            if is_ingestion(scheduler, work):
                assert batch.phase is not BatchPhase.DRAFTING
                assert seq.num_ingesting == work.num_new[i]
            else:
                assert batch.phase is BatchPhase.DRAFTING
                assert seq.batch == work.batch
            assert reach <= config.draft_len, "the drafter is sent beyond its model's context"  # I9
            assert seq.draft_capacity >= max(reach - 1, work.num_computed[i] + work.num_new[i])
            if config.draft_follows_target and is_ingestion(scheduler, work):
                assert reach <= seq.num_computed, "a head is sent where the target has not been"
            elif config.draft_follows_target:
                assert seq.num_uncomputed == 1, "a head is sent where the target has not been"
                assert seq.round, "a head is sent where the target has not been"
    if isinstance(work, VerifyWork):
        assert sum(work.num_new) + sum(work.num_draft) <= config.max_num_batched_tokens  # I9
        capacity = config.draft_capacity
        assert capacity is None or sum(work.num_draft) <= capacity  # I10
        assert sum(work.zero_draft) == sum(k == 0 for k in work.num_draft)
        assert work.zero_draft[0] == 0, "a k = 0 without a cause"
    else:
        assert isinstance(work, DraftWork)
        bulk = [new for new in work.num_new if new > 2]
        assert sum(bulk) <= (config.draft_budget if is_ingestion(scheduler, work) else config.catch_up_limit)

"""What happens when a pool is short: ask the preemption policy for victims until the need is met, or give up.

Law of this file: speculation never preempts anybody's text. Only the one token that a request must compute to go on
may cost another request its target KV; drafts are shortened instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minedraft.batch import VERIFYING_PHASE
from minedraft.kv_cache import KVPool
from minedraft.policy import KVNeed, PolicyError, PreemptionMode, Victim
from minedraft.request import RequestId
from minedraft.sequence import NO_BATCH, SequenceState
from minedraft.state import SchedulerState


def reserve_target(state: SchedulerState, seq: SequenceState, num_draft: int, placed: Iterable[SequenceState]) -> int:
    """Make room for a sequence's next token and as many of its drafts as fit.

    Nobody is being verified when this is asked (the target is about to be given work), so every running sequence
    that is not `placed` in the same work may give way, but for the first by rank and arrival: it always goes on, which
    is why a finite load drains whatever the policy says (I18, I19).

    Args:
        state: the scheduler's state.
        seq: who needs room for `num_tokens + num_draft` tokens.
        num_draft: wanted drafts.
        placed: sequences already in the work that is being built.

    Returns:
        The number of drafts that there is room for, or -1 if the sequence is left out: preempted itself, or the
        first one while all that could give way are placed.

    Raises:
        PolicyError: the policy's choice is illegal.
    """
    pool = state.target_pool
    wanted = seq.num_tokens + num_draft
    capacity = pool.reserve(seq.request_id, wanted)
    if not capacity and seq.num_tokens > seq.target_capacity:
        _make_room(state, seq, placed)
        if seq.batch == NO_BATCH:
            return -1
        capacity = pool.reserve(seq.request_id, wanted) or pool.reserve(seq.request_id, seq.num_tokens)
        if not capacity:
            return -1
    if not capacity:  # room for the token, not for all drafts: take what whole blocks are left
        free_tokens = seq.target_capacity + pool.num_free_blocks * pool.block_size
        capacity = pool.reserve(seq.request_id, min(wanted, free_tokens)) or seq.target_capacity
    seq.target_capacity = capacity
    return min(num_draft, capacity - seq.num_tokens)


def _make_room(state: SchedulerState, seq: SequenceState, placed: Iterable[SequenceState]) -> None:
    """Preempt until one more block is free, or `seq` itself is gone."""
    state.settle()
    pool = state.target_pool
    busy = {other.request_id for other in placed}
    # The rank of its arrival, which never changes: else two could take the first place, and each other's KV, in turn.
    first = min(state.running.values(), key=lambda other: (other.rank, other.arrival_index))
    while (missing := _missing(pool, seq, seq.num_tokens)) > 0:
        candidates = [
            other
            for other in state.running.values()
            if other is not first and other.request_id not in busy and other.target_capacity
        ]
        if not candidates:
            # All others are in this very work: they go on, and the first is left out of it, not preempted.
            assert seq is first, seq.request_id
            assert busy, "the pool can't hold one request"
            return
        victim = _ask(state, candidates, KVNeed("target", missing, pool.block_size, seq.view))
        if victim.mode is not PreemptionMode.RECOMPUTE:
            raise PolicyError(f"preemption policy chose {victim.mode} for target blocks; only recompute frees them")
        chosen = state.running[victim.seq.request_id]
        state.preempt(chosen, victim.mode)
        if chosen is seq:
            return


def _missing(pool: KVPool, seq: SequenceState, num_tokens: int) -> int:
    """Blocks short of holding `num_tokens` tokens."""
    return pool.num_missing_blocks(seq.request_id, num_tokens)


def reserve_draft(state: SchedulerState, seq: SequenceState, num_tokens: int, placed: Iterable[SequenceState]) -> int:
    """Make room in the draft pool for `num_tokens` tokens of a sequence.

    Only requests that arrived later may lose draft KV for it, so that two never evict each other in turn. A failure
    costs speed only, and changes nothing.

    Returns:
        The tokens that the sequence's draft blocks can hold now, whether or not that is enough.

    Raises:
        PolicyError: the policy's choice is illegal.
    """
    pool = state.draft_pool
    assert pool is not None
    capacity = pool.reserve(seq.request_id, num_tokens)
    if not capacity and num_tokens <= pool.num_blocks * pool.block_size:
        capacity = _evict_draft_kv(state, pool, seq, num_tokens, {other.request_id for other in placed})
    if capacity:
        seq.draft_capacity = capacity
    return seq.draft_capacity


def _evict_draft_kv(
    state: SchedulerState, pool: KVPool, seq: SequenceState, num_tokens: int, busy: set[RequestId]
) -> int:
    state.settle()
    verifying = {batch.index for batch in state.batches.batches if batch.phase is VERIFYING_PHASE}
    candidates = [
        other
        for other in state.running.values()
        if other.arrival_index > seq.arrival_index and other.draft_capacity and other.request_id not in busy
    ]
    need = _missing(pool, seq, num_tokens)
    if sum(other.draft_capacity for other in candidates) < need * pool.block_size:
        return 0  # not even all of them would do: take nothing from anybody
    while (need := _missing(pool, seq, num_tokens)) > 0:
        candidates = [other for other in candidates if other.draft_capacity]
        victim = _ask(state, candidates, KVNeed("draft", need, pool.block_size, seq.view))
        chosen = state.running[victim.seq.request_id]
        # What is being verified can't be thrown away, which the policy has no way to know: its draft KV will do.
        mode = PreemptionMode.DROP_DRAFT_KV if chosen.batch in verifying else victim.mode
        state.preempt(chosen, mode)
    return pool.reserve(seq.request_id, num_tokens)


def _ask(state: SchedulerState, candidates: list[SequenceState], need: KVNeed) -> Victim:
    policy: Any = state.policies.preemption  # its answer may be anything until it is checked
    views = sorted((other.view for other in candidates), key=lambda view: view.arrival_index)
    try:
        victim = policy.choose_victim(views, need)
        legal = victim.seq in views and isinstance(victim.mode, PreemptionMode)
    except Exception as error:
        raise PolicyError(f"preemption policy failed: {error}") from error
    if not legal:
        raise PolicyError(f"preemption policy chose {victim!r}, which is not among the candidates")
    return Victim(victim.seq, victim.mode)

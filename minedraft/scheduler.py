"""The scheduler: two verbs, `schedule` and `update`, over pure state.

Law of this file: no clock, no I/O, no token ids, no way to tell which world it is in. At most one work is in flight
per device group. Everything is event-driven: target free and some batch DRAFTED -> verify it; drafter free and some
batch IDLE -> draft it. Alternation, cold start, single requests and draining follow from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from minedraft.batch import Batch, BatchPhase
from minedraft.drafting import (
    DraftInFlight,
    apply_draft,
    build_draft,
    can_draft,
    cancel_draft,
    mark_undrafted,
)
from minedraft.kv_cache import KVPool, PagedPool
from minedraft.policy import Mode, Move, Policies, PolicyError
from minedraft.request import FinishReason, RequestOutput
from minedraft.scheduler_config import SchedulerConfig
from minedraft.sequence import SequenceState
from minedraft.state import SchedulerState
from minedraft.verification import VerifyInFlight, apply_verify, build_verify, cancel_verify
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftResult,
    Event,
    RequestAborted,
    RequestArrived,
    VerifyResult,
    Work,
    WorkDone,
    WorkFailed,
    WorldError,
    ZeroDraft,
)

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides what the drafter and the target do next.

    Args:
        config: limits.
        policies: one policy per slot.
        target_pool: KV accounting of the target; by default a `PagedPool` of the configured size.
        draft_pool: the same for the drafter.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policies: Policies,
        target_pool: KVPool | None = None,
        draft_pool: KVPool | None = None,
    ) -> None:
        if target_pool is None:
            target_pool = PagedPool(config.num_target_blocks, config.block_size)
        if draft_pool is None and config.num_draft_blocks:
            draft_pool = PagedPool(config.num_draft_blocks, config.block_size)
        self.config = config
        self.policies = policies
        self.state = SchedulerState(config, policies, target_pool, draft_pool)
        self._draft: DraftInFlight | None = None
        self._verify: VerifyInFlight | None = None
        self._void_work_ids: dict[int, None] = {}  # draft works whose drafter died; a late result is ignored
        self._next_work_id = 0

    # ---------------------------------------------------------------- first verb

    def schedule(self, now_s: float) -> list[Work]:
        """Decide what to start at this moment.

        Args:
            now_s: the time, seconds on the backend's clock; never decreases.

        Returns:
            Works to submit in this order: at most one per free device group.

        Raises:
            PolicyError: a policy's decision is illegal; nothing of it was done.
        """
        state = self.state
        assert now_s >= state.now_s, (now_s, state.now_s)
        state.now_s = now_s
        if not state.sequences or (self._verify is not None and not self._can_draft()):
            return []  # nobody is there, or no device is free: whatever is decided later is decided knowing more
        try:
            mode = self.policies.mode.choose_mode(state.load)
            if mode is not state.mode:
                state.set_mode(Mode(mode))
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(f"mode policy failed: {error}") from error
        works: list[Work] = []
        while True:
            num_victims = state.num_victims
            if state.waiting.num_live:
                state.admit_waiting()
            if self.config.num_batches > 1:
                self._rebalance()
            while (self._verify is None and self._start_verify(works)) or self._start_draft(works):
                pass
            if state.num_victims == num_victims:  # else there may be room for others now
                return works

    def _can_draft(self) -> bool:
        """Whether a drafter is there, wanted and free."""
        return self._draft is None and self.state.speculating and self.state.drafter_up

    def _rebalance(self) -> None:
        """Carry out the rebalance policy's moves, and empty batches that the mode has no use for."""
        state, manager = self.state, self.state.batches
        num_active = state.num_active_batches
        for batch in manager.batches[num_active:]:
            if batch.phase is BatchPhase.IDLE and batch.members:
                room = manager.max_batch_size - manager.batches[0].size
                manager.move([(seq, 0) for seq in islice(tuple(batch.members.values()), room)])
        if num_active < 2 or not state.running:
            return
        try:
            moves = self.policies.rebalance.moves(manager.views[:num_active])
            checked = self._check_moves(moves, num_active) if moves else ()
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(f"rebalance policy failed: {error}") from error
        manager.move(checked)

    def _check_moves(self, moves: Sequence[Move], num_active: int) -> list[tuple[SequenceState, int]]:
        state, manager = self.state, self.state.batches
        checked: list[tuple[SequenceState, int]] = []
        sizes = list(manager.sizes())
        moved: dict[str, None] = {}
        for move in moves:
            seq = state.running.get(move.seq.request_id)
            if seq is None or seq.view is not move.seq:
                raise PolicyError(f"rebalance policy moves {move.seq!r}, which is not running")
            if seq.request_id in moved:
                raise PolicyError(f"rebalance policy moves {seq.request_id!r} twice")
            if type(move.to_batch) is not int or not 0 <= move.to_batch < num_active or move.to_batch == seq.batch:
                raise PolicyError(f"rebalance policy moves {seq.request_id!r} to batch {move.to_batch!r}")
            source = manager.batches[seq.batch]
            if source.phase is not BatchPhase.IDLE or seq.request_id not in source.members:
                raise PolicyError(f"rebalance policy moves {seq.request_id!r} out of a batch that is not IDLE")
            sizes[seq.batch] -= 1
            sizes[move.to_batch] += 1
            moved[seq.request_id] = None
            checked.append((seq, move.to_batch))
        if any(size > manager.max_batch_size for size in sizes):
            raise PolicyError(f"rebalance policy's moves make batches of {sizes}, over {manager.max_batch_size}")
        return checked

    def _start_verify(self, works: list[Work]) -> bool:
        """Give a free target the batch that has been DRAFTED for the longest time."""
        state = self.state
        batch = state.batches.longest_in(BatchPhase.DRAFTED)
        if batch is None:
            return False
        made = build_verify(state, batch, self._next_work_id)
        if made is None:
            # All members were preempted, which already turned the batch IDLE.
            assert batch.phase is BatchPhase.IDLE, batch.index
            return True
        self._next_work_id += 1
        state.batches.set_phase(batch, BatchPhase.VERIFYING)
        self._verify = made
        works.append(made.work)
        return True

    def _start_draft(self, works: list[Work]) -> bool:
        """Bring one IDLE batch on its way: to the drafter, or straight to the target if there is nothing to draft."""
        batches = [b for b in self.state.batches.batches if b.phase is BatchPhase.IDLE and b.members]
        if len(batches) > 1:
            batches.sort(key=lambda batch: batch.phase_stamp)
        for batch in batches:  # noqa: SIM110 (`any` over a generator costs more than the rest of this)
            if self._advance(batch, works):
                return True
        return False

    def _advance(self, batch: Batch, works: list[Work]) -> bool:
        state = self.state
        verifier_free = self._verify is None
        if state.speculating and state.drafter_up:
            if self._draft is None:
                made = build_draft(state, batch, self._next_work_id, verifier_free)
                if made is not None:
                    self._next_work_id += 1
                    state.batches.set_phase(batch, BatchPhase.DRAFTING)
                    self._draft = made
                    works.append(made.work)
                    return True
                if not verifier_free or not batch.members:
                    return False  # stay open for others to join until the target is free
                state.batches.set_phase(batch, BatchPhase.DRAFTED)
                return True
            if any(can_draft(seq) for seq in batch.members.values()):
                return False  # wait for the drafter
        if not verifier_free:
            return False
        if state.speculating:
            mark_undrafted(batch, ZeroDraft.POLICY if state.drafter_up else ZeroDraft.DRAFTER_DOWN)
        state.batches.set_phase(batch, BatchPhase.DRAFTED)
        return True

    # --------------------------------------------------------------- second verb

    def update(self, event: Event, now_s: float) -> list[RequestOutput]:
        """Take in what happened.

        Args:
            event: from the world.
            now_s: when it was seen, seconds on the backend's clock.

        Returns:
            The requests that ended with it.

        Raises:
            WorldError: the event breaks the contract of the seam.
        """
        state = self.state
        assert now_s >= state.now_s, (now_s, state.now_s)
        state.now_s = now_s
        match event:
            case WorkDone():
                return self._work_done(event)
            case RequestArrived(request):
                refused = state.add(request)
                return [] if refused is None else [refused]
            case RequestAborted(request_id):
                seq = state.sequences.get(request_id)
                return [] if seq is None else [state.finish(seq, FinishReason.ABORT)]
            case WorkFailed():
                return self._work_failed(event)
            case DrafterLost():
                self._lose_drafter()
            case DrafterReady():
                if state.draft_pool is None:
                    raise WorldError("a drafter came up, but num_draft_blocks is 0")
                state.drafter_up = True
        return []

    def _work_done(self, event: WorkDone) -> list[RequestOutput]:
        verify, draft = self._verify, self._draft
        result = event.result
        if verify is not None and event.work_id == verify.work.work_id:
            if not isinstance(result, VerifyResult):
                raise WorldError(f"work {event.work_id} is a verification, its result is not")
            batch = self.state.batches.batches[verify.work.batch]
            outputs = apply_verify(self.state, batch, verify, result)
            self._verify = None
            batch.num_failures = 0
            self.state.batches.set_phase(batch, BatchPhase.IDLE)
            return outputs
        if draft is not None and event.work_id == draft.work.work_id:
            if not isinstance(result, DraftResult):
                raise WorldError(f"work {event.work_id} is a draft, its result is not")
            apply_draft(draft, result)
            self._end_draft(draft)
        else:
            self._ignore_void(event.work_id)
        return []

    def _end_draft(self, draft: DraftInFlight) -> None:
        self._draft = None
        batch = self.state.batches.batches[draft.work.batch]
        self.state.batches.set_phase(batch, BatchPhase.DRAFTED if batch.members else BatchPhase.IDLE)

    def _ignore_void(self, work_id: int) -> None:
        if work_id not in self._void_work_ids:
            raise WorldError(f"work {work_id} is not in flight")
        del self._void_work_ids[work_id]

    def _work_failed(self, event: WorkFailed) -> list[RequestOutput]:
        verify, draft = self._verify, self._draft
        if draft is not None and event.work_id == draft.work.work_id:
            cancel_draft(draft, ZeroDraft.DRAFT_FAILED)
            self._end_draft(draft)
            return []
        if verify is None or event.work_id != verify.work.work_id:
            self._ignore_void(event.work_id)
            return []
        state = self.state
        batch = state.batches.batches[verify.work.batch]
        self._verify = None
        cancel_verify(state, verify)
        state.batches.set_phase(batch, BatchPhase.IDLE)
        batch.num_failures += 1
        if batch.num_failures < self.config.max_verify_failures:
            return []
        batch.num_failures = 0
        detail = f"verification failed {self.config.max_verify_failures} times in a row: {event.message}"
        return [state.finish(seq, FinishReason.ERROR, detail) for seq in tuple(batch.members.values())]

    def _lose_drafter(self) -> None:
        if self._draft is not None:
            draft = self._draft
            cancel_draft(draft, ZeroDraft.DRAFTER_DOWN)
            self._void_work_ids[draft.work.work_id] = None
            self._end_draft(draft)
        self.state.lose_drafter()

    # ------------------------------------------------------------------- checks

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.state.sequences)

    @property
    def num_in_flight(self) -> int:
        """Works that have not come back."""
        return (self._draft is not None) + (self._verify is not None)

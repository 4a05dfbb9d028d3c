"""The scheduler: two verbs, `schedule` and `update`, over pure state.

Law of this file: no clock, no I/O, no token ids, no way to tell which world it is in. At most one work is in flight
per device group. Everything is event-driven: target free and some batch DRAFTED -> verify it; drafter free and some
batch IDLE -> draft it; drafter free and nothing to draft -> let it catch up. Alternation, cold start, single requests
and draining follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from minedraft.batch import DRAFTED_PHASE, DRAFTING_PHASE, IDLE_PHASE, VERIFYING_PHASE, Batch
from minedraft.drafting import DraftInFlight, apply_draft, build_draft, cancel_draft, mark_undrafted, wants_draft
from minedraft.ingestion import apply_ingestion, build_ingestion, cancel_ingestion
from minedraft.kv_cache import KVPool, NoPool, PagedPool
from minedraft.policy import Mode, Policies, PolicyError
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
    RequestDisplaced,
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
        if draft_pool is None and not config.draft_keeps_kv:
            draft_pool = NoPool(config.block_size)
        elif draft_pool is None and config.num_draft_blocks:
            draft_pool = PagedPool(config.num_draft_blocks, config.block_size)
        self.config = config
        self.policies = policies
        self.state = SchedulerState(config, policies, target_pool, draft_pool)
        self._draft: DraftInFlight | None = None
        self._verify: VerifyInFlight | None = None
        self._void_work_ids: dict[int, None] = {}  # draft works whose drafter died; a late result is ignored
        self._next_work_id = 0
        self._may_ingest = True  # no ingestion has failed since the last verification began
        self._policy_error: PolicyError | None = None

    def use_policies(self, policies: Policies) -> None:
        """Have other policies decide from now on, as after a `PolicyError` that must not end the run.

        A journal doesn't tell of it: what is decided from here on can't be replayed.
        """
        self.policies = policies
        self.state.use_policies(policies)
        self._policy_error = None  # those that failed decide no more

    # ---------------------------------------------------------------- first verb

    def schedule(self, now_s: float) -> list[Work]:
        """Decide what to start at this moment.

        Args:
            now_s: the time, seconds on the backend's clock; never decreases.

        Returns:
            Works to submit in this order: at most one per free device group.

        Raises:
            PolicyError: a policy's decision is illegal; nothing of that decision was done. If works had been decided
                before it in the same call, they are returned, and the next call raises.
        """
        self._advance_clock(now_s)
        if self._policy_error is not None:
            error, self._policy_error = self._policy_error, None
            raise error
        state = self.state
        if not state.sequences or (self._verify is not None and not self._can_draft()):
            return []  # nobody is there, or no device is free: whatever is decided later is decided knowing more
        works: list[Work] = []
        try:
            self._decide(works)
        except PolicyError as error:
            if not works:
                raise
            self._policy_error = error  # what was decided before stands and must be submitted
        return works

    def _advance_clock(self, now_s: float) -> None:
        if now_s < self.state.now_s:
            raise WorldError(f"time went back from {self.state.now_s!r} s to {now_s!r} s")
        self.state.now_s = now_s

    def _decide(self, works: list[Work]) -> None:
        state = self.state
        policy: Any = self.policies.mode  # its answer may be anything until it is checked
        try:
            mode = policy.choose_mode(state.load)
            if mode is not state.mode:
                mode = Mode(mode)
        except Exception as error:
            raise PolicyError(f"mode policy failed: {error}") from error
        if mode is not state.mode:
            state.set_mode(mode)
        while True:
            num_victims = state.num_victims
            if state.waiting.num_live:
                state.admit_waiting()
            if self.config.num_batches > 1:
                self._rebalance()
            while (self._verify is None and self._start_verify(works)) or self._start_draft(works):
                pass
            if state.num_victims == num_victims:  # else there may be room for others now
                return

    def _can_draft(self) -> bool:
        """Whether a drafter is there, wanted and free."""
        return self._draft is None and self.state.speculating and self.state.drafter_up

    def _rebalance(self) -> None:
        """Carry out the rebalance policy's moves, and empty batches that the mode has no use for."""
        state, manager = self.state, self.state.batches
        num_active = state.num_active_batches
        for batch in manager.batches[num_active:]:
            if batch.phase is IDLE_PHASE and batch.members:
                room = manager.max_batch_size - manager.batches[0].size
                manager.move([(seq, 0) for seq in islice(tuple(batch.members.values()), room)])
        if num_active < 2 or not state.running:
            return
        policy: Any = self.policies.rebalance
        try:
            moves = policy.moves(manager.views[:num_active])
            moves = tuple(moves) if moves else ()
        except Exception as error:
            raise PolicyError(f"rebalance policy failed: {error}") from error
        try:
            checked = self._check_moves(moves, num_active) if moves else ()
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(f"rebalance policy failed: {error}") from error
        manager.move(checked)

    def _check_moves(self, moves: Iterable[Any], num_active: int) -> list[tuple[SequenceState, int]]:
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
            to_batch: object = move.to_batch
            if type(to_batch) is not int or not 0 <= to_batch < num_active or to_batch == seq.batch:
                raise PolicyError(f"rebalance policy moves {seq.request_id!r} to batch {to_batch!r}")
            source = manager.batches[seq.batch]
            if source.phase is not IDLE_PHASE or seq.request_id not in source.members:
                raise PolicyError(f"rebalance policy moves {seq.request_id!r} out of a batch that is not IDLE")
            sizes[seq.batch] -= 1
            sizes[to_batch] += 1
            moved[seq.request_id] = None
            checked.append((seq, to_batch))
        if any(size > manager.max_batch_size for size in sizes):
            raise PolicyError(f"rebalance policy's moves make batches of {sizes}, over {manager.max_batch_size}")
        return checked

    def _start_verify(self, works: list[Work]) -> bool:
        """Give a free target the batch that has waited longest for it."""
        state = self.state
        batch = self._next_for_target()
        if batch is None:
            return False
        if batch.phase is IDLE_PHASE:
            if state.speculating:
                mark_undrafted(state, batch)
            since = batch.phase_stamp
            state.batches.set_phase(batch, DRAFTED_PHASE)
            batch.phase_stamp = since  # it has been waiting for the target, and keeps its turn if a policy fails here
        made = build_verify(state, batch, self._next_work_id)
        if made is None:
            # All members were preempted, which already turned the batch IDLE.
            assert batch.phase is IDLE_PHASE, batch.index
            return True
        self._next_work_id += 1
        state.batches.set_phase(batch, VERIFYING_PHASE)
        self._verify = made
        self._may_ingest = True
        works.append(made.work)
        return True

    def _next_for_target(self) -> Batch | None:
        """Of the batches that are DRAFTED, or IDLE with nothing to draft, the one whose phase has lasted longest (I16).

        The target comes before the drafter, so that it never waits for a batch that needs no drafter (I17), and the
        drafter isn't given what the target's work then preempts.
        """
        best: Batch | None = None
        for batch in self.state.batches.batches:
            if not batch.members or (best is not None and batch.phase_stamp > best.phase_stamp):
                continue
            phase = batch.phase
            if phase is DRAFTED_PHASE or (phase is IDLE_PHASE and not wants_draft(self.state, batch)):
                best = batch
        return best

    def _start_draft(self, works: list[Work]) -> bool:
        """Give a free drafter the batch that has been IDLE for the longest time and has anything to draft."""
        if not self._can_draft():
            return False
        state = self.state
        batches: list[Batch] = []
        for batch in state.batches.batches:
            if batch.phase is IDLE_PHASE and batch.members:
                batches.append(batch)  # noqa: PERF401 - a comprehension costs more for so few
        if len(batches) > 1:
            batches.sort(key=lambda batch: batch.phase_stamp)
        for batch in batches:
            made = build_draft(state, batch, self._next_work_id)
            if made is not None:
                self._next_work_id += 1
                state.batches.set_phase(batch, DRAFTING_PHASE)
                self._draft = made
                works.append(made.work)
                return True
            if self._verify is None and batch.members:  # else it stays open for others to join
                state.batches.set_phase(batch, DRAFTED_PHASE)
                return True
        return self._start_ingestion(works)

    def _start_ingestion(self, works: list[Work]) -> bool:
        """Let a drafter that has nothing to draft take in, beside the target's work, what it will have to."""
        config = self.config
        if self._verify is None or not (self._may_ingest and config.draft_ingests_beside and config.draft_keeps_kv):
            return False
        made = build_ingestion(self.state, self._verify.work, self._next_work_id)
        if made is None:
            return False
        self._next_work_id += 1
        self._draft = made
        works.append(made.work)
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
        self._advance_clock(now_s)
        state = self.state
        # Not a `match`: its class patterns cost more than the rest of this for an event that comes with every request.
        if isinstance(event, WorkDone):
            return self._work_done(event)
        if isinstance(event, RequestArrived):
            refused = state.add(event.request)
            return [] if refused is None else [refused]
        if isinstance(event, RequestAborted):
            seq = state.sequences.get(event.request_id)
            return [] if seq is None else [state.finish(seq, FinishReason.ABORT)]
        if isinstance(event, WorkFailed):
            return self._work_failed(event)
        if isinstance(event, DrafterLost):
            self._lose_drafter()
            return []
        if isinstance(event, RequestDisplaced):
            return self._displaced(event)
        assert isinstance(event, DrafterReady), event
        if state.draft_pool is None:
            raise WorldError("a drafter came up, but num_draft_blocks is 0")
        if state.drafter_up:  # a new one took the old one's place unseen: what that one held is gone
            self._lose_drafter()
        state.drafter_up = True
        return []

    def _displaced(self, event: RequestDisplaced) -> list[RequestOutput]:
        seq = self.state.sequences.get(event.request_id)
        if seq is None:
            return []
        if event.num_tokens < seq.request.prompt_len:
            raise WorldError(f"{event.request_id!r} was displaced with {event.num_tokens} tokens, less than its prompt")
        ended = self.state.displace(seq, event.num_tokens)
        return [] if ended is None else [ended]

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
            self.state.batches.set_phase(batch, IDLE_PHASE)
            return outputs
        if draft is not None and event.work_id == draft.work.work_id:
            if not isinstance(result, DraftResult):
                raise WorldError(f"work {event.work_id} is a draft, its result is not")
            if draft.is_ingestion:
                apply_ingestion(draft, result)
            else:
                apply_draft(self.state, draft, result)
            self._end_draft(draft)
        else:
            self._ignore_void(event.work_id)
        return []

    def _end_draft(self, draft: DraftInFlight) -> None:
        self._draft = None
        if draft.is_ingestion:
            return
        batch = self.state.batches.batches[draft.work.batch]
        self.state.batches.set_phase(batch, DRAFTED_PHASE if batch.members else IDLE_PHASE)

    def _cancel_draft(self, draft: DraftInFlight, cause: ZeroDraft) -> None:
        if draft.is_ingestion:
            cancel_ingestion(draft)
            self._may_ingest = False
        else:
            cancel_draft(self.state, draft, cause)
        self._end_draft(draft)

    def _ignore_void(self, work_id: int) -> None:
        if work_id not in self._void_work_ids:
            raise WorldError(f"work {work_id} is not in flight")
        del self._void_work_ids[work_id]

    def _work_failed(self, event: WorkFailed) -> list[RequestOutput]:
        verify, draft = self._verify, self._draft
        if draft is not None and event.work_id == draft.work.work_id:
            self._cancel_draft(draft, ZeroDraft.DRAFT_FAILED)
            return []
        if verify is None or event.work_id != verify.work.work_id:
            self._ignore_void(event.work_id)
            return []
        state = self.state
        batch = state.batches.batches[verify.work.batch]
        self._verify = None
        cancel_verify(state, verify)
        state.batches.set_phase(batch, IDLE_PHASE)
        batch.num_failures += 1
        if batch.num_failures < self.config.max_verify_failures:
            return []
        batch.num_failures = 0
        detail = f"verification failed {self.config.max_verify_failures} times in a row: {event.message}"
        return [
            state.finish(seq, FinishReason.ERROR, detail)
            for seq, incarnation in zip(verify.seqs, verify.work.incarnations, strict=True)
            if seq.incarnation == incarnation  # whoever has joined meanwhile has nothing to do with it
        ]

    def _lose_drafter(self) -> None:
        if self._draft is not None:
            draft = self._draft
            self._cancel_draft(draft, ZeroDraft.DRAFTER_DOWN)
            self._void_work_ids[draft.work.work_id] = None
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

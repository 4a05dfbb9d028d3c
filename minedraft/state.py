"""The scheduler's state, and the few transitions that keep it whole: admit, preempt, drop draft KV, finish.

Law of this file: every change of membership, KV ownership or status goes through here, so that the invariants I1, I2,
I6 and I8 can be read off one page.
"""

from __future__ import annotations

from typing import Any

from minedraft.batch import BatchManager
from minedraft.kv_cache import KVPool, blocks_for
from minedraft.policy import Mode, Policies, PolicyError, PreemptionMode
from minedraft.request import FINISHED, PREEMPTED, RUNNING, FinishReason, Request, RequestId, RequestOutput
from minedraft.scheduler_config import SchedulerConfig
from minedraft.sequence import NO_INCARNATION, SequenceState
from minedraft.waiting import Rank, WaitingQueue
from minedraft.work import WorldError, ZeroDraft


class SchedulerState:
    """Everything that the scheduler knows.

    Attributes:
        sequences: all that are alive, waiting or running, by id.
        running: members of the sub-batches, in order of admission.
        target_freed: (id, incarnation) pairs whose target KV the world has yet to be told to drop.
        draft_freed: the same for the drafter.
        num_rounds: per-request verifications that carried drafts, over all requests.
        asks_once_per_batch: whether the draft-length policy need not be asked about each request.
        has_steady_rounds: whether policies and world allow of `steady.py`.
    """

    def __init__(
        self, config: SchedulerConfig, policies: Policies, target_pool: KVPool, draft_pool: KVPool | None
    ) -> None:
        self.config = config
        self.target_pool = target_pool
        self.draft_pool = draft_pool
        self.batches = BatchManager(config.num_batches, config.max_batch_size)
        for batch in self.batches.batches:
            batch.columns.target.block_size = target_pool.block_size
            batch.columns.draft.block_size = 1 if draft_pool is None else draft_pool.block_size
        self.waiting = WaitingQueue()
        self.sequences: dict[RequestId, SequenceState] = {}
        self.running: dict[RequestId, SequenceState] = {}
        self.target_freed: list[tuple[RequestId, int]] = []
        self.draft_freed: list[tuple[RequestId, int]] = []
        self.mode = Mode.AR
        self.speculating = False
        self.num_active_batches = 1
        self.drafter_up = draft_pool is not None
        self.now_s = 0.0
        self.num_arrived = 0
        self.num_finished = 0
        self.num_victims = 0
        self.num_rounds = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._next_incarnation = 0
        self.has_steady_rounds = draft_pool is not None
        self.use_policies(policies)
        self.load = Load(self)

    def use_policies(self, policies: Policies) -> None:
        """Have these decide from now on; whoever was ranked by others keeps that rank."""
        self.policies = policies
        self.keeps_all_drafts = self.config.draft_capacity is None and policies.keeps_all
        self.asks_once_per_batch = hasattr(policies.draft_length, "num_draft_tokens_of_all")
        # Once they were ruled out, requests may hold probabilities, or fewer drafts than were made: no way back.
        self.has_steady_rounds = self.has_steady_rounds and self.keeps_all_drafts and self.asks_once_per_batch
        self.settle()

    def set_mode(self, mode: Mode) -> None:
        """Put a mode in force; batches that it has no use for are emptied at their IDLE moments."""
        if mode is Mode.PSD and self.config.num_batches < 2:
            raise PolicyError(f"mode policy chose psd, but num_batches is {self.config.num_batches}")
        if mode is not Mode.AR and self.draft_pool is None:
            raise PolicyError(f"mode policy chose {mode}, but num_draft_blocks is 0")
        self.mode = mode
        self.speculating = mode is not Mode.AR
        self.num_active_batches = self.config.num_batches if mode is Mode.PSD else 1

    def add(self, request: Request) -> RequestOutput | None:
        """Take a new request in; returns an output only if it is refused."""
        if request.request_id in self.sequences:
            raise WorldError(f"request id {request.request_id!r} is already alive")
        config = self.config
        if request.prompt_len >= config.model_len:
            self.num_arrived += 1
            self.num_finished += 1
            detail = f"prompt_len {request.prompt_len} leaves no room for output in max_model_len {config.model_len}"
            return RequestOutput(request.request_id, FinishReason.ERROR, request.prompt_len, 0, 0, detail)
        seq = self._new_sequence(request)
        seq.rank = self._rank(seq)  # before anything is changed: a policy may fail
        self.num_arrived += 1
        self.sequences[seq.request_id] = seq
        self.waiting.push(seq, seq.rank)
        return None

    def _new_sequence(self, request: Request) -> SequenceState:
        config = self.config
        limit = min(request.prompt_len + request.max_tokens, config.model_len)
        draft_limit = min(limit, config.draft_len)
        max_draft = config.num_speculative_tokens
        cause = ZeroDraft.POLICY
        if request.max_draft_tokens is not None:
            max_draft = min(max_draft, request.max_draft_tokens)
            cause = ZeroDraft.OPTED_OUT
        if request.prompt_len + 2 > draft_limit:
            max_draft, cause = 0, ZeroDraft.LENGTH_LIMIT
        elif self.draft_pool is not None:
            needed = blocks_for(request.prompt_len + 1, self.draft_pool.block_size)
            if needed > self.draft_pool.num_blocks:
                max_draft, cause = 0, ZeroDraft.DRAFT_KV
        seq = SequenceState(request, self.num_arrived, limit, draft_limit, max_draft)
        seq.no_draft_cause = cause
        return seq

    def _rank(self, seq: SequenceState) -> Rank:
        policy: Any = self.policies.admission
        try:
            rank = policy.rank(seq.view)
            values = rank if isinstance(rank, tuple) else (rank,)
            ranked = tuple([float(value) for value in values])
        except Exception as error:
            raise PolicyError(f"admission policy failed on {seq.request_id!r}: {error}") from error
        for value in ranked:
            if value != value:
                raise PolicyError(f"admission policy ranked {seq.request_id!r} as {rank}: NaN can't be ordered")
        return ranked

    def admit_waiting(self) -> None:
        """Start waiting requests in rank order while limits, both pools and an IDLE moment allow it.

        Strict order: a head that doesn't fit is waited for, nobody passes it (I15). A request starts only when its
        whole known context fits, or it would be preempted over and over.
        """
        limit, batches = self.config.running_limit, self.batches
        while len(self.running) < limit and (seq := self.waiting.head()) is not None:
            if not batches.is_open(self.num_active_batches):
                return
            num_cached = self.target_pool.num_cached_tokens(seq.request_id)
            if not self._reserve_context(seq):
                return
            try:
                index = self._choose_batch(seq)
            except PolicyError:
                self.release(seq)
                raise
            self.waiting.pop()
            seq.start(self._next_incarnation, num_cached)
            self._next_incarnation += 1
            batches.assign(seq, index)
            self.running[seq.request_id] = seq

    def _choose_batch(self, seq: SequenceState) -> int:
        if self.num_active_batches == 1:
            return 0
        policy: Any = self.policies.assignment  # its answer may be anything until it is checked
        views = self.batches.views[: self.num_active_batches]
        try:
            index: object = policy.choose_batch(seq.view, views)
        except Exception as error:
            raise PolicyError(f"assignment policy failed on {seq.request_id!r}: {error}") from error
        if type(index) is not int or not 0 <= index < len(views):
            raise PolicyError(f"assignment policy chose batch {index!r} of {len(views)}")
        if not views[index].has_room:
            raise PolicyError(f"assignment policy chose batch {index}, which is full")
        return index

    def _reserve_context(self, seq: SequenceState) -> bool:
        """Target blocks for all known tokens, or nothing; with them draft blocks, if there is room for those too.

        A short draft pool holds nobody back: a request without draft KV is served with k = 0 until there is room.
        """
        pool = self.target_pool
        spare = self.config.watermark_blocks if self.running else 0
        if pool.num_missing_blocks(seq.request_id, seq.num_tokens) + spare > 0:
            return False
        seq.target_capacity = pool.reserve(seq.request_id, seq.num_tokens)
        if not seq.target_capacity:
            return False
        if self._wants_draft_kv(seq) and self.has_draft_room(seq.num_tokens):
            assert self.draft_pool is not None
            seq.draft_capacity = self.draft_pool.reserve(seq.request_id, seq.num_tokens)
        return True

    def _wants_draft_kv(self, seq: SequenceState) -> bool:
        """Whether it is going to be drafted, as far as is known when it is admitted."""
        if not self.speculating or not self.drafter_up or not seq.max_draft:
            return False
        return seq.num_tokens + 2 <= seq.draft_limit

    def has_draft_room(self, num_tokens: int) -> bool:
        """Whether the draft pool can take a newcomer of this length and still grow by a block per running request."""
        pool = self.draft_pool
        return pool is not None and blocks_for(num_tokens, pool.block_size) + len(self.running) <= pool.num_free_blocks

    def release(self, seq: SequenceState) -> None:
        """Give back all blocks of a sequence, and tell both groups to drop what they keep for it."""
        self.drop_draft_kv(seq)
        if seq.target_capacity:
            self.target_pool.release(seq.request_id)
            seq.target_capacity = 0
            if seq.incarnation != NO_INCARNATION:  # else no world has ever heard of it
                self.target_freed.append((seq.request_id, seq.incarnation))

    def drop_draft_kv(self, seq: SequenceState) -> None:
        """Give back the draft blocks of a sequence; its text is not touched."""
        if seq.columns is not None:
            self.batches.batches[seq.batch].columns.remove(seq)
        if seq.draft_capacity:
            assert self.draft_pool is not None
            self.draft_pool.release(seq.request_id)
            seq.draft_capacity = 0
            if seq.in_drafter:
                self.draft_freed.append((seq.request_id, seq.incarnation))
        seq.in_drafter = False
        seq.reset_draft_kv()

    def preempt(self, seq: SequenceState, mode: PreemptionMode) -> None:
        """Take KV away from a running sequence."""
        self.num_victims += 1
        if mode is PreemptionMode.DROP_DRAFT_KV:
            self.drop_draft_kv(seq)
            return
        rank = self._rank(seq)  # before anything is changed: a policy may fail
        self._leave(seq)
        seq.reset_progress()
        seq.set_status(PREEMPTED)
        seq.num_preemptions += 1
        self.waiting.push(seq, rank)

    def displace(self, seq: SequenceState, num_tokens: int) -> RequestOutput | None:
        """The world has dropped a request's KV by itself: it waits again, in its old place.

        Args:
            seq: the request, waiting or running.
            num_tokens: its tokens, as the world counts them.

        Returns:
            An output if it is at its length limit.
        """
        was_running = seq.status is RUNNING
        if was_running:
            rank = self._rank(seq)  # before anything is changed: a policy may fail
            self._leave(seq)
            seq.set_status(PREEMPTED)
            seq.num_preemptions += 1
            self.waiting.push(seq, rank)
        seq.num_tokens = num_tokens
        seq.reset_progress()
        return self.finish(seq, FinishReason.LENGTH) if num_tokens >= seq.limit else None

    def _leave(self, seq: SequenceState) -> None:
        self.batches.remove(seq)
        del self.running[seq.request_id]
        self.release(seq)

    def finish(self, seq: SequenceState, reason: FinishReason, detail: str = "") -> RequestOutput:
        """End a request, wherever it is."""
        was_running = seq.status is RUNNING
        if was_running:
            self._leave(seq)
        seq.reset_progress()
        seq.set_status(FINISHED)
        if not was_running:
            self.waiting.note_dead()
        del self.sequences[seq.request_id]
        self.num_finished += 1
        prompt_len = seq.request.prompt_len
        return RequestOutput(
            seq.request_id, reason, prompt_len, seq.num_tokens - prompt_len, seq.num_preemptions, detail
        )

    def refresh(self) -> None:
        """Bring all sequences' own states up to date, for who looks at them from outside."""
        for batch in self.batches.batches:
            batch.columns.refresh()

    def settle(self) -> None:
        """Make the sequences' own states the truth about all of them: something is going to happen to some."""
        for batch in self.batches.batches:
            batch.columns.settle()

    def lose_drafter(self) -> None:
        """All draft KV is gone; drafts that already arrived stay usable."""
        self.drafter_up = False
        self.settle()
        for seq in self.running.values():
            self.drop_draft_kv(seq)
        self.draft_freed.clear()  # a new drafter starts empty


class Load:
    """The `LoadView` over a state."""

    __slots__ = ("_state",)

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def now_s(self) -> float:
        """Time of the decision."""
        return self._state.now_s

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._state.waiting.num_live

    @property
    def num_running(self) -> int:
        """Requests in a sub-batch."""
        return len(self._state.running)

    @property
    def mode(self) -> Mode:
        """Mode in force."""
        return self._state.mode

    @property
    def drafter_up(self) -> bool:
        """Whether a drafter is there."""
        return self._state.drafter_up

    @property
    def num_free_target_blocks(self) -> int:
        """Free blocks of the target pool."""
        return self._state.target_pool.num_free_blocks

    @property
    def num_free_draft_blocks(self) -> int:
        """Free blocks of the draft pool."""
        pool = self._state.draft_pool
        return 0 if pool is None else pool.num_free_blocks

    @property
    def num_rounds(self) -> int:
        """Per-request verifications that carried drafts."""
        return self._state.num_rounds

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified so far."""
        return self._state.num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted so far."""
        return self._state.num_accepted_tokens

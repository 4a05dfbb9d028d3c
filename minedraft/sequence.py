"""The scheduler's own record of a request: counts, membership, incarnation, round.

Law of this file: only the `Scheduler` (and the managers it drives) writes a `SequenceState`; everybody else gets the
read-only `SequenceView`. No token ids, no clock.
"""

from __future__ import annotations

from typing import Protocol

from minedraft.request import LEGAL_TRANSITIONS, RUNNING, WAITING, Request, RequestId, SequenceStatus
from minedraft.work import PREFILL, ZeroDraft

NO_INCARNATION = -1
NO_BATCH = -1


class Refreshable(Protocol):
    """`steady.Columns`, as far as a sequence needs to know them."""

    def refresh(self) -> None:
        """Bring the states of the members up to date."""
        ...


class SequenceState:
    """Mutable state of one live request.

    Attributes:
        request: what was asked for.
        arrival_index: position in the order of arrival, unique.
        rank: what the admission policy thought of it when it arrived; lower goes first.
        limit: `num_tokens` at which the request ends by length.
        draft_limit: `num_tokens + k + 1` may not exceed this; the smaller of `limit` and the draft model's context.
        max_draft: upper bound on k from the request and the configuration; 0 = never drafts, holds no draft KV.
        incarnation: number of the current stay in the running set, unique in the run; NO_INCARNATION otherwise.
        round: verify rounds planned for in the current incarnation; numbers its drafts.
        num_tokens: committed tokens, prompt included.
        num_uncomputed: committed tokens whose target KV is not valid yet, at least 1; 1 for a request that decodes.
            Kept instead of the number that is valid, since it doesn't change from one decode step to the next.
        num_draft_computed: committed tokens whose draft KV is valid (never counts a draft).
        num_drafted: drafts that wait for their verification; consumed at most once.
        num_selected: how many of them will be verified, from the front.
        drafting: its batch is being drafted, this sequence is in the work, and the result still counts.
        num_ingesting: committed tokens that the drafter takes in by an ingestion in flight whose result still counts.
        in_drafter: the drafter was given a work that names this incarnation, so it must be told to forget it.
        zero_cause: why `num_drafted` is 0.
        no_draft_cause: why `max_draft` is 0, if it is.
        probs: the drafter's probabilities of the pending drafts, if the world has them.
        target_capacity: tokens that the held target blocks can take.
        draft_capacity: the same for the draft pool.
        batch: index of its sub-batch, NO_BATCH unless running.
        num_preemptions: recompute preemptions suffered.
        num_rounds: verify rounds that carried drafts.
        num_draft_tokens: drafts verified in all.
        num_accepted_tokens: drafts accepted in all.
        columns: those that hold the truth about this sequence at the moment (see `steady.py`); None if it is here.
    """

    __slots__ = (
        "arrival_index",
        "batch",
        "columns",
        "draft_capacity",
        "draft_limit",
        "drafting",
        "in_drafter",
        "incarnation",
        "limit",
        "max_draft",
        "no_draft_cause",
        "num_accepted_tokens",
        "num_draft_computed",
        "num_draft_tokens",
        "num_drafted",
        "num_ingesting",
        "num_preemptions",
        "num_rounds",
        "num_selected",
        "num_tokens",
        "num_uncomputed",
        "probs",
        "rank",
        "request",
        "request_id",
        "round",
        "status",
        "target_capacity",
        "view",
        "zero_cause",
    )

    def __init__(self, request: Request, arrival_index: int, limit: int, draft_limit: int, max_draft: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival_index = arrival_index
        self.rank: tuple[float, ...] = ()
        self.limit = limit
        self.draft_limit = draft_limit
        self.max_draft = max_draft
        self.status = WAITING
        self.incarnation = NO_INCARNATION
        self.round = 0
        self.num_tokens = request.prompt_len
        self.num_uncomputed = request.prompt_len
        self.num_draft_computed = 0
        self.num_drafted = 0
        self.num_selected = 0
        self.probs: tuple[float, ...] = ()
        self.drafting = False
        self.num_ingesting = 0
        self.in_drafter = False
        self.zero_cause = PREFILL
        self.no_draft_cause = ZeroDraft.OPTED_OUT
        self.target_capacity = 0
        self.draft_capacity = 0
        self.batch = NO_BATCH
        self.num_preemptions = 0
        self.num_rounds = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.columns: Refreshable | None = None
        self.view = SequenceView(self)

    @property
    def num_computed(self) -> int:
        """Committed tokens whose target KV is valid."""
        return self.num_tokens - self.num_uncomputed

    def set_status(self, status: SequenceStatus) -> None:
        """Move along `LEGAL_TRANSITIONS`."""
        assert status in LEGAL_TRANSITIONS[self.status], (self.request_id, self.status, status)
        self.status = status

    def start(self, incarnation: int, num_cached: int) -> None:
        """Enter the running set with no KV computed but what the pool has cached, and no draft pending."""
        assert 0 <= num_cached < self.num_tokens, (self.request_id, num_cached)
        self.set_status(RUNNING)
        self.incarnation = incarnation
        self.round = 0
        self.num_uncomputed = self.num_tokens - num_cached

    def reset_progress(self) -> None:
        """Forget KV, drafts and incarnation, keep the committed tokens: what a recompute preemption does."""
        self.incarnation = NO_INCARNATION
        self.batch = NO_BATCH
        self.num_uncomputed = self.num_tokens
        self.clear_draft()
        self.reset_draft_kv()

    def reset_draft_kv(self) -> None:
        """Forget the drafter's KV, and what is on its way into it.

        Drafts already made stay good: they are tokens, and the target judges them.
        """
        self.num_draft_computed = self.num_ingesting = 0
        if self.drafting:
            self.drafting = False
            self.zero_cause = ZeroDraft.DRAFT_KV

    def clear_draft(self) -> None:
        """Hold no drafts: they were verified, or are void."""
        self.num_drafted = self.num_selected = 0
        self.probs = ()


class SequenceView:
    """What a policy may know of a request: nothing that the future holds (no true output length)."""

    __slots__ = ("_seq",)

    def __init__(self, seq: SequenceState) -> None:
        self._seq = seq

    def __repr__(self) -> str:
        return f"<sequence {self.request_id} batch={self.batch} tokens={self.num_tokens}>"

    def _fresh(self) -> SequenceState:
        seq = self._seq
        if seq.columns is not None:
            seq.columns.refresh()
        return seq

    @property
    def request(self) -> Request:
        """The request as it came in."""
        return self._seq.request

    @property
    def request_id(self) -> RequestId:
        """Its id."""
        return self._seq.request_id

    @property
    def arrival_index(self) -> int:
        """Position in the order of arrival; smaller is older."""
        return self._seq.arrival_index

    @property
    def status(self) -> SequenceStatus:
        """Where it is in its life."""
        return self._seq.status

    @property
    def batch(self) -> int:
        """Its sub-batch, -1 unless running."""
        return self._seq.batch

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt included."""
        return self._fresh().num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        seq = self._fresh()
        return seq.num_tokens - seq.request.prompt_len

    @property
    def num_computed_tokens(self) -> int:
        """Tokens with valid target KV."""
        return self._fresh().num_computed

    @property
    def num_draft_computed_tokens(self) -> int:
        """Committed tokens with valid draft KV."""
        return self._fresh().num_draft_computed

    @property
    def target_capacity_tokens(self) -> int:
        """Tokens that its target blocks can hold."""
        return self._fresh().target_capacity

    @property
    def draft_capacity_tokens(self) -> int:
        """Tokens that its draft blocks can hold."""
        return self._fresh().draft_capacity

    @property
    def has_draft(self) -> bool:
        """Whether drafts wait for their verification."""
        return self._fresh().num_drafted > 0

    @property
    def max_draft_tokens(self) -> int:
        """Upper bound on k for this request in any round."""
        return self._seq.max_draft

    @property
    def num_preemptions(self) -> int:
        """Recompute preemptions so far."""
        return self._seq.num_preemptions

    @property
    def num_rounds(self) -> int:
        """Verified rounds that carried drafts."""
        return self._fresh().num_rounds

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified so far."""
        return self._fresh().num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted so far."""
        return self._fresh().num_accepted_tokens

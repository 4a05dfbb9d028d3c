"""Steady rounds: the members of a batch to whom nothing happens but text, as columns instead of objects.

In most rounds of most batches everybody decodes, drafts the same k and holds the KV for it. Such members are kept
here: a round of theirs is a few C loops over columns, and none of their `SequenceState`s is touched. On vLLM's critical
path that is what counts: 64 objects are 64 times several cache lines that have gone cold while the model ran.

Law of this file: it changes the cost of a decision, never the decision. Of the members of `Columns` the columns hold
the truth, and their states are stale, until `refresh` writes them back or `settle` lets them go. Whoever reads or
changes a state outside of a steady round comes through there first: `SequenceView`, `BatchManager.remove` and
`SchedulerState` see to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress, count, repeat
from operator import add, ge, gt, le, sub
from typing import Final

from minedraft.kv_cache import KVPool
from minedraft.request import FinishReason, RequestId
from minedraft.sequence import SequenceState

IDLE: Final = 0
DRAFTING: Final = 1
DRAFTED: Final = 2  # and while they are verified

NO_WORK: Final = -1
LAST_ROUNDS: Final = 2  # rounds before a limit that are not steady, so that limits need be looked at seldom
LEAST_MEMBERS: Final = 8  # of a batch that is worth columns
LEAST_ROUNDS: Final = 8  # that a member must have before it to be worth its coming and going
ROUNDS_OF_REST: Final = 16  # rounds without columns after a pool was short: others may have to give way meanwhile

Ints = tuple[int, ...]
Ended = list[tuple[SequenceState, FinishReason]]


class Room:
    """A column of what the members' blocks in one pool can hold.

    Attributes:
        capacities: tokens per member, see `SequenceState.target_capacity`.
        full: per member, computed tokens beyond which the next round needs another block.
        spare: per member, computed tokens up to which the last block is empty.
        block_size: tokens per block.
        is_known: whether only those that the last `reserve` gave blocks may have an empty one.
    """

    __slots__ = ("_grown", "block_size", "capacities", "full", "is_known", "spare")

    def __init__(self) -> None:
        self.block_size = 1
        self.is_known = False
        self.capacities: list[int] = []
        self.full: list[int] = []
        self.spare: list[int] = []
        self._grown: list[tuple[int, int]] = []  # whose capacity the last `reserve` raised, and what it was before

    def set(self, i: int, capacity: int, more: int) -> None:
        """Note a member's capacity; its next round reaches `more` tokens beyond the computed ones."""
        self.capacities[i] = capacity
        self.full[i] = capacity - more
        self.spare[i] = capacity - self.block_size

    def append(self, capacity: int, more: int) -> None:
        """The same of a new member."""
        self.capacities.append(capacity)
        self.full.append(capacity - more)
        self.spare.append(capacity - self.block_size)
        self.is_known = False

    def remove(self, i: int) -> None:
        """A member has gone."""
        del self.capacities[i], self.full[i], self.spare[i]
        self.is_known = False

    def clear(self) -> None:
        """All have gone."""
        self.capacities.clear()
        self.full.clear()
        self.spare.clear()
        self.is_known = False

    def reserve(self, pool: KVPool, request_ids: tuple[RequestId, ...], computed: Ints, more: int) -> bool:
        """Blocks for the next round, without anybody's giving way; False, and nothing changed, if the pool is short."""
        if self._grown:  # no trim came after the last one, since a policy failed: its blocks are still held
            self._grown.clear()
            self.is_known = False
        for i in list(compress(count(), map(gt, computed, self.full))):
            capacity = pool.reserve(request_ids[i], computed[i] + more)
            if not capacity:
                self.give_back(pool, request_ids, more)
                return False
            self._grown.append((i, self.capacities[i]))
            self.set(i, capacity, more)
        return True

    def give_back(self, pool: KVPool, request_ids: tuple[RequestId, ...], more: int) -> None:
        """Undo the last reservation: who is short must find the pool as if nobody had been steady."""
        for i, before in self._grown:
            self.set(i, pool.trim(request_ids[i], before), more)
        self._grown.clear()

    def trim(self, pool: KVPool, request_ids: tuple[RequestId, ...], computed: Ints, more: int) -> None:
        """Give back blocks behind what is computed."""
        if self.is_known:
            for i, _ in self._grown:
                if computed[i] <= self.spare[i]:
                    self.set(i, pool.trim(request_ids[i], computed[i]), more)
        else:
            for i in list(compress(count(), map(le, computed, self.spare))):
                self.set(i, pool.trim(request_ids[i], computed[i]), more)
            self.is_known = True
        self._grown.clear()


class Columns:
    """Members of one batch, aligned over all columns in the order in which they were admitted.

    Attributes:
        seqs: the members.
        k: drafts of each in every round.
        stage: IDLE, DRAFTING or DRAFTED.
        least_members: members that the batch must have for anybody to be admitted.
        least_rounds: rounds that a member must have before it to be admitted, at least `LAST_ROUNDS`.
        work_id: of the work in flight that all members are the first entries of; NO_WORK if there is none.
        request_ids: of the members; the same object from work to work while nobody comes or goes.
        incarnations: of the members; likewise.
        rounds: see `SequenceState.round`.
        computed: committed tokens with valid target KV, which are all but the last one.
        starts: committed tokens with valid draft KV.
        new: committed tokens that the drafter has yet to ingest, 1 or 2.
        target: room in the target's pool.
        draft: room in the drafter's.
    """

    __slots__ = (
        "_accepted",
        "_calm",
        "_count",
        "_dirty",
        "_drafts_before",
        "_limits",
        "_rest",
        "_rounds_before",
        "_to_add",
        "_until",
        "computed",
        "draft",
        "incarnations",
        "k",
        "least_members",
        "least_rounds",
        "new",
        "request_ids",
        "rounds",
        "seqs",
        "stage",
        "starts",
        "target",
        "work_id",
    )

    def __init__(self) -> None:
        self.k = 0
        self.least_members = LEAST_MEMBERS
        self.least_rounds = LEAST_ROUNDS
        self.stage = IDLE
        self.work_id = NO_WORK
        self.seqs: list[SequenceState] = []
        self.request_ids: tuple[RequestId, ...] = ()
        self.incarnations: Ints = ()
        self.rounds: Ints = ()
        self.computed: Ints = ()
        self.starts: Ints = ()
        self.new: Ints = ()
        self.target = Room()
        self.draft = Room()
        self._until: list[int] = []  # most computed tokens with which a round of k drafts keeps within the limits
        self._limits: list[int] = []  # computed tokens at which a member ends
        self._accepted: list[int] = []  # of `SequenceState.num_accepted_tokens`, what is not in `_to_add`
        self._to_add: list[Ints] = []  # accepted drafts of single rounds
        self._rounds_before: list[int] = []  # the member's count when it came, less `_count` then
        self._drafts_before: list[int] = []
        self._count = 0  # steady rounds so far
        self._calm = 0  # rounds for which no member can come near a limit
        self._rest = 0  # rounds for which nobody is admitted
        self._dirty = False

    # --- Coming and going.

    def set_length(self, k: int) -> None:
        """Draft k from now on; members were there for another k."""
        if k != self.k:
            self.settle()
            self.k = k

    def may_admit(self, num_members: int) -> bool:
        """Whether newcomers are taken in this round, with so many members in the batch."""
        return not self._rest and self.k > 0 and num_members >= self.least_members

    def note_round(self) -> None:
        """A draft work for the batch begins, whoever is in it."""
        if self._rest:
            self._rest -= 1

    def fits(self, seq: SequenceState) -> bool:
        """Whether the next rounds of a running sequence are steady ones, as far as it alone can tell."""
        return (
            seq.num_uncomputed == 1
            and 1 <= seq.num_tokens - seq.num_draft_computed <= 2
            and seq.in_drafter
            and seq.max_draft >= self.k
            and seq.num_tokens + self.least_rounds * (self.k + 1) <= seq.draft_limit
            and seq.draft_capacity > 0
            and seq.round > 0
            and not seq.num_drafted
        )

    def admit(self, seq: SequenceState) -> None:
        """Take a sequence in that fits, between two rounds."""
        seq.columns = self
        computed = seq.num_tokens - 1
        self.seqs.append(seq)
        self.request_ids += (seq.request_id,)
        self.incarnations += (seq.incarnation,)
        self.rounds += (seq.round,)
        self.computed += (computed,)
        self.starts += (seq.num_draft_computed,)
        self.new += (seq.num_tokens - seq.num_draft_computed,)
        self.target.append(seq.target_capacity, self.k + 1)
        self.draft.append(seq.draft_capacity, self.k)
        self._until.append(seq.draft_limit - self.k - 2)
        self._limits.append(seq.limit - 1)
        self._fold()
        self._accepted.append(seq.num_accepted_tokens)
        self._rounds_before.append(seq.num_rounds - self._count)
        self._drafts_before.append(seq.num_draft_tokens - self._count * self.k)
        self._calm = 0

    def remove(self, seq: SequenceState) -> None:
        """Let one member go; all, if a work with them is in flight, whose result would no longer be aligned."""
        if self.stage != IDLE:
            self.settle()
            return
        i = self.seqs.index(seq)
        self._fold()
        self._write_back(i)
        seq.columns = None
        del self.seqs[i]
        self.request_ids = self.request_ids[:i] + self.request_ids[i + 1 :]
        self.incarnations = _without(self.incarnations, i)
        self.rounds = _without(self.rounds, i)
        self.computed = _without(self.computed, i)
        self.starts = _without(self.starts, i)
        self.new = _without(self.new, i)
        self.target.remove(i)
        self.draft.remove(i)
        for column in (self._until, self._limits, self._accepted, self._rounds_before, self._drafts_before):
            del column[i]

    def has_room(self) -> bool:
        """Whether k drafts keep within the limits of some member."""
        return self._calm > 0 or True in map(le, self.computed, self._until)

    def remove_limited(self) -> None:
        """Let those go who have come near a limit. After this, every member has a steady round before it."""
        if self._calm > 0 or not self.seqs:
            return
        near = map(sub, self._until, repeat((LAST_ROUNDS - 1) * (self.k + 1)))
        for seq in list(compress(self.seqs, map(gt, self.computed, near))):
            self.remove(seq)
        if self.seqs:
            self._calm = 1 + min(map(sub, self._until, self.computed)) // (self.k + 1)

    def settle(self) -> None:
        """Let everybody go: from here on their states are the truth."""
        if not self.seqs:
            return
        self.refresh()
        for seq in self.seqs:
            seq.columns = None
        self.seqs.clear()
        self.request_ids = ()
        self.incarnations = self.rounds = self.computed = self.starts = self.new = ()
        self.target.clear()
        self.draft.clear()
        for column in (self._until, self._limits, self._accepted, self._rounds_before, self._drafts_before):
            column.clear()
        self.stage = IDLE
        self.work_id = NO_WORK

    def rest(self) -> None:
        """Let everybody go for some rounds."""
        self.settle()
        self._rest = ROUNDS_OF_REST

    def refresh(self) -> None:
        """Bring the states of the members up to date."""
        if self._dirty:
            self._dirty = False
            self._fold()
            for i in range(len(self.seqs)):
                self._write_back(i)

    def _fold(self) -> None:
        if self._to_add:
            self._accepted = list(map(sum, zip(self._accepted, *self._to_add, strict=True)))
            self._to_add.clear()

    def _write_back(self, i: int) -> None:
        seq, num_tokens = self.seqs[i], self.computed[i] + 1
        seq.round = self.rounds[i]
        seq.num_tokens = num_tokens
        seq.target_capacity = self.target.capacities[i]
        seq.draft_capacity = self.draft.capacities[i]
        seq.num_rounds = self._rounds_before[i] + self._count
        seq.num_draft_tokens = self._drafts_before[i] + self._count * self.k
        seq.num_accepted_tokens = self._accepted[i]
        has_drafts = self.stage == DRAFTED
        seq.num_draft_computed = num_tokens if has_drafts else self.starts[i]
        seq.num_drafted = seq.num_selected = self.k if has_drafts else 0
        seq.drafting = self.stage == DRAFTING

    def check_integrity(self, members: Mapping[RequestId, SequenceState]) -> None:
        """Assert that the columns are aligned and about members of the batch. O(members); for tests."""
        columns = (self.rounds, self.computed, self.starts, self.new, self._until, self._limits, self._accepted)
        rooms = [column for room in (self.target, self.draft) for column in (room.capacities, room.full, room.spare)]
        assert all(len(column) == len(self.seqs) for column in [*columns, *rooms, *self._to_add])
        assert self.request_ids == tuple([seq.request_id for seq in self.seqs])
        assert self.incarnations == tuple([seq.incarnation for seq in self.seqs])
        assert all(members.get(seq.request_id) is seq for seq in self.seqs)
        assert sum(seq.columns is not None for seq in members.values()) == len(self.seqs)
        assert self._calm <= 0 or all(map(le, self.computed, self._until)), "somebody is at a limit"

    # --- A round.

    def reserve_drafts(self, pool: KVPool) -> bool:
        """Draft KV for the next round (the last draft's KV is never written); False if the pool is short."""
        self._dirty = True
        return self.draft.reserve(pool, self.request_ids, self.computed, self.k)

    def start_drafting(self, work_id: int) -> None:
        """A draft work begins with all members."""
        self.stage, self.work_id, self._dirty = DRAFTING, work_id, True

    def take_drafts(self) -> None:
        """That work is done, with k drafts for each."""
        self.stage, self.work_id, self._dirty = DRAFTED, NO_WORK, True

    def reserve_targets(self, pool: KVPool) -> bool:
        """Target KV for the drafts; False if the pool is short."""
        self._dirty = True
        return self.target.reserve(pool, self.request_ids, self.computed, self.k + 1)

    def give_up_drafts(self, pool: KVPool) -> None:
        """Others of the batch may find no room: undo `reserve_drafts`, and let everybody go for some rounds."""
        if self.seqs:
            self.draft.give_back(pool, self.request_ids, self.k)
        self.rest()

    def give_up_targets(self, pool: KVPool) -> None:
        """Others of the batch find no room: undo `reserve_targets`, and let everybody go for some rounds."""
        if self.seqs:
            self.target.give_back(pool, self.request_ids, self.k + 1)
        self.rest()

    def commit(self, accepted: Ints, committed: Ints) -> None:
        """The verification is done.

        Args:
            accepted: of the k drafts of each member.
            committed: tokens that became text.
        """
        size, k = len(accepted), self.k
        self.computed = tuple(map(add, self.computed, committed))
        self.rounds = tuple(map(add, self.rounds, repeat(1)))
        if k in accepted:
            # The drafter wrote KV for all drafts but the last one, so after full acceptance it lags by two tokens (I8).
            self.new = tuple([2 if num == k else 1 for num in accepted])
            self.starts = tuple(map(add, map(sub, self.computed, self.new), repeat(1)))
        else:
            self.new, self.starts = (1,) * size, self.computed
        self._to_add.append(accepted)
        if len(self._to_add) > 64:
            self._fold()
        self._count += 1
        self._calm -= 1
        self.stage, self.work_id, self._dirty = IDLE, NO_WORK, True

    def trim(self, target_pool: KVPool, draft_pool: KVPool) -> None:
        """Give back the blocks that only rejected drafts needed; after `commit`."""
        self.target.trim(target_pool, self.request_ids, self.computed, self.k + 1)
        self.draft.trim(draft_pool, self.request_ids, self.starts, self.k)

    def ended(self, reasons: tuple[FinishReason | None, ...] | None) -> Ended:
        """Who has ended with the round: those for whom the world gives a reason, and those at their limit."""
        full: list[bool] = []
        if self._calm <= 0:
            full = list(map(ge, self.computed, self._limits))
        if reasons is None:
            return [(seq, FinishReason.LENGTH) for seq in compress(self.seqs, full)]
        ended: Ended = []
        for i in range(len(self.seqs)):
            reason = reasons[i]
            if reason is not None:
                ended.append((self.seqs[i], reason))
            elif full and full[i]:
                ended.append((self.seqs[i], FinishReason.LENGTH))
        return ended


def _without(column: Ints, i: int) -> Ints:
    return column[:i] + column[i + 1 :]

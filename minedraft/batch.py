"""Sub-batches: who is in which, and which of four phases each is in.

Law of this file: all phase transitions live here; members join only while their batch is IDLE; a running sequence is
in exactly one sub-batch (as a member, or as `incoming` until the batch is IDLE).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Final

from minedraft.request import RequestId
from minedraft.sequence import NO_BATCH, SequenceState, SequenceView
from minedraft.steady import Columns


class BatchPhase(enum.IntEnum):
    """What is being done for a sub-batch. An IntEnum, since those hash at C speed.

    That the drafter takes tokens of its members in, when it has nothing to draft, is no phase: see `ingestion.py`.
    """

    IDLE = 0
    DRAFTING = 1
    DRAFTED = 2
    VERIFYING = 3


# Names of their own, since looking up a member of an enum class takes ten times as long as a global, at every turn.
IDLE_PHASE: Final = BatchPhase.IDLE
DRAFTING_PHASE: Final = BatchPhase.DRAFTING
DRAFTED_PHASE: Final = BatchPhase.DRAFTED
VERIFYING_PHASE: Final = BatchPhase.VERIFYING

LEGAL_PHASES: Final[dict[BatchPhase, tuple[BatchPhase, ...]]] = {
    BatchPhase.IDLE: (
        BatchPhase.DRAFTING,
        BatchPhase.DRAFTED,
    ),  # DRAFTED at once when there is nothing to draft
    BatchPhase.DRAFTING: (BatchPhase.DRAFTED, BatchPhase.IDLE),  # IDLE when its last member left meanwhile
    BatchPhase.DRAFTED: (BatchPhase.VERIFYING, BatchPhase.IDLE),
    BatchPhase.VERIFYING: (BatchPhase.IDLE,),
}


class Batch:
    """One sub-batch.

    Attributes:
        index: position in the manager.
        phase: current phase.
        phase_stamp: order number of the last phase change; the smaller has waited longer.
        members: by request id, in the order in which they joined.
        incoming: running sequences that join at the next IDLE moment.
        num_tokens: committed tokens of members and incoming.
        num_failures: verifications that failed in a row.
        columns: of those members to whom nothing but text happens; see `steady.py`.
    """

    __slots__ = (
        "columns",
        "incoming",
        "index",
        "members",
        "num_failures",
        "num_tokens",
        "phase",
        "phase_stamp",
        "view",
    )

    def __init__(self, index: int, max_size: int) -> None:
        self.index = index
        self.phase = IDLE_PHASE
        self.phase_stamp = index
        self.members: dict[RequestId, SequenceState] = {}
        self.incoming: dict[RequestId, SequenceState] = {}
        self.num_tokens = 0
        self.num_failures = 0
        self.columns = Columns()
        self.view = BatchView(self, max_size)

    @property
    def size(self) -> int:
        """Members, those about to join included."""
        return len(self.members) + len(self.incoming)


class BatchView:
    """What a policy may know of a sub-batch."""

    __slots__ = ("_batch", "max_size")

    def __init__(self, batch: Batch, max_size: int) -> None:
        self._batch = batch
        self.max_size = max_size

    def __repr__(self) -> str:
        return f"<batch {self.index} {self.phase.name} size={self.num_requests}>"

    @property
    def index(self) -> int:
        """Its number."""
        return self._batch.index

    @property
    def phase(self) -> BatchPhase:
        """What is being done for it."""
        return self._batch.phase

    @property
    def phase_stamp(self) -> int:
        """Order number of its last phase change; the smaller has waited longer."""
        return self._batch.phase_stamp

    @property
    def num_requests(self) -> int:
        """Members, those about to join included."""
        batch = self._batch
        return len(batch.members) + len(batch.incoming)

    @property
    def num_tokens(self) -> int:
        """Committed tokens of its requests."""
        return self._batch.num_tokens

    @property
    def has_room(self) -> bool:
        """Whether another request may join."""
        batch = self._batch
        return len(batch.members) + len(batch.incoming) < self.max_size

    def members(self) -> Iterator[SequenceView]:
        """Present members in the order in which they joined (those about to join excluded)."""
        return iter([seq.view for seq in self._batch.members.values()])


class BatchManager:
    """Holds N sub-batches and keeps membership and phases legal."""

    def __init__(self, num_batches: int, max_batch_size: int) -> None:
        self.batches: tuple[Batch, ...] = tuple(Batch(i, max_batch_size) for i in range(num_batches))
        self.views: tuple[BatchView, ...] = tuple(batch.view for batch in self.batches)
        self.max_batch_size = max_batch_size
        self._stamp = num_batches

    def set_phase(self, batch: Batch, phase: BatchPhase) -> None:
        """Move along `LEGAL_PHASES`; whoever was incoming joins when the batch turns IDLE."""
        assert phase in LEGAL_PHASES[batch.phase], (batch.index, batch.phase, phase)
        batch.phase = phase
        self._stamp += 1
        batch.phase_stamp = self._stamp
        if phase is IDLE_PHASE and batch.incoming:
            batch.members.update(batch.incoming)
            batch.incoming.clear()

    def assign(self, seq: SequenceState, index: int) -> None:
        """Put a sequence into a batch: at once if it is IDLE, else from its next IDLE moment on."""
        assert seq.batch == NO_BATCH, seq.request_id
        batch = self.batches[index]
        assert batch.size < self.max_batch_size, index
        group = batch.members if batch.phase is IDLE_PHASE else batch.incoming
        assert seq.request_id not in group
        group[seq.request_id] = seq
        seq.batch = index
        batch.num_tokens += seq.num_tokens

    def remove(self, seq: SequenceState) -> None:
        """Take a sequence out, in any phase; a batch that is left with nothing to verify turns IDLE."""
        batch = self.batches[seq.batch]
        if seq.columns is not None:
            batch.columns.remove(seq)
        if batch.members.pop(seq.request_id, None) is None:
            del batch.incoming[seq.request_id]
        batch.num_tokens -= seq.num_tokens
        seq.batch = NO_BATCH
        if not batch.members and batch.phase is DRAFTED_PHASE:
            self.set_phase(batch, IDLE_PHASE)

    def move(self, moves: Sequence[tuple[SequenceState, int]]) -> None:
        """Move members of IDLE batches to other batches, all at once: two full batches may trade members."""
        for seq, _ in moves:
            assert self.batches[seq.batch].phase is IDLE_PHASE
            self.remove(seq)
        for seq, index in moves:
            self.assign(seq, index)

    def is_open(self, num_active: int) -> bool:
        """Whether some of the first `num_active` batches is IDLE and some, not necessarily the same, has room."""
        idle = room = False
        for batch in self.batches[:num_active]:
            idle = idle or batch.phase is IDLE_PHASE
            room = room or len(batch.members) + len(batch.incoming) < self.max_batch_size
        return idle and room

    def sizes(self) -> tuple[int, ...]:
        """Requests per batch."""
        return tuple([batch.size for batch in self.batches])

    def check_integrity(self, running: Sequence[SequenceState]) -> None:
        """Assert I2, one-in-flight per phase, and the token sums. O(running); for tests."""
        placed: dict[RequestId, int] = {}
        for batch in self.batches:
            batch.columns.refresh()
            batch.columns.check_integrity(batch.members)
            assert batch.size <= self.max_batch_size, f"batch {batch.index} holds {batch.size}"
            assert not (batch.phase is IDLE_PHASE and batch.incoming), "an IDLE batch has incoming"
            assert not (batch.phase is DRAFTED_PHASE and not batch.members), "an empty batch is DRAFTED"
            everyone = [*batch.members.values(), *batch.incoming.values()]
            for seq in everyone:
                assert seq.request_id not in placed, f"{seq.request_id} is in two batches"
                assert seq.batch == batch.index
                placed[seq.request_id] = batch.index
            assert batch.num_tokens == sum(seq.num_tokens for seq in everyone)
        assert placed == {seq.request_id: seq.batch for seq in running}, "running and the batches differ"
        for phase in (DRAFTING_PHASE, VERIFYING_PHASE):
            assert sum(batch.phase is phase for batch in self.batches) <= 1, f"two batches are {phase.name}"

"""What the target's engine and the drafter's process say to each other, and the frames that carry it.

Law of this file: plain values only; imports neither vLLM nor torch, so that a drafter can pin itself first. A frame is
four bytes of length and a MessagePack array `[kind, fields]`; the version is checked once, in `Hello`.

Each `DraftJob`, `Reset`, `Sleep` and `Wake` is answered by one reply, and the next of its kind is sent only then; so is
each `Ping`, by its `Pong`. What is under way is therefore bounded in both directions: one of each kind of order, and
one reply to each.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from minedraft.backends.vllm.errors import VllmWorldError

PROTOCOL_VERSION: Final = 6
_LENGTH: Final = struct.Struct("<I")
_MAX_FRAME: Final = 1 << 28  # a length beyond this is garbage, not a message


class Hello(NamedTuple):
    """The drafter is there, with an empty cache.

    Attributes:
        version: must be `PROTOCOL_VERSION`.
        num_blocks: usable blocks of its KV pool.
        num_free_blocks: those that nobody holds: all of them, or it has lost some.
        block_size: tokens per block.
        max_model_len: its context.
        max_num_batched_tokens: tokens that it computes in one step.
        vocab_size: token ids that its model knows.
    """

    version: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int


class DraftEntry(NamedTuple):
    """Keep `num_computed` tokens of a session, append `token_ids`, then draft `num_draft` tokens."""

    request_id: str
    incarnation: int
    num_computed: int
    token_ids: list[int]
    num_draft: int


class DraftJob(NamedTuple):
    """A `DraftWork` with its tokens, in columns as there: no object is made per entry on the target's critical path.

    Attributes:
        work_id: of the work.
        freed: sessions, (request id, incarnation), to drop before anything else.
        request_ids: and the other columns: see `DraftEntry`.
        num_new: how many of the `token_ids` are each entry's.
        token_ids: of all entries, one after the other.
        with_probs: whether the drafts' probabilities are wanted.
    """

    work_id: int
    freed: Sequence[tuple[str, int]]
    request_ids: Sequence[str]
    incarnations: Sequence[int]
    num_computed: Sequence[int]
    num_new: Sequence[int]
    token_ids: Sequence[int]
    num_draft: Sequence[int]
    with_probs: bool

    @classmethod
    def of(
        cls, work_id: int, freed: Sequence[tuple[str, int]], entries: Sequence[DraftEntry], with_probs: bool
    ) -> DraftJob:
        """A job made of entries."""
        return cls(
            work_id,
            freed,
            [entry.request_id for entry in entries],
            [entry.incarnation for entry in entries],
            [entry.num_computed for entry in entries],
            [len(entry.token_ids) for entry in entries],
            [token for entry in entries for token in entry.token_ids],
            [entry.num_draft for entry in entries],
            with_probs,
        )

    @property
    def entries(self) -> list[DraftEntry]:
        """The columns' rows.

        Raises:
            VllmWorldError: the tokens are not as many as the entries have.
        """
        if len(self.token_ids) != sum(self.num_new):
            raise VllmWorldError(f"job {self.work_id} has {len(self.token_ids)} tokens for {sum(self.num_new)}")
        tokens = iter(self.token_ids)
        token_ids = [list(islice(tokens, count)) for count in self.num_new]
        columns = self.request_ids, self.incarnations, self.num_computed, token_ids, self.num_draft
        return [DraftEntry(*row) for row in zip(*columns, strict=True)]


class Reset(NamedTuple):
    """Drop all sessions and answer with `Hello`."""


class Sleep(NamedTuple):
    """Drop all sessions, give the device's memory back as far as the engine can, and answer with `Asleep`."""


class Wake(NamedTuple):
    """End the sleep and answer with `Hello`."""


class Ping(NamedTuple):
    """Answer with `Pong` at once, whatever the engine does."""


class Pong(NamedTuple):
    """The process is alive."""


class Stop(NamedTuple):
    """End."""


class Drafted(NamedTuple):
    """A job is complete; columns aligned with its entries.

    Attributes:
        work_id: of the job.
        token_ids: drafted ids per entry.
        probs: the drafter's probability of each of them, if the job asked for it.
        started_s: seconds on CLOCK_MONOTONIC, which all processes of a machine share.
        ended_s: likewise.
    """

    work_id: int
    token_ids: list[list[int]]
    probs: list[list[float]] | None
    started_s: float
    ended_s: float


class Asleep(NamedTuple):
    """A `Sleep` has begun; jobs must wait for the `Hello` after a `Wake`."""


class JobFailed(NamedTuple):
    """A job came to nothing. The sessions are out of step with the target: it must `Reset`."""

    work_id: int
    message: str


class LoadFailed(NamedTuple):
    """The draft model can't be used; the drafter ends."""

    message: str


Order = DraftJob | Reset | Sleep | Wake | Ping | Stop
Reply = Hello | Drafted | JobFailed | Asleep | LoadFailed | Pong
Message = Order | Reply

_KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (Hello, DraftJob, Reset, Sleep, Wake, Ping, Pong, Stop, Drafted, Asleep, JobFailed, LoadFailed)
}
_envelope: Final = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders: Final = {name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()}
_encoder: Final = msgspec.msgpack.Encoder()


def pack(message: Message) -> bytes:
    """The frame of a message."""
    body: bytes = _encoder.encode((type(message).__name__, message))
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Message | None:
    """Wait for the next message; None once the other end is gone.

    Raises:
        VllmWorldError: the bytes are not a message of this protocol.
    """
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_FRAME:
        raise VllmWorldError(f"the drafter's channel carries a frame of {length} bytes: both ends out of step")
    body = _read(connection, length)
    if body is None:
        return None
    try:
        kind, fields = _envelope.decode(body)
        message: Message = _decoders[kind].decode(fields)
    except (msgspec.MsgspecError, KeyError) as error:
        raise VllmWorldError(
            f"the drafter's channel carries no message of version {PROTOCOL_VERSION}: {error}"
        ) from error
    return message


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(size - len(parts))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)

"""What a user asks for (`Request`), what comes back (`RequestOutput`), and a request's life (`SequenceStatus`).

Law of this file: everything here is immutable and knows nothing of clocks, tokens ids or devices.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

RequestId = str


class FinishReason(enum.StrEnum):
    """Why a request ended; the names follow vLLM's."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context limit
    ABORT = "abort"  # the client went away
    ERROR = "error"  # refused at the door, or its device failed too often


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request, in counts.

    Attributes:
        request_id: unique among the requests that are alive.
        prompt_len: number of prompt tokens, at least 1.
        max_tokens: upper bound on output tokens, at least 1. A limit that the user set, not the true length.
        arrival_s: when it arrived, in seconds on the backend's clock.
        priority: lower runs earlier under the `priority` admission policy (vLLM's convention).
        max_draft_tokens: upper bound on drafts per round for this request; 0 opts out of speculation,
            None leaves it to the scheduler.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    request_id: RequestId
    prompt_len: int
    max_tokens: int
    arrival_s: float = 0.0
    priority: int = 0
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_len < 1:
            raise ValueError(f"request {self.request_id!r}: prompt_len is {self.prompt_len}, must be >= 1")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.request_id!r}: max_tokens is {self.max_tokens}, must be >= 1")
        if self.max_draft_tokens is not None and self.max_draft_tokens < 0:
            raise ValueError(
                f"request {self.request_id!r}: max_draft_tokens is {self.max_draft_tokens}; "
                "use 0 to opt out of speculation, or a positive limit"
            )


class RequestOutput(NamedTuple):
    """Reported once per request, when it ends.

    Attributes:
        request_id: as given.
        finish_reason: why it ended.
        num_prompt_tokens: as given.
        num_output_tokens: committed output tokens.
        num_preemptions: how often it was preempted by recompute.
        detail: a sentence for `FinishReason.ERROR`, else empty.
    """

    request_id: RequestId
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int = 0
    detail: str = ""


class SequenceStatus(enum.IntEnum):
    """Where a request is in its life. An IntEnum, since those hash at C speed."""

    WAITING = 0  # known, never started
    RUNNING = 1  # member of exactly one sub-batch
    PREEMPTED = 2  # was running, lost its KV, waits to be re-admitted
    FINISHED = 3


# Names of their own, see `minedraft.batch`.
WAITING: Final = SequenceStatus.WAITING
RUNNING: Final = SequenceStatus.RUNNING
PREEMPTED: Final = SequenceStatus.PREEMPTED
FINISHED: Final = SequenceStatus.FINISHED

LEGAL_TRANSITIONS: Final[dict[SequenceStatus, frozenset[SequenceStatus]]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}

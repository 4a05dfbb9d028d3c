"""Events and works as lines of JSON, without loss.

Law of this file: one value is one line, an array `[kind, now_s, field, ...]` of pure ASCII whose bytes depend
on the value alone. Fields go by position, because names would double the size of a journal; a journal's first
line lists them (`FIELDS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, assert_never

from minedraft.json_text import parse_json
from minedraft.request import FinishReason, Request, RequestId
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftResult,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    RequestDisplaced,
    VerifyResult,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A mark in the stream: the core was asked for work. What it decided follows; events told together precede."""


class Pooled(NamedTuple):
    """What a pool that the world owns answered during the call of the core before this mark (see `PoolAnswers`).

    Only what the core's own books would not have said is there.

    Attributes:
        num_free: free blocks that `sync` read, or None.
        hits: (id, tokens found, blocks of them that others held) of waiting requests.
        freed: (id, blocks that came free) of requests that gave back their blocks.
    """

    num_free: int | None
    hits: tuple[tuple[RequestId, int, int], ...]
    freed: tuple[tuple[RequestId, int], ...]


class Record(NamedTuple):
    """One thing that happened at the seam.

    Attributes:
        now_s: the time that the core saw, in seconds on the backend's clock.
        item: an event that came in, a work that went out, or a mark.
    """

    now_s: float
    item: Event | Work | Asked | Pooled


FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "asked": (),
    "arrived": ("request_id", "prompt_len", "max_tokens", "arrival_s", "priority", "max_draft_tokens"),
    "aborted": RequestAborted._fields,
    "displaced": RequestDisplaced._fields,
    "draft": DraftWork._fields,
    "drafted": ("work_id", "started_s", "ended_s", *DraftResult._fields),
    "verify": VerifyWork._fields,
    "verified": ("work_id", "started_s", "ended_s", *VerifyResult._fields),
    "failed": WorkFailed._fields,
    "lost": DrafterLost._fields,
    "ready": (),
    "pooled": Pooled._fields,
}

# check_circular off: tuples can't hold themselves, and the check costs a third of the time.
_to_json: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(now_s: float, item: Event | Work | Asked | Pooled) -> str:
    """The line for an event, a work or a mark, without its newline.

    Args:
        now_s: the time that the core saw, in seconds.
        item: what to encode.

    Raises:
        TypeError: a field isn't a plain Python value (a numpy integer, say).
    """
    return _to_json(_fields_of(now_s, item))


def _fields_of(now_s: float, item: Event | Work | Asked | Pooled) -> tuple[object, ...]:
    if isinstance(item, VerifyWork):
        return ("verify", now_s, *item)
    if isinstance(item, DraftWork):
        return ("draft", now_s, *item)
    if isinstance(item, WorkDone):
        kind = "verified" if isinstance(item.result, VerifyResult) else "drafted"
        return (kind, now_s, item.work_id, item.started_s, item.ended_s, *item.result)
    if isinstance(item, RequestArrived):
        r = item.request
        return (
            "arrived",
            now_s,
            r.request_id,
            r.prompt_len,
            r.max_tokens,
            r.arrival_s,
            r.priority,
            r.max_draft_tokens,
        )
    if isinstance(item, RequestAborted):
        return ("aborted", now_s, *item)
    if isinstance(item, RequestDisplaced):
        return ("displaced", now_s, *item)
    if isinstance(item, Pooled):
        return ("pooled", now_s, *item)
    if isinstance(item, WorkFailed):
        return ("failed", now_s, *item)
    if isinstance(item, DrafterLost):
        return ("lost", now_s, *item)
    if isinstance(item, DrafterReady):
        return ("ready", now_s)
    if isinstance(item, Asked):
        return ("asked", now_s)
    assert_never(item)


def decode(line: str | bytes) -> Record:
    """The inverse of `encode`.

    Raises:
        ValueError: not a line that `encode` writes; the message says what is wrong, without the line's place.
    """
    value = parse_json(line)
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[0], str):
        raise ValueError("not an array [kind, now_s, ...]")
    kind, now_s, *fields = value
    if kind not in FIELDS:
        raise ValueError(f"unknown kind {kind!r}")
    if isinstance(now_s, bool) or not isinstance(now_s, int | float):
        raise ValueError(f"the time is {now_s!r}, not a number")
    if len(fields) != len(FIELDS[kind]):
        raise ValueError(f"{kind!r} has {len(fields)} fields, must be {len(FIELDS[kind])}")
    try:
        return Record(now_s, _DECODERS[kind](*fields))
    except TypeError as error:
        raise ValueError(f"{kind!r} has a field of a wrong type: {error}") from error


def _draft_work(work_id: int, batch: int, *columns: Any) -> DraftWork:
    *aligned, freed = columns
    return DraftWork._make((work_id, batch, *map(tuple, aligned), _pairs(freed)))


def _verify_work(work_id: int, batch: int, *columns: Any) -> VerifyWork:
    *aligned, freed = columns
    return VerifyWork._make((work_id, batch, *map(tuple, aligned), _pairs(freed)))


def _pairs(freed: list[list[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple([(request_id, incarnation) for request_id, incarnation in freed])


def _pooled(num_free: int | None, hits: list[list[Any]], freed: list[list[Any]]) -> Pooled:
    return Pooled(num_free, tuple([(owner, tokens, blocks) for owner, tokens, blocks in hits]), _pairs(freed))


def _draft_done(work_id: int, started_s: float, ended_s: float, num: list[int], probs: Any) -> WorkDone:
    rows = None if probs is None else tuple([tuple(row) for row in probs])
    return WorkDone(work_id, DraftResult(tuple(num), rows), started_s, ended_s)


def _verify_done(
    work_id: int, started_s: float, ended_s: float, accepted: list[int], committed: list[int], reasons: Any
) -> WorkDone:
    ends = None if reasons is None else tuple([None if r is None else FinishReason(r) for r in reasons])
    return WorkDone(work_id, VerifyResult(tuple(accepted), tuple(committed), ends), started_s, ended_s)


_DECODERS: Final[dict[str, Callable[..., Event | Work | Asked | Pooled]]] = {
    "asked": Asked,
    "arrived": lambda *fields: RequestArrived(Request(*fields)),
    "aborted": RequestAborted,
    "displaced": RequestDisplaced,
    "pooled": _pooled,
    "draft": _draft_work,
    "drafted": _draft_done,
    "verify": _verify_work,
    "verified": _verify_done,
    "failed": WorkFailed,
    "lost": DrafterLost,
    "ready": DrafterReady,
}
assert _DECODERS.keys() == FIELDS.keys()

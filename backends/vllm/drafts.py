"""Drafted token ids on their way from the drafter to the target, and the jobs made of draft works."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from minedraft.backends.vllm.messages import Drafted, DraftEntry, DraftJob
from minedraft.request import RequestId
from minedraft.work import DraftResult, DraftWork


class PendingDraft(NamedTuple):
    """A draft and the key under which the core may use it, once."""

    incarnation: int
    round: int
    token_ids: list[int]


class DraftBook:
    """Holds at most one draft per request: a newer one replaces it, a verification takes it."""

    def __init__(self) -> None:
        self._pending: dict[RequestId, PendingDraft] = {}

    def put(self, work: DraftWork, reply: Drafted, alive: Container[RequestId]) -> DraftResult:
        """Keep what was drafted for requests that are alive, and tell the core how much was drafted."""
        drafts = []
        for i, request_id in enumerate(work.request_ids):
            token_ids = reply.token_ids[i][: work.num_draft[i]]
            drafts.append(token_ids)
            if token_ids and request_id in alive:
                self._pending[request_id] = PendingDraft(work.incarnations[i], work.rounds[i], token_ids)
        probs = None
        if reply.probs is not None:
            probs = tuple([tuple(row[: len(ids)]) for row, ids in zip(reply.probs, drafts, strict=True)])
        return DraftResult(tuple([len(token_ids) for token_ids in drafts]), probs)

    def take(self, request_id: RequestId, incarnation: int, round_: int, count: int) -> list[int]:
        """The first `count` tokens drafted under a key; none if that draft is not there."""
        draft = self._pending.pop(request_id, None)
        if draft is None or draft[:2] != (incarnation, round_):
            return []
        return draft.token_ids[:count]

    def drop(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._pending.pop(request_id, None)


def make_job(work: DraftWork, requests: Mapping[RequestId, Any], with_probs: bool) -> DraftJob:
    """Put the tokens to a work; every request of it is alive, since the core knows of all aborts when it is asked."""
    entries = []
    for i, request_id in enumerate(work.request_ids):
        start = work.num_computed[i]
        token_ids = requests[request_id].all_token_ids[start : start + work.num_new[i]]
        entries.append(DraftEntry(request_id, work.incarnations[i], start, list(token_ids), work.num_draft[i]))
    return DraftJob(work.work_id, list(work.freed), entries, with_probs)

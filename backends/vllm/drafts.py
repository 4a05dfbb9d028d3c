"""Draft works on their way to the drafter, and drafted tokens on their way into vLLM's requests.

Law of this file: a draft lies in its request's `spec_token_ids`, where vLLM takes it from; it gets there only while the
request is in the incarnation that it was made for. How many of it are verified is the core's decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.messages import Drafted, DraftJob
from minedraft.request import RequestId
from minedraft.work import DraftResult, DraftWork


def make_job(scheduler: Any, work: DraftWork, with_probs: bool) -> DraftJob:
    """Put the tokens to a work; every request of it is alive, since the core knows of all aborts when it is asked."""
    return DraftJob(
        work.work_id,
        work.freed,
        work.request_ids,
        work.incarnations,
        work.num_computed,
        compat.new_tokens(scheduler, work),
        work.num_draft,
        with_probs,
    )


def hand_over(scheduler: Any, incarnations: Mapping[RequestId, int], work: DraftWork, reply: Drafted) -> DraftResult:
    """Give the drafts to vLLM's requests; returns how much was drafted, for the core.

    What a request's grammar forbids is cut, as vLLM cuts its own drafts: the core learns the shorter length.

    Args:
        scheduler: vLLM's.
        incarnations: of the requests that vLLM runs.
        work: what was asked for.
        reply: what came.
    """
    find = scheduler.requests.get
    drafted = []
    columns = zip(work.request_ids, work.incarnations, work.num_draft, reply.token_ids, strict=True)
    for request_id, incarnation, num_draft, token_ids in columns:
        if len(token_ids) > num_draft:
            token_ids = token_ids[:num_draft]
        if incarnations.get(request_id) == incarnation and (request := find(request_id)) is not None:
            if request.structured_output_request is not None:
                token_ids = compat.validate_drafts(scheduler, request, token_ids)
            request.spec_token_ids = token_ids
        drafted.append(len(token_ids))
    probs = None
    if reply.probs is not None:
        probs = tuple([tuple(row[:num]) for row, num in zip(reply.probs, drafted, strict=True)])
    return DraftResult(tuple(drafted), probs)

"""Draft works on their way to the drafter, and drafted tokens on their way into vLLM's requests.

Law of this file: a draft lies in its request's `spec_token_ids`, where vLLM takes it from; it gets there only while the
request is in the incarnation that it was made for. How many of it are verified is the core's decision. A work that asks
for no drafts touches no request: its batch may be in verification.
"""

from __future__ import annotations

from typing import Any

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.messages import Drafted, DraftJob
from minedraft.backends.vllm.roster import Roster, Stays
from minedraft.work import DraftResult, DraftWork


def make_job(scheduler: Any, roster: Roster, work: DraftWork, with_probs: bool) -> DraftJob:
    """Put the tokens to a work; every request of it is alive, since the core knows of all aborts when it is asked."""
    requests = None
    if any(work.num_draft):  # else they are some of a batch, of which the roster remembers the works with all
        requests = roster.find(work.batch, work.request_ids, work.incarnations)
    return DraftJob(
        work.work_id,
        work.freed,
        work.request_ids,
        work.incarnations,
        work.num_computed,
        work.num_new,
        compat.new_tokens(scheduler, requests, work),
        work.num_draft,
        with_probs,
    )


def hand_over(
    scheduler: Any,
    roster: Roster,
    work: DraftWork,
    reply: Drafted,
    with_grammar: bool,
    vocab_size: int | None = None,
) -> DraftResult:
    """Give the drafts to vLLM's requests; returns how much was drafted, for the core.

    Args:
        scheduler: vLLM's.
        roster: of the requests that vLLM runs.
        work: what was asked for.
        reply: what came.
        with_grammar: whether some request has a grammar. What that forbids is cut, as vLLM cuts its own drafts: the
            core learns the shorter length.
        vocab_size: token ids that the target knows, if the drafter knows more. A draft ends before the first of these.
    """
    if vocab_size is not None:
        reply = reply._replace(token_ids=[_known(token_ids, vocab_size) for token_ids in reply.token_ids])
    drafted = tuple(map(len, reply.token_ids))
    if not any(work.num_draft):
        return DraftResult(drafted)
    requests = None
    if drafted == work.num_draft and not with_grammar:
        requests = roster.find(work.batch, work.request_ids, work.incarnations)
    if requests is not None:
        for request, token_ids in zip(requests, reply.token_ids, strict=True):
            request.spec_token_ids = token_ids
        roster.handed[work.batch] = (work.request_ids, drafted)
    else:
        drafted = _hand_over_each(scheduler, roster.stays, work, reply)
        roster.handed.pop(work.batch, None)
    probs = None
    if reply.probs is not None:
        probs = tuple([tuple(row[:num]) for row, num in zip(reply.probs, drafted, strict=True)])
    return DraftResult(drafted, probs)


def _hand_over_each(scheduler: Any, stays: Stays, work: DraftWork, reply: Drafted) -> tuple[int, ...]:
    """The same where some request has gone or started over, drafts are short, or a grammar may cut them."""
    drafted = []
    columns = zip(work.request_ids, work.incarnations, work.num_draft, reply.token_ids, strict=True)
    for request_id, incarnation, num_draft, token_ids in columns:
        request = scheduler.requests.get(request_id)
        kept = token_ids[:num_draft]
        if request is not None and stays.get(request_id) == incarnation:
            if request.structured_output_request is not None:
                kept = compat.validate_drafts(scheduler, request, kept)
            request.spec_token_ids = kept
        drafted.append(len(kept))
    return tuple(drafted)


def _known(token_ids: list[int], vocab_size: int) -> list[int]:
    for i, token in enumerate(token_ids):
        if token >= vocab_size:
            return token_ids[:i]
    return token_ids

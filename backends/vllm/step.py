"""One verification inside vLLM: arrange vLLM's queues so that it runs what the core planned, and read off what it did.

Law of this file: a `VerifyWork` in, a `VerifyResult` out; no clock, no policy. Whatever vLLM did otherwise makes the
requests concerned *strays*, which the conductor introduces to the core anew; their columns are fillers.

vLLM's prefix cache is invisible to the core. An entry is therefore a mark to reach (`num_computed + num_new`), not a
number of tokens: a request that joins with more in the cache computes less, and one whose hit is beyond the mark sits
out until a later chunk passes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.drafts import DraftBook
from minedraft.backends.vllm.waiting_room import WaitingRoom
from minedraft.request import FinishReason, RequestId
from minedraft.work import VerifyResult, VerifyWork


@dataclass(slots=True)
class Step:
    """A verification in the making.

    Attributes:
        work: what the core planned.
        requests: vLLM's requests, aligned with the work's entries; None where there is none any more.
        marks: by id of those that vLLM shall run: tokens computed after the step, drafts included.
        expected: by id: how many tokens vLLM shall run.
        strays: by id, why the core must be told of the request anew.
        before: by id of those that ran: output tokens before the step.
        generated: by id of those that ran: tokens sampled in it.
        started_s: when vLLM had its plan.
    """

    work: VerifyWork
    requests: list[Any | None] = field(default_factory=list)
    marks: dict[RequestId, int] = field(default_factory=dict)
    expected: dict[RequestId, int] = field(default_factory=dict)
    strays: dict[RequestId, str] = field(default_factory=dict)
    before: dict[RequestId, int] = field(default_factory=dict)
    generated: dict[RequestId, int] = field(default_factory=dict)
    started_s: float = 0.0


def arrange(
    scheduler: Any, room: WaitingRoom, drafts: DraftBook, incarnations: dict[RequestId, int], work: VerifyWork
) -> Step:
    """Carry out a work's preemptions and admissions, and put its requests first.

    Args:
        scheduler: vLLM's.
        room: its waiting queue.
        drafts: where the drafted ids are.
        incarnations: of the requests that vLLM runs; written here.
        work: the core's plan.
    """
    for request_id, incarnation in work.freed:
        request = scheduler.requests.get(request_id)
        if incarnations.get(request_id) == incarnation:
            del incarnations[request_id]
            if request is not None and compat.is_running(request):
                compat.preempt(scheduler, request)
    step = Step(work)
    running: list[Any] = []
    joining: list[Any] = []
    for i, request_id in enumerate(work.request_ids):
        request = scheduler.requests.get(request_id)
        step.requests.append(request)
        if request is None:
            continue  # aborted; the core is told before it gets the result
        mark = work.num_computed[i] + work.num_new[i]
        if compat.is_running(request):
            if not _is_in_step(request, work, i):
                step.strays[request_id] = (
                    f"has {request.num_computed_tokens} tokens computed, not {work.num_computed[i]}"
                )
                continue
            request.spec_token_ids = _drafts_for(scheduler, request, drafts, work, i)
            mark += len(request.spec_token_ids)
            start = request.num_computed_tokens
            running.append(request)
        elif request in room:
            start = compat.prefix_hit(scheduler, request)
            if start >= mark and not work.is_last[i]:
                continue  # that much is in the cache
            drafts.drop(request_id)  # vLLM takes none for a request that joins
            joining.append(request)
            incarnations[request_id] = work.incarnations[i]
        else:
            step.strays[request_id] = f"is {request.status}"
            continue
        step.marks[request_id] = mark
        step.expected[request_id] = mark - start
    compat.order_running(scheduler, running)
    room.admit(joining)
    return step


def _is_in_step(request: Any, work: VerifyWork, i: int) -> bool:
    if request.num_computed_tokens != work.num_computed[i]:
        return False
    behind = request.num_tokens - request.num_computed_tokens
    return bool(behind == work.num_new[i] if work.is_last[i] else behind > work.num_new[i])


def _drafts_for(scheduler: Any, request: Any, drafts: DraftBook, work: VerifyWork, i: int) -> list[int]:
    token_ids = drafts.take(work.request_ids[i], work.incarnations[i], work.rounds[i], work.num_draft[i])
    return compat.validate_drafts(scheduler, request, token_ids) if token_ids else []


def check(step: Step, num_scheduled: dict[RequestId, int]) -> None:
    """Compare what vLLM scheduled with the plan; differences become strays."""
    for request_id, count in step.expected.items():
        if num_scheduled.get(request_id, 0) != count:
            step.strays[request_id] = f"{num_scheduled.get(request_id, 0)} tokens scheduled, {count} planned"
    for request_id in num_scheduled:
        if request_id not in step.expected:
            step.strays[request_id] = f"{num_scheduled[request_id]} tokens scheduled, none planned"


def note_sampled(step: Step, model_output: Any) -> None:
    """Remember what the model sampled, before vLLM cuts it at stop boundaries."""
    for request in step.requests:
        if request is None or request.request_id not in step.expected:
            continue
        index = model_output.req_id_to_index.get(request.request_id)
        sampled = model_output.sampled_token_ids
        step.generated[request.request_id] = len(sampled[index]) if sampled and index is not None else 0
        step.before[request.request_id] = request.num_output_tokens


def read_result(step: Step) -> VerifyResult:
    """What became of each entry; call it after vLLM has updated its requests."""
    work = step.work
    accepted, committed = [], []
    reasons: list[FinishReason | None] = []
    for i, request in enumerate(step.requests):
        num_accepted, num_committed, reason = 0, int(work.is_last[i]), None
        if request is not None and request.request_id in step.generated and request.request_id not in step.strays:
            generated = step.generated[request.request_id]
            grown = request.num_output_tokens - step.before[request.request_id]
            ended = compat.finish_reason(request)
            if ended is FinishReason.ABORT:
                pass  # while the model ran; the core has been told
            elif (generated > 0) != work.is_last[i]:
                step.strays[request.request_id] = f"{generated} tokens sampled, last chunk: {work.is_last[i]}"
            else:
                num_accepted, num_committed, reason = max(0, generated - 1), grown, ended
        accepted.append(num_accepted)
        committed.append(num_committed)
        reasons.append(reason)
    ended_any = any(reason is not None for reason in reasons)
    return VerifyResult(tuple(accepted), tuple(committed), tuple(reasons) if ended_any else None)

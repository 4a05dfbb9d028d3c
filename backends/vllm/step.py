"""One verification inside vLLM: arrange vLLM's queues so that it runs what the core planned, and read off what it did.

Law of this file: a `VerifyWork` in, a `VerifyResult` out; no clock, no policy. Whatever vLLM did otherwise makes the
requests concerned *strays*, which the conductor reports to the core as displaced; their columns are fillers.

This is vLLM's critical path. So a step of nothing but decoding requests, which most are, is handled by whole columns,
with as little Python per request as can be; any other step goes through its entries one by one.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from itertools import repeat
from operator import sub
from typing import Any

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.roster import Roster, Stays
from minedraft.backends.vllm.waiting_room import WaitingRoom
from minedraft.request import FinishReason, RequestId
from minedraft.work import VerifyResult, VerifyWork


@dataclass(slots=True)
class Step:
    """A verification in the making.

    Attributes:
        work: what the core planned.
        requests: vLLM's requests, aligned with the work's entries; None where there is none any more.
        expected: by id: how many tokens vLLM shall run.
        marks: by id, of those that compute a prompt: tokens computed after the step. vLLM must be held back there.
        strays: by id, why the core must be told that the request lost its place.
        running: those of vLLM's running requests that are in the step.
        sampled: by index of the work's entries: tokens that the model gave, before vLLM cuts them at stop boundaries.
        num_running: how many of vLLM's requests were running before it took the output in.
        started_s: when vLLM had its plan.
        ended_s: when the model's output was there.
    """

    work: VerifyWork
    requests: list[Any | None] = field(default_factory=list)
    expected: dict[RequestId, int] = field(default_factory=dict)
    marks: dict[RequestId, int] = field(default_factory=dict)
    strays: dict[RequestId, str] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    num_running: int = -1
    started_s: float = 0.0
    ended_s: float = 0.0


def unplanned() -> Step:
    """For a step that vLLM ran though the core had planned none: all its requests will be found strays."""
    return Step(VerifyWork(-1, 0, (), (), (), (), (), (), (), (), (), ()))


def arrange(scheduler: Any, room: WaitingRoom, roster: Roster, work: VerifyWork, gone: Container[RequestId]) -> Step:
    """Carry out a work's preemptions and admissions, and find vLLM's requests for its entries.

    Drafts are where they arrived: each request's `spec_token_ids`.

    Args:
        scheduler: vLLM's.
        room: its waiting queue.
        roster: of vLLM's running requests; changed here.
        work: the core's plan.
        gone: ids of requests that were aborted since it was made; others may have these ids by now.
    """
    if work.freed:
        _take_back(scheduler, roster.stays, work)
    request_ids = work.request_ids
    handed = roster.handed.pop(work.batch, None)
    requests, size = roster.find(work.batch, request_ids, work.incarnations), len(request_ids)
    if requests is None or work.num_new.count(1) < size or work.is_last.count(True) < size:
        find = scheduler.requests.get
        step = Step(work, [None if request_id in gone else find(request_id) for request_id in request_ids])
        _arrange_each(scheduler, room, roster.stays, step)
        return step
    drafted = work.num_draft
    if handed != (request_ids, drafted):
        drafted = tuple(map(_cut_drafts, requests, drafted))
    step = Step(work, requests)
    if drafted.count(drafted[0]) == size:
        step.expected = dict.fromkeys(request_ids, 1 + drafted[0])
    else:
        step.expected = {request_id: 1 + num for request_id, num in zip(request_ids, drafted, strict=True)}
    step.running = requests.copy()  # vLLM adds to this one
    return step


def _cut_drafts(request: Any, num_draft: int) -> int:
    """Fewer were selected, or fit; returns how many are there."""
    request.spec_token_ids = request.spec_token_ids[:num_draft]
    return len(request.spec_token_ids)


def _arrange_each(scheduler: Any, room: WaitingRoom, stays: Stays, step: Step) -> None:
    """The same where some entry computes a prompt, joins, or has gone."""
    work = step.work
    columns = zip(step.requests, work.request_ids, work.num_new, work.num_draft, work.is_last, strict=True)
    for i, (request, request_id, num_new, num_draft, is_last) in enumerate(columns):
        if request is None:
            continue  # aborted; the core is told before it gets the result
        if num_new != 1 or not is_last or not compat.is_running(request):
            _arrange_prompt(scheduler, room, stays, step, i)
        else:
            step.expected[request_id] = 1 + _cut_drafts(request, num_draft)
            step.running.append(request)


def _take_back(scheduler: Any, stays: Stays, work: VerifyWork) -> None:
    for request_id, incarnation in work.freed:
        if stays.get(request_id) == incarnation:
            del stays[request_id]
            request = scheduler.requests.get(request_id)
            if request is not None and compat.is_running(request):
                compat.preempt(scheduler, request)


def _arrange_prompt(scheduler: Any, room: WaitingRoom, stays: Stays, step: Step, i: int) -> None:
    """An entry that computes a prompt chunk, or joins.

    vLLM may find more in its prefix cache than the core knows of, so the entry is a mark to reach: who joins with more
    computes less, and one whose hit is beyond the mark sits out until a later chunk passes it.
    """
    work, request = step.work, step.requests[i]
    assert request is not None
    request_id, start, mark = work.request_ids[i], work.num_computed[i], work.num_computed[i] + work.num_new[i]
    if compat.is_running(request):
        if request.num_computed_tokens != start or (request.num_tokens == mark) != work.is_last[i]:
            step.strays[request_id] = f"has {request.num_computed_tokens} tokens computed, not {start}"
            return
        request.spec_token_ids = []
        step.running.append(request)
    elif request in room:
        # More may be cached now than when it was let in. Or less, since who came before it may have taken cached blocks
        # that nobody held: then it computes those tokens too, if the step's budget allows.
        start, _ = compat.prefix_hit(scheduler, request)
        if start >= mark and not work.is_last[i]:
            return  # that much is in the cache
        room.admit(request)
        stays[request_id] = work.incarnations[i]
    else:
        step.strays[request_id] = f"is {request.status!s}"
        return
    step.marks[request_id] = mark
    step.expected[request_id] = mark - start


def find_strays(scheduler: Any, step: Step, num_scheduled: dict[RequestId, int], stays: Stays) -> None:
    """Compare what vLLM scheduled with the plan, from which it differs; most differences become strays.

    Args:
        scheduler: vLLM's.
        step: what was planned.
        num_scheduled: tokens by request, as vLLM has it.
        stays: of the requests that vLLM runs; written here.
    """
    is_last = dict(zip(step.work.request_ids, step.work.is_last, strict=True))
    running = {request.request_id for request in step.running}
    requests = {request.request_id: request for request in step.requests if request is not None}
    for request_id, count in tuple(step.expected.items()):
        if num_scheduled.get(request_id, 0) != count:
            request, mark = requests[request_id], step.marks.get(request_id, 0)
            if request_id in num_scheduled and request.num_computed_tokens == mark:
                continue  # others took cached blocks that it had found: it computes those tokens as well
            waits = request_id not in num_scheduled and request_id not in running and not is_last[request_id]
            if waits and compat.prefix_hit(scheduler, request)[0] >= mark:
                del step.expected[request_id], stays[request_id]
                continue  # others of this step compute all of its chunk, so vLLM found that: it sits out
            step.strays[request_id] = f"{num_scheduled.get(request_id, 0)} tokens scheduled, {count} planned"
    for request_id in num_scheduled:
        if request_id not in step.expected:
            step.strays[request_id] = f"{num_scheduled[request_id]} tokens scheduled, none planned"


def note_sampled(step: Step, model_output: Any, num_running: int) -> None:
    """Remember how much the model gave, before vLLM cuts it at stop boundaries."""
    step.num_running = num_running
    sampled, index_of = model_output.sampled_token_ids, model_output.req_id_to_index
    request_ids = step.work.request_ids
    if not sampled:
        step.sampled = [0] * len(request_ids)
    elif model_output.req_ids == list(request_ids):
        step.sampled = list(map(len, sampled))
    elif len(step.expected) == len(request_ids) and not step.strays:
        step.sampled = [len(sampled[index_of[request_id]]) for request_id in request_ids]
    else:
        found = [index_of.get(request_id) for request_id in request_ids]
        step.sampled = [0 if index is None else len(sampled[index]) for index in found]


def read_result(step: Step, outputs: dict[int, Any], num_running: int) -> VerifyResult:
    """What became of each entry; call it after vLLM has updated its requests.

    Args:
        step: the verification.
        outputs: what vLLM's update returned.
        num_running: vLLM's running requests now; none has ended if they are as many as before.
    """
    work, sampled = step.work, step.sampled
    if not step.expected:
        step.sampled = [0] * len(work.request_ids)
    if num_running == step.num_running and not step.strays and work.is_last.count(True) == len(sampled):
        accepted = tuple(map(sub, sampled, repeat(1)))
        if -1 not in accepted:
            return VerifyResult(accepted, tuple(sampled))
    return _read_each(step, outputs)


def _read_each(step: Step, outputs: dict[int, Any]) -> VerifyResult:
    """The same where some request ended, computed a prompt chunk, or strayed."""
    work = step.work
    kept = {one.request_id: len(one.new_token_ids) for each in outputs.values() for one in each.outputs}
    accepted, committed = [0] * len(step.requests), [int(last) for last in work.is_last]
    reasons: list[FinishReason | None] = [None] * len(step.requests)
    for i, (request, request_id) in enumerate(zip(step.requests, work.request_ids, strict=True)):
        if request is None or request_id not in step.expected or request_id in step.strays:
            continue
        num, reason = step.sampled[i], compat.finish_reason(request)
        if reason is FinishReason.ABORT:
            continue  # while the model ran; the core has been told
        if (num > 0) != work.is_last[i]:
            step.strays[request_id] = f"{num} tokens sampled, last chunk: {work.is_last[i]}"
            continue
        accepted[i], reasons[i] = max(0, num - 1), reason
        committed[i] = num if reason is None else kept.get(request_id, 0)
    ended = any(reason is not None for reason in reasons)
    return VerifyResult(tuple(accepted), tuple(committed), tuple(reasons) if ended else None)

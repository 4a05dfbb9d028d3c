"""Blocks that were cut off behind rejected drafts, and how the same request gets them back.

A sub-batch that isn't being verified holds no block beyond its computed tokens, so blocks in which nothing but rejected
drafts lay go back to vLLM's pool after every round, and are reserved again for the next one. The workers, though, keep
copies of the block tables that vLLM only ever appends to: a copy still ends in what was cut, the request's *tail*.

Law of this file: a worker's copy is what the request holds and then its tail. A request that grows again takes its own
tail first, if nobody has had it meanwhile: then the copy is right as it stands, and vLLM has nothing to allocate. Else
its whole table is sent anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress, count
from typing import Any

from minedraft.backends.vllm import compat
from minedraft.request import RequestId


class Tails:
    """The tails of vLLM's running requests.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._tails: dict[RequestId, compat.Tail] = {}  # without blocks if those are lost
        self._are_back = False  # of the step that vLLM schedules now, all tails
        self._reuse = compat.may_reuse_blocks(scheduler)

    def __len__(self) -> int:
        return len(self._tails)

    def cut(self, request_ids: Iterable[RequestId]) -> int:
        """Give back what these requests hold behind their computed tokens; returns how many of them held any."""
        found, tails = compat.cut_blocks(self._scheduler, request_ids), self._tails
        for tail in found:
            request, num_held, blocks = tail
            request_id = request.request_id
            if not self._reuse:
                tail = request, num_held, []
            elif request_id in tails:  # what was cut before comes behind; if that is lost, so is this
                before = tails[request_id][2]
                tail = request, num_held, blocks + before if before else []
            tails[request_id] = tail
        return len(found)

    def take_back(self, expected: Mapping[RequestId, int]) -> None:
        """Before vLLM allocates: give requests that grow their own blocks again.

        Args:
            expected: by id, the tokens that vLLM is about to run of those in the step.
        """
        tails = self._tails
        here = [request_id for request_id in tails if request_id in expected]
        left = compat.take_blocks(self._scheduler, map(tails.pop, here), expected) if here else []
        self._are_back = left.count(None) == len(left)
        if not self._are_back:
            tails.update([(tail[0].request_id, tail) for tail in left if tail is not None])

    def resend(self, output: Any, *, is_planned: bool) -> None:
        """After vLLM has allocated: send the whole tables of those that got others than their own blocks.

        Args:
            output: of vLLM's scheduler.
            is_planned: whether it runs what `take_back` was told.
        """
        if is_planned and self._are_back:
            return
        tails, cached = self._tails, output.scheduled_cached_reqs
        for i in list(compress(count(), cached.new_block_ids)):
            if tails.pop(cached.req_ids[i], None) is not None:
                compat.resend_blocks(self._scheduler, cached, i)

    def forget(self, request_id: RequestId) -> None:
        """A request has ended, or lost its place: its table begins anew."""
        self._tails.pop(request_id, None)

    def clear(self) -> None:
        """All have."""
        self._tails.clear()

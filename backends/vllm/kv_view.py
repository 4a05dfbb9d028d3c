"""The core's view of vLLM's block pool: what its books can't know, read off vLLM.

Law of this file: it reads vLLM's pool and takes nothing from it; at most it changes what would be taken first. The core
decides on its own books (`SharedPool`); here are the three answers those books ask for, and a note of the answers that
a replay can't work out by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from minedraft.backends.vllm import compat
from minedraft.codec import Pooled
from minedraft.kv_cache import SharedPool
from minedraft.request import RequestId


class KVView:
    """The `PoolAnswers` of a vLLM engine, which shares blocks of equal prefixes.

    Args:
        scheduler: vLLM's.
        incarnations: of the requests that vLLM runs by the core's plan; read here.

    Attributes:
        pool: the books.
        trimmed: whose blocks the core has cut since this was last emptied.
    """

    def __init__(self, scheduler: Any, incarnations: Mapping[RequestId, int]) -> None:
        self._scheduler = scheduler
        self._incarnations = incarnations
        self._growing: dict[RequestId, None] = {}  # let in; vLLM has yet to allocate all that was reserved for them
        self._leaving: dict[RequestId, None] = {}  # released by the core; vLLM still runs them
        self._free: int | None = None
        self._hits: list[tuple[RequestId, int, int]] = []
        self._freed: list[tuple[RequestId, int]] = []
        self.trimmed: list[RequestId] = []
        self.pool = SharedPool(compat.num_usable_blocks(scheduler), scheduler.block_size, self, self.trimmed)

    def sync(self, released: Iterable[tuple[RequestId, int]]) -> None:
        """Read the free blocks anew, between two steps.

        Args:
            released: (id, incarnation) of requests whose blocks the core counts as free; vLLM may not know yet.
        """
        self._leaving = {owner: None for owner, incarnation in released if self._incarnations.get(owner) == incarnation}
        self.pool.sync()

    def keep_prefixes(self) -> None:
        """Before vLLM allocates: it must not take from those who were let in what they have found in the prefix cache.

        They may join some steps later, since their sub-batch has to be at rest. There are other free blocks, or they
        wouldn't have been let in; but without those tokens their step would be larger than it was planned.
        """
        for owner in self._growing:
            request = self._scheduler.requests.get(owner)
            if request is not None and not compat.is_running(request):
                compat.keep_prefix(self._scheduler, request)

    def take_answers(self) -> Pooled | None:
        """The answers since the last call that the books alone wouldn't give; None if there were none."""
        if self._free is None and not self._hits and not self._freed:
            return None
        answers = Pooled(self._free, tuple(self._hits), tuple(self._freed))
        self._free = None
        self._hits.clear()
        self._freed.clear()
        return answers

    # --- The answers.

    def num_free_blocks(self, accounted: int) -> int:
        """See `PoolAnswers`."""
        num_free = compat.num_free_blocks(self._scheduler)
        for owner in self._leaving:
            num_free += self._num_own_blocks(owner)
        if self._growing:
            num_free -= self._num_granted()
        if num_free != accounted:
            self._free = num_free
        return num_free

    def _num_granted(self) -> int:
        """Blocks reserved for requests that vLLM has yet to allocate."""
        granted = 0
        for owner in tuple(self._growing):
            missing = self.pool.held_blocks(owner) - compat.held_blocks(self._scheduler, owner)
            if missing > 0 and owner not in self._incarnations:  # not in vLLM's running list yet
                missing -= self._look_up(owner)[1]
            if missing > 0:
                granted += missing
            else:
                del self._growing[owner]
        return granted

    def prefix_hit(self, owner: RequestId) -> tuple[int, int]:
        """See `PoolAnswers`."""
        self._growing[owner] = None
        num_tokens, num_blocks = self._look_up(owner)
        if num_tokens or any(other == owner for other, _, _ in self._hits):  # a later answer must not be the first's
            self._hits.append((owner, num_tokens, num_blocks))
        return num_tokens, num_blocks

    def _look_up(self, owner: RequestId) -> tuple[int, int]:
        request = self._scheduler.requests.get(owner)
        return (0, 0) if request is None else compat.prefix_hit(self._scheduler, request, tuple(self._leaving))

    def num_freed_blocks(self, owner: RequestId, held: int) -> int:
        """See `PoolAnswers`. Of requests that vLLM has ended already, the next `sync` knows better."""
        if owner not in self._scheduler.requests:
            return held
        if self._is_joining(owner):
            num_freed = held - self._look_up(owner)[1]
        else:
            num_freed = self._num_own_blocks(owner) + held - compat.held_blocks(self._scheduler, owner)
            self._leaving[owner] = None
        if num_freed != held or any(other == owner for other, _ in self._freed):
            self._freed.append((owner, num_freed))
        return num_freed

    def _is_joining(self, owner: RequestId) -> bool:
        """Whether it was let in, and vLLM doesn't run it yet, or still runs what was released of it."""
        return owner not in self._incarnations or owner in self._leaving

    def _num_own_blocks(self, owner: RequestId) -> int:
        """Blocks that only `owner` holds, and on which nobody counts who was let in and hasn't joined yet."""
        find = self._scheduler.requests.get
        joining = [find(other) for other in self._growing if other != owner and self._is_joining(other)]
        return compat.num_own_blocks(self._scheduler, owner, [request for request in joining if request is not None])

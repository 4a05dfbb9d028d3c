"""Keeps the number of LoRA adapters that the core may schedule together within vLLM's limit per step.

A vLLM step carries at most `max_loras` different adapters, and a waiting request whose adapter would be one more is
passed over. The core doesn't know of adapters, so it must never know of more than that many: a request whose adapter
would be one too many is held back until another adapter is in use no longer.

Law of this file: pure bookkeeping by id; nothing of vLLM, no clock.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from minedraft.request import RequestId

NO_ADAPTER: Final = 0
"""What vLLM counts as no adapter; real ones are numbered from 1."""


class AdapterGate:
    """Lets requests on in order of arrival while their adapters fit.

    Once one is held back, all later ones with an adapter queue behind it, even those whose adapter is in use: else a
    stream of these would starve it. Requests without an adapter always pass.

    Args:
        max_adapters: different adapters that may be in use at once, at least 1.
    """

    def __init__(self, max_adapters: int) -> None:
        assert max_adapters >= 1, max_adapters
        self._max_adapters = max_adapters
        self._let_on: dict[RequestId, int] = {}  # adapter by id
        self._held: dict[RequestId, int] = {}  # the same, in order of arrival
        self._in_use: Counter[int] = Counter()  # requests let on, by adapter

    @property
    def num_held(self) -> int:
        """Requests that are held back."""
        return len(self._held)

    def arrive(self, request_id: RequestId, adapter: int) -> bool:
        """Whether a new request may go on now; if not, some later `leave` returns its id.

        Args:
            request_id: not one that is here.
            adapter: its adapter's number, or `NO_ADAPTER`.
        """
        assert request_id not in self._let_on, request_id
        assert request_id not in self._held, request_id
        if adapter == NO_ADAPTER:
            return True
        if self._held or not self._fits(adapter):
            self._held[request_id] = adapter
            return False
        self._let_on_now(request_id, adapter)
        return True

    def leave(self, request_id: RequestId) -> list[RequestId]:
        """Take out a request that has ended, held back or not; returns who may go on now, in order of arrival.

        An id that is not here (it had no adapter, or has left before) changes nothing.
        """
        if self._held.pop(request_id, None) is None:
            adapter = self._let_on.pop(request_id, None)
            if adapter is None:
                return []
            self._in_use[adapter] -= 1
            if not self._in_use[adapter]:
                del self._in_use[adapter]
        freed: list[RequestId] = []
        for held_id, adapter in self._held.items():
            if not self._fits(adapter):
                break
            self._let_on_now(held_id, adapter)
            freed.append(held_id)
        for held_id in freed:
            del self._held[held_id]
        return freed

    def _fits(self, adapter: int) -> bool:
        return adapter in self._in_use or len(self._in_use) < self._max_adapters

    def _let_on_now(self, request_id: RequestId, adapter: int) -> None:
        self._let_on[request_id] = adapter
        self._in_use[adapter] += 1

"""Whom vLLM runs by the core's plan, and vLLM's request objects of the batches.

Law of this file: a batch whose requests are the same as in its last work is known by two comparisons.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from minedraft.request import RequestId

_RUNNING = RequestStatus.RUNNING


class Stays(dict[RequestId, int]):
    """Incarnations of the requests that vLLM runs by the core's plan, by id.

    Attributes:
        version: grows with every change.
    """

    version = 0

    def changed(self) -> None:
        """Somebody has lost its place in vLLM, whether or not the core knows yet."""
        self.version += 1

    def __setitem__(self, request_id: RequestId, incarnation: int) -> None:
        self.version += 1
        super().__setitem__(request_id, incarnation)

    def __delitem__(self, request_id: RequestId) -> None:
        self.version += 1
        super().__delitem__(request_id)

    def forget(self, request_id: RequestId) -> None:
        """A stay is over, if there was one."""
        if request_id in self:
            del self[request_id]

    def clear(self) -> None:
        """No stay goes on."""
        self.version += 1
        super().clear()


class _Known(NamedTuple):
    request_ids: tuple[RequestId, ...]
    version: int
    requests: list[Any]


class Roster:
    """Finds vLLM's requests for the entries of a work.

    Args:
        scheduler: vLLM's.
        stays: of its requests.

    Attributes:
        stays: the same.
        handed: by batch: who was given how many drafts for the next verification, if everybody was whom they were for.
    """

    def __init__(self, scheduler: Any, stays: Stays) -> None:
        self.stays = stays
        self.handed: dict[int, tuple[tuple[RequestId, ...], tuple[int, ...]]] = {}
        self._scheduler = scheduler
        self._known: dict[int, _Known] = {}

    def find(self, batch: int, request_ids: tuple[RequestId, ...], incarnations: tuple[int, ...]) -> list[Any] | None:
        """The requests of a batch, aligned with the ids; None unless all of them run, in these incarnations."""
        known = self._known.get(batch)
        if known is not None and known.request_ids is request_ids and known.version == self.stays.version:
            return known.requests
        if tuple(map(self.stays.get, request_ids)) != incarnations:
            return None
        requests = list(map(self._scheduler.requests.get, request_ids))
        if None in requests or [request.status for request in requests].count(_RUNNING) != len(requests):
            return None
        self._known[batch] = _Known(request_ids, self.stays.version, requests)
        return requests

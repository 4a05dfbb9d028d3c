"""vLLM's waiting queue, with the door kept by the core: vLLM can only admit whom the core has admitted.

Law of this file: it counts everybody who waits (vLLM's statistics and its "is there work?" need that), but shows vLLM's
scheduling loop only those that `admit` names, in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue


class WaitingRoom(RequestQueue):  # type: ignore[misc]
    """Takes the place of a vLLM scheduler's `waiting`."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}
        self._admitted: dict[str, Any] = {}

    def admit(self, request: Any) -> None:
        """Show this one to vLLM's next scheduling pass; it must be here."""
        self._admitted[request.request_id] = self._held.pop(request.request_id)

    def withdraw(self) -> None:
        """Hide those again that were not taken."""
        self._held.update(self._admitted)
        self._admitted.clear()

    def __contains__(self, request: Any) -> bool:
        return request.request_id in self._held or request.request_id in self._admitted

    # --- vLLM's interface; who comes back from its loop (skipped, preempted) is hidden.

    def add_request(self, request: Any) -> None:
        """Take one in, hidden."""
        self._held[request.request_id] = request

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take several in, hidden."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Any:
        """The next one that is admitted."""
        return next(iter(self._admitted.values()))

    def pop_request(self) -> Any:
        """Take the next one that is admitted."""
        return self._admitted.pop(next(iter(self._admitted)))

    def remove_request(self, request: Any) -> None:
        """Take one out, admitted or not."""
        if self._admitted.pop(request.request_id, None) is None:
            del self._held[request.request_id]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out those of these that are here."""
        for request in requests:
            self._admitted.pop(request.request_id, None)
            self._held.pop(request.request_id, None)

    def __bool__(self) -> bool:
        return bool(self._admitted)

    def __len__(self) -> int:
        return len(self._held) + len(self._admitted)

    def __iter__(self) -> Iterator[Any]:
        return chain(self._admitted.values(), self._held.values())

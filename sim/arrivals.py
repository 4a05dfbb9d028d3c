"""`ArrivalStream`: lets the requests of a workload in, each at its time, or as soon as there is room for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from minedraft.sim.workload import SimRequest, WorkloadError

Enter = Callable[[SimRequest, float | None], None]


class ArrivalStream:
    """The door of a simulated world, or of several that share an environment.

    Args:
        env: the SimPy environment.
        workload: requests in order of arrival, pulled one at a time as simulated time gets there.
        max_concurrency: a request arrives only while fewer than this many are in the system; None for no limit.

    Attributes:
        head: the next to arrive; None once the workload is over.

    Raises:
        ValueError: `max_concurrency` isn't at least 1.
        WorkloadError: from `start` or later, for arrivals that are not in order.
    """

    __slots__ = ("_enter", "_env", "_held", "_max_present", "_num_present", "_planned_at_s", "_workload", "head")

    def __init__(self, env: Any, workload: Iterable[SimRequest], max_concurrency: int | None = None) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"max_concurrency is {max_concurrency}, must be >= 1 (or None for no limit)")
        self._env = env
        self._workload = iter(workload)
        self._max_present = math.inf if max_concurrency is None else max_concurrency
        self._num_present = 0
        self._held = False  # the head, by max_concurrency
        self._planned_at_s = 0.0  # when the head's arrival was planned
        self._enter: Enter = _nobody_enters
        self.head: SimRequest | None = None

    def start(self, enter: Enter) -> None:
        """Open the door; called once.

        Args:
            enter: told of each request, and of its arrival in seconds if that is not the workload's.
        """
        self._enter = enter
        self._pull()

    def left(self) -> None:
        """Somebody who entered has left."""
        self._num_present -= 1
        if self._held:
            self._plan()

    def _pull(self) -> None:
        """Take the next request from the workload and plan its arrival."""
        before_s = self.head.arrival_s if self.head is not None else 0.0
        head = self.head = next(self._workload, None)
        if head is None:
            return
        if head.arrival_s < before_s:
            raise WorkloadError(
                f"workload: request {head.request_id!r} arrives at {head.arrival_s} s, before its predecessor "
                f"at {before_s} s; sort the workload by arrival"
            )
        self._plan()

    def _plan(self) -> None:
        head = self.head
        assert head is not None
        self._held = self._num_present >= self._max_present
        if self._held:
            return
        now_s = self._env.now
        delay_s = max(0.0, head.arrival_s - now_s)
        if now_s + delay_s < head.arrival_s:
            delay_s += math.ulp(head.arrival_s)  # rounding must not let anybody arrive before their time
        self._planned_at_s = now_s
        self._env.timeout(delay_s).callbacks.append(self._on_arrival)

    def _on_arrival(self, timeout: Any) -> None:
        head = self.head
        assert head is not None
        self._num_present += 1
        held_back = self._planned_at_s > head.arrival_s
        self._enter(head, self._env.now if held_back else None)
        self._pull()


def _nobody_enters(request: SimRequest, arrival_s: float | None) -> None:
    raise AssertionError(f"{request.request_id!r} arrives at {arrival_s}, but the stream was never started")

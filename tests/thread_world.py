"""A world of two worker threads: real concurrency and a real clock behind the same seam, toy tokens behind it."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

from toy_world import ToyDevices

from minedraft.request import Request
from minedraft.work import DraftWork, Event, RequestArrived, VerifyWork, Work, WorkDone


class ThreadBackend:
    """One thread per device group; completions and arrivals meet in one queue."""

    def __init__(self, requests: list[Request], devices: ToyDevices) -> None:
        self.devices = devices
        self._origin_s = time.monotonic()
        self._events: SimpleQueue[tuple[Event, VerifyWork | None]] = SimpleQueue()
        self._peeked: tuple[Event, VerifyWork | None] | None = None
        self._works: dict[type, SimpleQueue[Work | None]] = {DraftWork: SimpleQueue(), VerifyWork: SimpleQueue()}
        self._expected = len(requests)
        self._threads = [threading.Thread(target=self._serve, args=(q,)) for q in self._works.values()]
        for thread in self._threads:
            thread.start()
        for request in requests:
            devices.arrive(request)
            self._events.put((RequestArrived(request), None))

    def now(self) -> float:
        return time.monotonic() - self._origin_s

    def submit(self, work: Work) -> None:
        self._expected += 1
        self._works[type(work)].put(work)

    def next_event(self) -> Event | None:
        if not self._expected:
            return None
        self._expected -= 1
        event, verified = self._peeked or self._events.get(timeout=60)
        self._peeked = None
        if verified is not None:
            self.devices.deliver(verified)
        return event

    def ready(self) -> bool:
        if self._peeked is None:
            try:
                self._peeked = self._events.get_nowait()
            except Empty:
                return False
        return True

    def close(self) -> None:
        for queue in self._works.values():
            queue.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
            assert not thread.is_alive()

    def _serve(self, works: SimpleQueue[Work | None]) -> None:
        while (work := works.get()) is not None:
            started_s = self.now()
            result = self.devices.execute(work)
            verified = work if isinstance(work, VerifyWork) else None
            self._events.put((WorkDone(work.work_id, result, started_s, self.now()), verified))

"""Keeps a drafter alive, from a thread of its own: starts it, pings it, ends it when it hangs, and starts it again.

So a drafter that dies, or is stopped, while the target has nothing to do is noticed too, and loading and killing never
hold up a step. Time is counted in ticks of this thread, not by the clock: after a suspension of the whole machine the
drafter isn't blamed for the silence.

Law of this file: knows processes, not jobs; what it finds is put on the queue of `channel.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from minedraft.backends.vllm.drafter_process import DrafterProcess
from minedraft.backends.vllm.messages import Ping
from minedraft.backends.vllm.settings import DrafterSettings

logger = logging.getLogger(__name__)

_STOP_GRACE_S: Final = 10.0
_MAX_TICK_S: Final = 1.0
_TICKS_TO_HANG: Final = 5  # at least so many, whatever the timeout


class DrafterWatch:
    """Begins with a first process, which is started before this returns.

    Args:
        settings: see there.
        start: starts a process, given a function to call when it needs attention.
        on_end: called with a process that is gone and why; must not block.

    Attributes:
        process: the one that lives now, None between two.
    """

    def __init__(
        self,
        settings: DrafterSettings,
        start: Callable[[Callable[[], None]], DrafterProcess],
        on_end: Callable[[DrafterProcess, str], None],
    ) -> None:
        self._settings = settings
        self._start = start
        self._on_end = on_end
        self._alarm = threading.Event()
        self._is_closing = False
        self._restarts = Restarts(settings)
        self.process: DrafterProcess | None = start(self._alarm.set)
        self._thread = threading.Thread(target=self._run, name="minedraft-drafter-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the drafter, and wait until it is gone; a second call does nothing."""
        self._is_closing = True
        self._alarm.set()
        self._thread.join()

    def _run(self) -> None:
        is_first = True
        while self.process is not None:
            verdict, up_s = self._attend(self.process)
            process, self.process = self.process, None
            is_fit = process.num_answers and not verdict and not process.is_over
            reason = process.end(_STOP_GRACE_S if is_fit else 0.0)
            if self._is_closing:
                return
            reason = verdict or reason
            if self._settings.require_drafter and is_first and not process.num_answers:
                self._on_end(process, reason)
                return  # vLLM won't start, and says so
            logger.warning("the drafter is lost (%s); requests go on without drafts", reason)
            self._on_end(process, reason)
            self._restart(up_s)
            is_first = False

    def _restart(self, up_s: float) -> None:
        while (backoff_s := self._restarts.next_backoff_s(up_s)) is not None:
            logger.info("the drafter is started again in %.1f s", backoff_s)
            if self._sleep(backoff_s):
                return
            try:
                self.process = self._start(self._alarm.set)
                return
            except OSError:
                logger.exception("the drafter can't be started again")
                up_s = 0.0
        logger.error("the drafter is given up; there are no drafts until vLLM is started again")

    def _attend(self, process: DrafterProcess) -> tuple[str, float]:
        """Watch until the process must be ended; returns why, if it isn't gone by itself, and how long it was up."""
        patience = _Patience(process, self._settings)
        ready_s: float | None = None
        while True:
            self._alarm.wait(patience.tick_s)
            self._alarm.clear()
            if ready_s is None and process.num_answers:
                ready_s = time.monotonic()
                logger.info("the drafter is up (process %d)", process.popen.pid)
            verdict = process.verdict
            if not (verdict or process.is_over or self._is_closing):
                verdict = patience.tick()
            if verdict or process.is_over or self._is_closing:
                return verdict, 0.0 if ready_s is None else time.monotonic() - ready_s

    def _sleep(self, seconds: float) -> bool:
        """Whether this object was closed meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._is_closing and (left := deadline - time.monotonic()) > 0:
            self._alarm.wait(left)
            self._alarm.clear()
        return self._is_closing


class Restarts:
    """How often, and after what wait, a drafter is started again."""

    def __init__(self, settings: DrafterSettings) -> None:
        self._settings = settings
        self._num_used = 0

    def next_backoff_s(self, up_s: float) -> float | None:
        """Seconds to wait before the next start, of a drafter that was up for so long; None if there shall be none."""
        settings = self._settings
        if up_s >= settings.healthy_s:
            self._num_used = 0
        if settings.require_drafter and self._num_used >= settings.max_restarts:
            return None
        backoff_s = settings.restart_backoff_s * 2.0 ** min(self._num_used, 60)
        self._num_used += 1
        return min(backoff_s, settings.max_restart_backoff_s)


class _Patience:
    """Counts ticks in which a process loaded, owed an answer or was silent."""

    def __init__(self, process: DrafterProcess, settings: DrafterSettings) -> None:
        self.tick_s = min(_MAX_TICK_S, settings.hang_timeout_s / _TICKS_TO_HANG)
        self._process = process
        self._settings = settings
        self._seen = (-1, -1)
        self._num_silent = self._num_owing = 0

    def tick(self) -> str:
        """Call this every `tick_s`; returns why the process must be ended, or nothing."""
        process, settings = self._process, self._settings
        heard, answers = self._seen
        self._seen = process.num_heard, process.num_answers
        owing = process.num_owed > process.num_answers
        self._num_owing = self._num_owing + 1 if owing and answers == process.num_answers else 0
        if not process.num_answers:  # an engine that loads may hold Python's lock for long: no pings yet
            if self._num_owing * self.tick_s > settings.start_timeout_s:
                return f"it was not ready after {settings.start_timeout_s} s; raise start_timeout_s"
            return ""
        self._num_silent = self._num_silent + 1 if process.is_pinged and heard == process.num_heard else 0
        if not process.is_pinged:
            process.send(Ping())
        if self._num_owing * self.tick_s > settings.hang_timeout_s:
            return f"it has owed an answer for {settings.hang_timeout_s} s"
        if self._num_silent * self.tick_s > settings.hang_timeout_s:
            return f"it has been silent for {settings.hang_timeout_s} s"
        return ""

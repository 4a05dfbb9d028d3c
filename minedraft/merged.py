"""Several cores watched as if they were one (`MergedSink`)."""

from __future__ import annotations

from minedraft.journal import Sink
from minedraft.work import DrafterLost, DrafterReady, Event, Work, WorkDone, WorkFailed


class MergedSink:
    """A `Sink` of one of n cores, which tells others of it under ids that no two cores share.

    Work w of core i becomes w n + i, and its batch b becomes b + i N. What all cores are told at once (the shared
    drafter is lost, or back) is passed on once.

    Args:
        number: of this core, from 0.
        num_cores: n.
        num_batches: N, of each core.
        sinks: those that see all cores. Closing this one leaves them open.
    """

    def __init__(self, number: int, num_cores: int, num_batches: int, *sinks: Sink) -> None:
        self._number = number
        self._num_cores = num_cores
        self._first_batch = number * num_batches
        self._sinks = sinks

    def on_start(self, now_s: float) -> None:
        """See `Sink`."""
        if not self._number:
            for sink in self._sinks:
                sink.on_start(now_s)

    def on_asked(self, now_s: float) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.on_asked(now_s)

    def on_submit(self, now_s: float, work: Work) -> None:
        """See `Sink`."""
        work = work._replace(work_id=self._work_id(work.work_id), batch=work.batch + self._first_batch)
        for sink in self._sinks:
            sink.on_submit(now_s, work)

    def on_event(self, now_s: float, event: Event) -> None:
        """See `Sink`."""
        if isinstance(event, WorkDone | WorkFailed):
            event = event._replace(work_id=self._work_id(event.work_id))
        elif isinstance(event, DrafterLost | DrafterReady) and self._number:
            return
        for sink in self._sinks:
            sink.on_event(now_s, event)

    def close(self) -> None:
        """See `Sink`."""

    def _work_id(self, work_id: int) -> int:
        return work_id * self._num_cores + self._number

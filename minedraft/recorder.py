"""Watch a run at the seam (`Recorder`).

A run is the list of events that the core saw, each with the time that the core saw, and of works that it
decided on. Whoever wants to know about a run (journal, metrics, timeline) is a `Sink` of that one stream,
live or read from disk; nothing is measured inside the core.

Law of this file: no clock of its own, no knowledge of what a sink does.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from minedraft.backend import Backend
from minedraft.work import Event, Work


class Sink(Protocol):
    """Somebody who watches the seam. Called in the order in which things happen; must not block."""

    def on_start(self, now_s: float) -> None:
        """Once, before anything else: the time that the core sees until the first event, in seconds."""
        ...

    def on_asked(self, now_s: float) -> None:
        """The events of this moment are told; the core is asked for work now."""
        ...

    def on_submit(self, now_s: float, work: Work) -> None:
        """The core has decided on a work."""
        ...

    def on_event(self, now_s: float, event: Event) -> None:
        """The world has reported an event, which the core sees at `now_s`."""
        ...

    def close(self) -> None:
        """Nothing more will come; may be called twice."""
        ...


class Recorder:
    """A `Backend` that passes everything through to another one and tells the sinks.

    Real clocks move between two calls of `now`; this one reads the clock once per event, so that the sinks
    get exactly the time that the core sees, and time passes only inside `next_event`. It may be used in a
    `with` statement, which closes the sinks at the end, also after an exception.
    """

    def __init__(self, backend: Backend, *sinks: Sink) -> None:
        self._sinks = sinks
        self._clock = backend.now
        self._submit = backend.submit
        self._next_event = backend.next_event
        self._ready = backend.ready
        self._on_asked = tuple([sink.on_asked for sink in sinks])
        self._on_submit = tuple([sink.on_submit for sink in sinks])
        self._on_event = tuple([sink.on_event for sink in sinks])
        self._now_s = backend.now()
        for sink in sinks:
            sink.on_start(self._now_s)

    def now(self) -> float:
        """The time at which the last event was returned, in seconds on the backend's clock."""
        return self._now_s

    def submit(self, work: Work) -> None:
        """Tell the sinks, then the backend: a work that breaks the backend is in the journal."""
        now_s = self._now_s
        for on_submit in self._on_submit:
            on_submit(now_s, work)
        self._submit(work)

    def next_event(self) -> Event | None:
        """Wait for the backend's next event, read the clock, tell the sinks."""
        event = self._next_event()
        self._now_s = now_s = self._clock()
        if event is not None:
            for on_event in self._on_event:
                on_event(now_s, event)
        return event

    def ready(self) -> bool:
        """Ask the backend; its no means that the core is asked for work next, which the sinks are told."""
        if self._ready():
            return True
        for on_asked in self._on_asked:
            on_asked(self._now_s)
        return False

    def close(self) -> None:
        """Close the sinks (not the backend)."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

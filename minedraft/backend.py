"""The seam between the core and a world, in words and as two protocols.

Contract of `Backend`:

* Time passes only inside `next_event`. `now` never goes back, and is the same before and after `submit`.
* `submit` never blocks. Works of one device group run in the order of submission. The core keeps at most one work
  in flight per device group.
* `next_event` blocks until something happened and returns it; None means that nothing will ever happen again.
* Every submitted work comes back exactly once, as `WorkDone` or `WorkFailed`, except that a `DrafterLost` ends the
  draft work in flight (a result for it that still comes is ignored).
* What happened at the same moment is told together: after an event the engine asks `ready`, takes the next event while
  the answer is yes, and only then asks the core for work.
* A work may name a request that was aborted or preempted after it was decided on, even in the same call: it is run all
  the same, and its result for that request is ignored.
* The core waits for works without a deadline of its own. A world that gives up on a drafter that hangs or is late says
  `DrafterLost` (or `WorkFailed`), and the requests go on without drafts.
* An event is reported once. Ids of requests that are alive are unique.
"""

from __future__ import annotations

from typing import Protocol

from minedraft.work import Event, Work


class Clock(Protocol):
    """Something that knows the time."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never decreases."""
        ...


class Backend(Clock, Protocol):
    """A world: it runs work on two device groups and reports events. See the module's contract."""

    def submit(self, work: Work) -> None:
        """Start a work, or queue it behind its device group's earlier work; never blocks."""
        ...

    def next_event(self) -> Event | None:
        """Wait for the next event; None if nothing will ever happen again."""
        ...

    def ready(self) -> bool:
        """Whether another event has happened already: `next_event` would return it at once."""
        ...

"""The one loop: submit what the scheduler wants, wait for what happens next, tell the scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from minedraft.backend import Backend
from minedraft.request import RequestOutput
from minedraft.scheduler import Scheduler
from minedraft.work import WorldError


class Engine:
    """Drives a `Scheduler` against a `Backend` until nothing will ever happen again.

    The same object serves every world that does not own its loop; vLLM, which does, calls the scheduler's two
    verbs itself.
    """

    def __init__(self, scheduler: Scheduler, backend: Backend) -> None:
        self.scheduler = scheduler
        self.backend = backend

    def step(self) -> list[RequestOutput] | None:
        """One turn of the loop: `ask`, then `tell`.

        Returns:
            The requests that ended in this turn; None when nothing will ever happen again.

        Raises:
            WorldError: the backend broke the contract of the seam.
            PolicyError: a policy returned an illegal decision.
        """
        self.ask()
        return self.tell()

    def ask(self) -> None:
        """Submit what the scheduler wants to do now; the first half of `step`."""
        backend = self.backend
        for work in self.scheduler.schedule(backend.now()):
            backend.submit(work)

    def tell(self) -> list[RequestOutput] | None:
        """Wait for the next event and tell the scheduler all that happened in its moment; the second half of `step`."""
        backend = self.backend
        event = backend.next_event()
        if event is None:
            return None
        outputs = self.scheduler.update(event, backend.now())
        while backend.ready():
            event = backend.next_event()
            assert event is not None, "a backend was ready, but had no event"
            outputs += self.scheduler.update(event, backend.now())
        return outputs

    def outputs(self) -> Iterator[RequestOutput]:
        """Run, yielding every request as it ends.

        Raises:
            WorldError: see `step`; or nothing will happen any more, but requests are unfinished.
        """
        while (ended := self.step()) is not None:
            yield from ended
        if self.scheduler.num_unfinished:
            raise WorldError(f"the world came to its end with {self.scheduler.num_unfinished} requests unfinished")

    def run(self) -> list[RequestOutput]:
        """Run to the end; all requests' outputs in the order in which they ended."""
        return list(self.outputs())

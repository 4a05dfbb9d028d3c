"""The star: n target replicas, each with a core of its own, that share one drafter (`Star`, `StarEngine`).

All replicas live in one environment. Each is a whole `SimBackend`: its target, its host, its truth; only the drafter's
device is the same object. Arrivals come through one door and are given to a replica by a router, once and for all.

**The drafter's queue** is first in, first out over all replicas; a work is never interrupted, and works of different
replicas are never drafted together. Within a moment the replicas submit in order of their number. (The one whose target
is free soonest first would be a better order where the queue is long; with a short one it changes nothing.) The drafter
holds the draft KV of all: each replica's draft pool is its share.

With constant stage times the replicas fall into a rhythm in which nobody waits as long as the drafter isn't full, and
the round takes max(max(V, t) + o, n t): `minedraft.theory.star`. Stage times that vary, by prompts or batches, make
them wait.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from minedraft.engine import Engine
from minedraft.request import RequestId, RequestOutput
from minedraft.sim.arrivals import ArrivalStream
from minedraft.sim.backend import Device, SimBackend, new_environment
from minedraft.sim.faults import Faults
from minedraft.sim.workload import SimRequest, WorkloadError
from minedraft.work import WorldError

_NO_FAULTS: Final = Faults()
_SEEDS_APART: Final = 1_000_003  # so that a replica's coins are not those of a run with one of the next seeds


class Router(Protocol):
    """Decides which replica serves a request."""

    def choose(self, request: SimRequest, replicas: Sequence[SimBackend]) -> int:
        """The number of a replica; what it knows of them is `num_present`, as a front end would."""
        ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimRequest, replicas: Sequence[SimBackend]) -> int:
        """See `Router`."""
        chosen = self._next
        self._next = (chosen + 1) % len(replicas)
        return chosen


class LeastRequests:
    """The replica with the fewest requests that have not ended; the first of equals."""

    def choose(self, request: SimRequest, replicas: Sequence[SimBackend]) -> int:
        """See `Router`."""
        return min(range(len(replicas)), key=lambda number: replicas[number].num_present)


ROUTERS: Final[Mapping[str, Callable[[], Router]]] = {"round-robin": RoundRobin, "least-requests": LeastRequests}


def make_star(
    make_world: Callable[..., SimBackend],
    workload: Iterable[SimRequest],
    num_replicas: int,
    router: Router,
    *,
    shares_drafter: bool = True,
    max_concurrency: int | None = None,
    faults: Faults = _NO_FAULTS,
) -> Star:
    """A star of worlds that are alike.

    Args:
        make_world: makes one from an `ArrivalStream` and the arguments `env`, `drafter` and `faults` of `SimBackend`.
        workload: of all replicas together.
        num_replicas: n, at least 1.
        router: gives each request to a replica.
        shares_drafter: the replicas have one drafter's device; else each has what `make_world` gives it.
        max_concurrency: most requests in all replicas together, see `SimBackend`.
        faults: outages and pauses of the drafter happen once if it is shared; pauses of the target happen to every
            target; works fail by coins of each replica's own.

    Raises:
        ValueError: an argument is out of range.
        WorkloadError: see `Star`.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}, must be >= 1")
    env = new_environment()
    arrivals = ArrivalStream(env, workload, max_concurrency)
    drafter = Device(env) if shares_drafter else None
    replicas = [
        make_world(arrivals, env=env, drafter=drafter, faults=_share_of(faults, number, shares_drafter))
        for number in range(num_replicas)
    ]
    return Star(env, arrivals, replicas, router)


def _share_of(faults: Faults, number: int, shares_drafter: bool) -> Faults:
    """What goes wrong in one replica; the first one's is what it would be without the others."""
    if not number:
        return faults
    pauses = tuple(pause for pause in faults.pauses if pause.device == "target" or not shares_drafter)
    return dataclasses.replace(faults, pauses=pauses, seed=faults.seed + number * _SEEDS_APART)


class Star:
    """Replicas in one environment, and their arrivals.

    Args:
        env: the environment of all.
        arrivals: not started yet.
        replicas: made with `env`, `arrivals` and, where they share one, the same `drafter`.
        router: gives each request to a replica.

    Raises:
        WorkloadError: from here or from `wait`; see `SimBackend`. An id is unique over all replicas.
    """

    def __init__(self, env: Any, arrivals: ArrivalStream, replicas: Sequence[SimBackend], router: Router) -> None:
        self.env = env
        self.replicas = tuple(replicas)
        self._arrivals = arrivals
        self._router = router
        arrivals.start(self._enter)

    def wait(self) -> bool:
        """Let time pass until something happened somewhere, and all of that moment has.

        Returns:
            False if nothing will ever happen again: the workload is over and everybody is at rest, or the environment
            has no more events.
        """
        env, replicas = self.env, self.replicas
        while not any(replica.has_events for replica in replicas):
            over = self._arrivals.head is None and all(replica.at_rest for replica in replicas)
            if over or env.peek() == math.inf:
                return False
            env.step()
        while env.peek() <= env.now:
            env.step()
        return True

    def note_ended(self, request_id: RequestId) -> None:
        """See `SimBackend`."""
        for replica in self.replicas:
            replica.note_ended(request_id)

    def _enter(self, request: SimRequest, arrival_s: float | None) -> None:
        request_id = request.request_id
        if any(replica.serves(request_id) for replica in self.replicas):
            raise WorkloadError(
                f"workload: the id of request {request_id!r} belongs to one that is still alive; give each its own id"
            )
        self.replicas[self._router.choose(request, self.replicas)].enter(request, arrival_s)


class StarEngine:
    """Runs several engines over a star: the loop of `Engine`, in which each takes the turns that concern it.

    Args:
        star: the world.
        engines: one per replica, each on its replica (or on somebody who passes everything through to it).
    """

    def __init__(self, star: Star, engines: Sequence[Engine]) -> None:
        assert len(engines) == len(star.replicas), (len(engines), len(star.replicas))
        self.star = star
        self.engines = tuple(engines)
        self._told: Sequence[Engine] = self.engines

    def step(self) -> list[RequestOutput] | None:
        """Ask the cores that were told something what they want to do, and tell what happens next.

        Returns:
            The requests that ended in this turn; None when nothing will ever happen again.

        Raises:
            WorldError: the backend broke the contract of the seam.
            PolicyError: a policy returned an illegal decision.
        """
        for engine in self._told:
            engine.ask()
        if not self.star.wait():
            return None
        pairs = zip(self.engines, self.star.replicas, strict=True)
        self._told = [engine for engine, replica in pairs if replica.has_events]
        outputs: list[RequestOutput] = []
        for engine in self._told:
            outputs += engine.tell() or ()
        return outputs

    def run(self) -> list[RequestOutput]:
        """Run to the end; all requests' outputs in the order in which they ended.

        Raises:
            WorldError: see `step`; or nothing will happen any more, but requests are unfinished.
        """
        outputs: list[RequestOutput] = []
        while (ended := self.step()) is not None:
            outputs += ended
        unfinished = sum(engine.scheduler.num_unfinished for engine in self.engines)
        if unfinished:
            raise WorldError(f"the world came to its end with {unfinished} requests unfinished")
        return outputs

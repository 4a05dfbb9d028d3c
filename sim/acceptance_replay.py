"""`LoggedAcceptance`: replays recorded acceptance, with any draft length and any policy.

A log says of output positions whether the draft was right (`minedraft.sim.acceptance_log`), and a draft's fate is its
position's: so runs that differ in k, policies or batches share their luck, and a run with the rounds of the recorded
one repeats its counts exactly. With greedy decoding that is what a real run would do: the drafter sees the target's
own text up to there, or an earlier draft is refused. With sampling it is one draw out of many.

Positions that the log knows nothing of (bonus tokens, steps without drafts) get a fate by lot, with the request's own
share of right drafts as the chance; like all fates it is keyed by (seed, request, position).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import get_close_matches

from minedraft.request import RequestId
from minedraft.sim.acceptance_log import UNKNOWN, LoggedRequest
from minedraft.sim.fates import TokenFates, threshold
from minedraft.sim.workload import WorkloadError


class LoggedAcceptance:
    """An `AcceptanceModel` that looks the fates up.

    A simulated request replays one recorded request. When its text is longer than the recorded one, the record starts
    over from its first position.

    Args:
        requests: what was recorded, at least one.
        by_id: a request replays the one of the same id. Otherwise each draws one by lot (with replacement), keyed by
            (seed, request), as if workload and log had nothing to do with each other.
        seed: of the lots and of unknown positions.

    Raises:
        ValueError: no requests; with `by_id`, one without an id, or an id twice.
    """

    def __init__(self, requests: Sequence[LoggedRequest], *, by_id: bool = False, seed: int = 0) -> None:
        if not requests:
            raise ValueError("the acceptance log is empty")
        self._requests = requests
        self._by_id = _ids_of(requests) if by_id else None
        self._seed = seed
        self._replayed: dict[RequestId, LoggedRequest] = {}
        self._rates: dict[RequestId, float] = {}
        self._fates = TokenFates(seed)

    def num_accepted(self, request_id: RequestId, position: int, num_draft: int) -> int:
        """See `AcceptanceModel`.

        Raises:
            WorkloadError: see `recorded`.
        """
        outcomes = (self._replayed.get(request_id) or self.recorded(request_id)).outcomes
        length = len(outcomes)
        for slot in range(num_draft):
            outcome = outcomes[(position + slot) % length]
            if not (self._draw(request_id, position + slot) if outcome == UNKNOWN else outcome):
                return slot
        return num_draft

    def conditional_rates(self, request_id: RequestId, num_draft: int) -> tuple[float, ...]:
        """See `AcceptanceModel`; the request's share of right drafts in the log, for every slot."""
        return (self._rate(request_id),) * num_draft

    def forget(self, request_id: RequestId) -> None:
        """See `AcceptanceModel`."""
        self._replayed.pop(request_id, None)
        self._rates.pop(request_id, None)
        self._fates.forget(request_id)

    def recorded(self, request_id: RequestId) -> LoggedRequest:
        """The one that a request replays.

        Raises:
            WorkloadError: with `by_id`, the log has no such id.
        """
        if self._by_id is None:
            lot = random.Random(f"{self._seed}/log/{request_id}").randrange(len(self._requests))
            found = self._requests[lot]
        else:
            known = self._by_id.get(request_id)
            if known is None:
                near = get_close_matches(request_id, self._by_id, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"its first is {next(iter(self._by_id))!r};"
                raise WorkloadError(
                    f"the acceptance log has no request {request_id!r}; {hint} acceptance.by_id = false lets every "
                    "request draw one of the log's by lot"
                )
            found = known
        self._replayed[request_id] = found
        return found

    def _draw(self, request_id: RequestId, position: int) -> bool:
        return self._fates.num_below(request_id, position, 1, threshold(self._rate(request_id))) == 1

    def _rate(self, request_id: RequestId) -> float:
        rate = self._rates.get(request_id)
        if rate is None:
            rate = self._rates[request_id] = (self._replayed.get(request_id) or self.recorded(request_id)).rate
        return rate


def _ids_of(requests: Sequence[LoggedRequest]) -> dict[RequestId, LoggedRequest]:
    found: dict[RequestId, LoggedRequest] = {}
    for number, request in enumerate(requests, start=1):
        if request.request_id is None:
            raise ValueError(
                f"by_id is set, but request {number} of the acceptance log has no request_id; give each one, or set it "
                "to false"
            )
        if request.request_id in found:
            raise ValueError(
                f"by_id is set, but the acceptance log has request {request.request_id!r} twice; rename one, or set it "
                "to false"
            )
        found[request.request_id] = request
    return found

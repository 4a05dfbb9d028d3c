"""vLLM's requests of a batch are looked up once, and again after anything happened to anybody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


class Requests(dict[str, Any]):
    lookups = 0

    def get(self, *args: Any) -> Any:
        self.lookups += 1
        return super().get(*args)


def make() -> tuple[Any, Requests, tuple[str, ...]]:
    from vllm.v1.request import RequestStatus

    from minedraft.backends.vllm.roster import Roster, Stays

    requests = Requests({name: SimpleNamespace(status=RequestStatus.RUNNING) for name in "abc"})
    stays = Stays()
    for incarnation, name in enumerate("abc"):
        stays[name] = incarnation
    return Roster(SimpleNamespace(requests=requests), stays), requests, ("a", "b", "c")


def test_the_same_names_need_no_second_look() -> None:
    roster, requests, ids = make()
    found = roster.find(0, ids, (0, 1, 2))
    assert found == list(requests.values())
    assert requests.lookups == 3
    assert roster.find(0, ids, (0, 1, 2)) is found
    assert requests.lookups == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda stays: stays.forget("b"),
        lambda stays: stays.__delitem__("b"),
        lambda stays: stays.__setitem__("b", 7),
        lambda stays: stays.clear(),
    ],
)
def test_whatever_happens_to_a_stay_is_seen(change: Any) -> None:
    roster, _, ids = make()
    assert roster.find(0, ids, (0, 1, 2)) is not None
    change(roster.stays)
    assert roster.find(0, ids, (0, 1, 2)) is None


def test_who_does_not_run_is_not_found() -> None:
    roster, requests, ids = make()
    requests["c"].status = None
    assert roster.find(0, ids, (0, 1, 2)) is None
    del requests["c"]
    assert roster.find(0, ids, (0, 1, 2)) is None


def test_forgetting_a_stranger_changes_nothing() -> None:
    roster, _, ids = make()
    found = roster.find(0, ids, (0, 1, 2))
    roster.stays.forget("nobody")
    assert roster.find(0, ids, (0, 1, 2)) is found

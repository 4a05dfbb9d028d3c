"""vLLM's requests of a batch are looked up once, and again after anything happened to anybody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minedraft.work import VerifyWork


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


def test_who_lost_its_row_behind_the_cores_back_is_found_out_before_a_step() -> None:
    roster, requests, ids = make()
    assert roster.find(0, ids, (0, 1, 2)) is not None
    requests["b"].status = None  # no stay has ended, as far as the core knows
    roster.stays.changed()
    assert roster.find(0, ids, (0, 1, 2)) is None


def test_forgetting_a_stranger_changes_nothing() -> None:
    roster, _, ids = make()
    found = roster.find(0, ids, (0, 1, 2))
    roster.stays.forget("nobody")
    assert roster.find(0, ids, (0, 1, 2)) is found


# --- What is planned for somebody is done to nobody else.


def world(**requests: Any) -> Any:
    from minedraft.backends.vllm.roster import Roster, Stays

    scheduler = SimpleNamespace(requests=Requests(requests), running=[])
    return scheduler, Roster(scheduler, Stays())


def request(request_id: str, **fields: Any) -> Any:
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(request_id=request_id, status=RequestStatus.RUNNING, spec_token_ids=[], **fields)


def verify_work(**columns: tuple[Any, ...]) -> VerifyWork:
    size = len(columns["request_ids"])
    usual = {
        "incarnations": tuple(range(size)),
        "rounds": (1,) * size,
        "num_computed": (9,) * size,
        "num_new": (1,) * size,
        "num_draft": (0,) * size,
        "is_last": (True,) * size,
        "zero_draft": (),
        "batch_sizes": (),
        "freed": (),
    }
    return VerifyWork(work_id=5, batch=0, **{**usual, **columns})  # type: ignore[arg-type]


def test_drafts_that_nobody_verifies_are_cut_though_the_numbers_agree() -> None:
    """Equal counts of other requests say nothing."""
    from minedraft.backends.vllm.step import arrange

    first, second = request("a"), request("s")
    first.spec_token_ids, second.spec_token_ids = [5, 6, 7], [7, 7, 7]
    scheduler, roster = world(a=first, s=second)
    roster.stays["a"], roster.stays["s"] = 0, 1
    roster.handed[0] = (("a", "p"), (3, 0))
    work = verify_work(request_ids=("a", "s"), num_draft=(3, 0))
    step = arrange(scheduler, None, roster, work, ())  # type: ignore[arg-type]
    assert step.expected == {"a": 4, "s": 1}
    assert (first.spec_token_ids, second.spec_token_ids) == ([5, 6, 7], [])


def test_a_plan_for_an_aborted_request_is_not_carried_out_on_its_namesake() -> None:
    from vllm.v1.request import RequestStatus

    from minedraft.backends.vllm.step import arrange
    from minedraft.backends.vllm.waiting_room import WaitingRoom

    namesake = request("x", num_tokens=80, num_computed_tokens=0)
    namesake.status = RequestStatus.WAITING
    scheduler, roster = world(x=namesake)
    room = WaitingRoom()
    room.add_request(namesake)
    work = verify_work(request_ids=("x",), num_computed=(0,), num_new=(50,))
    step = arrange(scheduler, room, roster, work, {"x": None})
    assert not step.expected
    assert not roster.stays
    assert not room

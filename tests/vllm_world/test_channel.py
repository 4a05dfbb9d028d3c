"""The parts that need no engine: messages, settings, drafts, the waiting room."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest


def test_messages_survive_the_socket() -> None:
    from minedraft.backends.vllm import messages as m

    sent = [
        m.Hello(1, 100, 32, 4096, 512),
        m.DraftJob(3, [("gone", 2)], [m.DraftEntry("r", 5, 7, [1, 2], 4)], True),
        m.Reset(),
        m.Drafted(3, [[4, 5], []], [[0.5, 0.25], []], 1.5, 2.5),
        m.JobFailed(3, "no"),
        m.LoadFailed("no model"),
        m.Stop(),
    ]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(m.pack(message) for message in sent))
        for message in sent:
            got = m.receive(theirs)
            assert got == message
            assert type(got) is type(message)
        ours.sendall(m.pack(m.Stop())[:3])
        ours.shutdown(socket.SHUT_WR)
        assert m.receive(theirs) is None


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc0", b"\x04\x00\x00\x00\x92\xa1x\x90"])
def test_garbage_is_refused(frame: bytes) -> None:
    from minedraft.backends.vllm.errors import VllmWorldError
    from minedraft.backends.vllm.messages import receive

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame)
        with pytest.raises(VllmWorldError, match="channel"):
            receive(theirs)


def test_settings_name_what_is_wrong() -> None:
    from minedraft.backends.vllm.errors import VllmWorldError
    from minedraft.backends.vllm.settings import parse_settings

    drafter = {"engine": {"model": "m"}}
    assert parse_settings({"minedraft": {"drafter": drafter}}).policy_specs == {"mode": "fixed,mode=psd"}
    assert parse_settings({"minedraft": {"mode": "ar"}}).drafter is None
    for values, words in [
        ({"mode": "pds", "drafter": drafter}, "psd"),
        ({"mode": "psd"}, "needs minedraft.drafter"),
        ({"drafter": {"engine": {}}}, "lacks 'model'"),
        ({"drafter": {**drafter, "deadlines": 3}}, "did you mean 'deadline_s'"),
        ({"drafter": {**drafter, "deadline_s": 0}}, "must be > 0"),
        ({"num_batch": 2}, "did you mean 'num_batches'"),
        ({"drafter": drafter, "num_batches": 1}, "at least 2"),
    ]:
        with pytest.raises(VllmWorldError, match=words):
            parse_settings({"minedraft": values})


def test_a_draft_is_used_once_and_by_its_key() -> None:
    from minedraft.backends.vllm.drafts import DraftBook
    from minedraft.backends.vllm.messages import Drafted
    from minedraft.work import DraftWork

    book = DraftBook()
    work = DraftWork(0, 0, ("a", "b", "dead"), (1, 2, 3), (0, 4, 0), (0, 0, 0), (1, 1, 1), (2, 2, 2), ())
    reply = Drafted(0, [[5, 6], [7], [8]], [[0.5, 0.25], [1.0], [1.0]], 0.0, 1.0)
    result = book.put(work, reply, {"a": None, "b": None})
    assert result.num_drafted == (2, 1, 1)
    assert result.probs == ((0.5, 0.25), (1.0,), (1.0,))
    assert book.take("a", 1, 0, 1) == [5]
    assert book.take("a", 1, 0, 1) == []
    assert book.take("b", 2, 5, 1) == []
    assert book.take("dead", 3, 0, 1) == []


def test_waiting_room_shows_only_the_admitted() -> None:
    from minedraft.backends.vllm.waiting_room import WaitingRoom

    a, b, c = (SimpleNamespace(request_id=name) for name in "abc")
    room = WaitingRoom()
    for request in (a, b, c):
        room.add_request(request)
    assert len(room) == 3
    assert not room
    room.admit([c, a])
    assert room
    assert room.pop_request() is c
    assert room.peek_request() is a
    assert len(room) == 2
    room.withdraw()
    assert not room
    assert sorted(request.request_id for request in room) == ["a", "b"]
    room.remove_requests(dict.fromkeys(()))
    room.remove_request(b)
    assert b not in room
    assert a in room

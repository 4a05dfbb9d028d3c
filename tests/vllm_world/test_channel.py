"""The parts that need no engine: messages, settings, the waiting room, and the drafter's channel."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def test_messages_survive_the_socket() -> None:
    from minedraft.backends.vllm import messages as m

    sent = [
        m.Hello(2, 100, 99, 32, 4096, 512, 128),
        m.DraftJob.of(3, [("gone", 2)], [m.DraftEntry("r", 5, 7, [1, 2], 4)], True),
        m.Reset(),
        m.Sleep(),
        m.Wake(),
        m.Asleep(),
        m.Ping(),
        m.Pong(),
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


def test_a_job_gives_each_entry_its_tokens() -> None:
    from minedraft.backends.vllm.errors import VllmWorldError
    from minedraft.backends.vllm.messages import DraftEntry, DraftJob

    entries = [DraftEntry("a", 0, 3, [7, 8], 2), DraftEntry("b", 1, 0, [], 0), DraftEntry("c", 2, 5, [9], 1)]
    job = DraftJob.of(4, [], entries, False)
    assert job.entries == entries
    for tokens in ([7, 8], [7, 8, 9, 10]):
        with pytest.raises(VllmWorldError, match="tokens for 3"):
            _ = job._replace(token_ids=tokens).entries


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
        ({"drafter": {**drafter, "require_drafter": False}}, "num_gpu_blocks_override"),
        ({"num_batch": 2}, "did you mean 'num_batches'"),
        ({"drafter": drafter, "num_batches": 1}, "at least 2"),
    ]:
        with pytest.raises(VllmWorldError, match=words):
            parse_settings({"minedraft": values})


def test_drafts_reach_the_request_they_were_made_for() -> None:
    """Not one that has started over since, nor one that is gone; the core is told of all of them."""
    from minedraft.backends.vllm.drafts import hand_over
    from minedraft.backends.vllm.messages import Drafted
    from minedraft.backends.vllm.roster import Roster, Stays
    from minedraft.work import DraftWork

    requests = {name: SimpleNamespace(spec_token_ids=[], structured_output_request=None) for name in "ab"}
    scheduler: Any = SimpleNamespace(requests=requests)
    work = DraftWork(0, 0, ("a", "b", "dead"), (1, 2, 3), (0, 4, 0), (0, 0, 0), (1, 1, 1), (2, 2, 2), ())
    reply = Drafted(0, [[5, 6, 9], [7], [8]], [[0.5, 0.25, 0.1], [1.0], [1.0]], 0.0, 1.0)
    stays = Stays()
    stays["a"], stays["b"] = 1, 5
    result = hand_over(scheduler, Roster(scheduler, stays), work, reply, False)
    assert result.num_drafted == (2, 1, 1)
    assert result.probs == ((0.5, 0.25), (1.0,), (1.0,))
    assert requests["a"].spec_token_ids == [5, 6]
    assert requests["b"].spec_token_ids == []


def test_what_the_drafter_only_takes_in_changes_no_request() -> None:
    """They may be in verification: their drafts, and what is known of them, are left alone."""
    from minedraft.backends.vllm.drafts import hand_over, make_job
    from minedraft.backends.vllm.messages import Drafted
    from minedraft.backends.vllm.roster import Roster, Stays
    from minedraft.work import DraftWork

    tokens = {"a": [1, 2, 3, 4], "waiting": [5, 6, 7]}
    requests = {
        name: SimpleNamespace(spec_token_ids=[8, 9], structured_output_request=None, _all_token_ids=tokens[name])
        for name in tokens
    }
    scheduler: Any = SimpleNamespace(requests=requests)
    stays = Stays()
    stays["a"] = 1
    roster = Roster(scheduler, stays)
    roster.handed[0] = (("a",), (2,))
    work = DraftWork(0, 0, ("a", "waiting"), (1, 2), (0, 0), (1, 0), (2, 3), (0, 0), ())
    job = make_job(scheduler, roster, work, True)
    assert (list(job.num_new), list(job.token_ids)) == ([2, 3], [2, 3, 5, 6, 7])
    result = hand_over(scheduler, roster, work, Drafted(0, [[], []], [[], []], 0.0, 1.0), True, 5)
    assert (result.num_drafted, result.probs) == ((0, 0), None)
    assert [request.spec_token_ids for request in requests.values()] == [[8, 9], [8, 9]]
    assert roster.handed == {0: (("a",), (2,))}


def test_waiting_room_shows_only_the_admitted() -> None:
    from minedraft.backends.vllm.waiting_room import WaitingRoom

    a, b, c = (SimpleNamespace(request_id=name) for name in "abc")
    room = WaitingRoom()
    for request in (a, b, c):
        room.add_request(request)
    assert len(room) == 3
    assert not room
    for request in (c, a):
        room.admit(request)
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


def test_token_array_is_a_list() -> None:
    """Cut and extended at random, at sizes that make it grow; a view of before still shows what it held."""
    from minedraft.backends.vllm.token_array import TokenArray

    rng = random.Random(5)
    array, tokens = TokenArray(), []
    for _ in range(300):
        keep = rng.randrange(0, 2 * len(tokens) + 1)
        array.cut(keep)
        del tokens[keep:]
        new = [rng.randrange(1 << 31) for _ in range(rng.choice((0, 1, 5, 700)))]
        array.extend(new)
        tokens += new
        assert len(array) == len(tokens)
        assert array.view.tolist() == tokens


def test_a_session_packs_what_it_has() -> None:
    """Whatever became of its drafts, accepted or not, and however long nobody looked at the array."""
    from minedraft.backends.vllm.drafter import Session

    rng = random.Random(6)
    session, committed = Session(), [0]
    session.go_on(0, [0])
    for i in range(200):
        drafts = [1000 * i + j for j in range(rng.randrange(5))]
        session.tokens += drafts
        accepted = rng.randrange(len(drafts) + 1)
        start = max(0, len(committed) + accepted - rng.randrange(3))
        committed += [*drafts[:accepted], -i]
        session.go_on(start, committed[start:])
        assert session.tokens == committed
        if rng.random() < 0.7:
            assert session.pack().tolist() == committed


def test_prompts_reach_the_workers_as_arrays() -> None:
    """Of those integers that vLLM makes of a list, so that its prompt's log-probabilities can be looked up."""
    import numpy as np

    from minedraft.backends.vllm import compat

    joining = [SimpleNamespace(prompt_token_ids=[5, 6, 7]), SimpleNamespace(prompt_token_ids=None)]
    compat.pack_prompts(SimpleNamespace(scheduled_new_reqs=joining))
    assert isinstance(joining[0].prompt_token_ids, np.ndarray)
    assert (joining[0].prompt_token_ids.tolist(), joining[0].prompt_token_ids.dtype) == ([5, 6, 7], np.int64)
    assert joining[1].prompt_token_ids is None


def test_running_requests_are_hidden_and_shown_again() -> None:
    from minedraft.backends.vllm import compat

    requests = [_Hashable(request_id=name) for name in "abc"]
    for chosen in (requests[1:], requests[:1], [], requests):
        scheduler: Any = SimpleNamespace(running=requests.copy())
        shown = chosen.copy()
        others = compat.show_running(scheduler, shown)
        assert scheduler.running is shown
        assert others == [request for request in requests if request not in chosen]
        compat.show_again(scheduler, others)
        assert sorted(request.request_id for request in scheduler.running) == ["a", "b", "c"]


def test_whoever_was_scheduled_counts_until_it_loses_its_place() -> None:
    from minedraft.backends.vllm import compat

    ids = compat._EverScheduled(["a", "b"])
    ids.clear()  # what vLLM does with every step
    ids.update(["c"])
    compat.forget_scheduled(SimpleNamespace(prev_step_scheduled_req_ids=ids), "b")
    compat.forget_scheduled(SimpleNamespace(prev_step_scheduled_req_ids=ids), "stranger")
    assert ids == {"a", "c"}


class _Hashable(SimpleNamespace):
    __hash__ = object.__hash__


# --- The channel, with processes that misbehave.


@pytest.fixture
def open_channel(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes channels to `scripted_drafter.py`, and ends them."""
    from minedraft.backends.vllm.channel import DrafterChannel
    from minedraft.backends.vllm.settings import DrafterSettings

    channels = []

    def open_channel(script: str, **options: Any) -> Any:
        engine = {"model": "m", "script": script, "folder": str(tmp_path), **options.pop("engine", {})}
        limits = {"block_size": 32, "max_model_len": 256, "max_num_batched_tokens": 64}
        defaults = {"restart_backoff_s": 0.01, "max_restart_backoff_s": 0.05, "deadline_s": 30.0}
        settings = DrafterSettings(
            engine=engine, env={"PYTHONPATH": str(Path(__file__).parent)}, **(defaults | options)
        )
        channels.append(DrafterChannel(settings, {**limits, **engine}, module="scripted_drafter"))
        return channels[-1]

    yield open_channel
    for channel in channels:
        channel.close()
        assert channel.pid is None


def lives(folder: Path) -> list[dict[str, Any]]:
    file = folder / "lives"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def await_true(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it doesn't happen"
        time.sleep(0.01)


def await_down(channel: Any) -> Any:
    """The news that it is down; drafts may have come just before."""
    news: list[Any] = []
    while not news or type(news[-1]).__name__ == "Drafted":
        channel.wait(0.05)
        news += channel.poll()
    assert type(news[-1]).__name__ == "Down"
    return news[-1]


def await_news(channel: Any, *kinds: str, timeout_s: float = 60.0) -> list[Any]:
    """The next news, which must be of these kinds in this order."""
    found: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < len(kinds):
        assert time.monotonic() < deadline, found
        channel.wait(0.05)
        found += channel.poll()
    assert [type(news).__name__ for news in found] == list(kinds)
    return found


def draft(channel: Any, work_id: int) -> None:
    from minedraft.backends.vllm.messages import DraftEntry, DraftJob

    channel.submit(DraftJob.of(work_id, [], [DraftEntry("r", 0, 0, [1], 2)], False))


def test_one_job_at_a_time(open_channel: Callable[..., Any]) -> None:
    channel = open_channel("good")
    assert channel.wait_ready().num_blocks == 9
    for work_id in range(3):
        draft(channel, work_id)
        with pytest.raises(AssertionError):
            draft(channel, 99)
        (news,) = await_news(channel, "Drafted")
        assert news.work_id == work_id


def test_jobs_beyond_what_the_socket_takes_at_once(open_channel: Callable[..., Any]) -> None:
    """Sent by two hands, the caller's and a thread's, with pings in between: every frame arrives whole and in order."""
    from minedraft.backends.vllm.messages import DraftEntry, DraftJob, Ping

    channel = open_channel("good", deadline_s=60.0)
    channel.wait_ready()
    for work_id in range(4):
        entries = [DraftEntry(f"r{i}", 0, 0, [work_id] * 400_000, i) for i in range(4)]
        channel.submit(DraftJob.of(work_id, [], entries, False))
        for _ in range(2):
            channel._process.send(Ping())
        (news,) = await_news(channel, "Drafted")
        assert (news.work_id, news.token_ids) == (work_id, [[7] * i for i in range(4)])


def test_answers_pings_but_owes_drafts(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """Late first, then killed; the one after it is all right."""
    channel = open_channel("owes", deadline_s=0.1, hang_timeout_s=1.0)
    channel.wait_ready()
    draft(channel, 1)
    await_news(channel, "Late")
    channel._settings = dataclasses.replace(channel._settings, deadline_s=30.0)
    draft(channel, 2)
    late, down, _ = await_news(channel, "Late", "Down", "Up")
    assert "behind" in late.message
    assert "owed" in down.message
    draft(channel, 3)
    await_news(channel, "Drafted")
    assert len(lives(tmp_path)) == 2


@pytest.mark.parametrize(("script", "words"), [("silent", "silent"), ("stopped", "silent"), ("killed", "signal 9")])
def test_noticed_while_it_owes_nothing(
    open_channel: Callable[..., Any], tmp_path: Path, script: str, words: str
) -> None:
    """Nobody polls: it is ended and started again all the same, and the news is there for who asks later."""
    channel = open_channel(script, hang_timeout_s=0.5)
    channel.wait_ready()
    pid = channel.pid
    if script != "silent":
        os.kill(pid, signal.SIGSTOP if script == "stopped" else signal.SIGKILL)
    await_true(lambda: len(lives(tmp_path)) >= 2)
    assert words in await_news(channel, "Down", "Up")[0].message
    assert lives(tmp_path)[0]["pid"] == pid


def test_no_answer_to_a_reset(open_channel: Callable[..., Any]) -> None:
    channel = open_channel("no reset", hang_timeout_s=0.5)
    channel.wait_ready()
    draft(channel, 1)
    assert await_news(channel, "Down", "Up")[0].message == "asked to fail"  # the Up is that of the next life


def test_a_pool_that_leaks(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """After a reset the pool must be whole; a drafter that has lost blocks is ended."""
    channel = open_channel("leaks")
    channel.wait_ready()
    draft(channel, 1)
    await_news(channel, "Down", "Up")
    assert len(lives(tmp_path)) == 2


def test_later_drafters_must_be_as_good(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """The core's plans hold a pool's size: later ones are asked for the same, and smaller ones are not taken."""
    channel = open_channel("comes back smaller")
    channel.wait_ready()
    draft(channel, 1)
    await_news(channel, "Down", "Up")
    assert [life["blocks"] for life in lives(tmp_path)] == [None, 10, 10]


def test_a_flood_is_not_stored(open_channel: Callable[..., Any]) -> None:
    channel = open_channel("floods", max_restarts=0)
    channel.wait_ready()
    await_true(lambda: not channel._watch._thread.is_alive())
    assert len(channel._mailbox._items) == 1
    assert "nobody asked" in await_news(channel, "Down")[0].message


def test_restarts_are_counted(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """One that dies at once is given up after the restarts granted, and nothing piles up where nobody polls."""
    channel = open_channel("dies", max_restarts=4)
    channel.wait_ready()
    await_true(lambda: not channel._watch._thread.is_alive())
    assert len(lives(tmp_path)) == 5
    assert len(channel._mailbox._items) == 1
    assert "exit code 3" in await_news(channel, "Down")[0].message


def test_restarts_without_end(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """Where the drafter isn't required, and where each was up for as long as `healthy_s`."""
    channel = open_channel("dies", max_restarts=1, healthy_s=0.0)
    channel.wait_ready()
    await_true(lambda: len(lives(tmp_path)) > 4)
    channel.close()
    (tmp_path / "lives").unlink()
    channel = open_channel("load fails", max_restarts=0, require_drafter=False, engine={"num_gpu_blocks_override": 5})
    assert channel.wait_ready().num_blocks == 4
    await_true(lambda: len(lives(tmp_path)) > 4)
    assert "no such model" in await_news(channel, "Down")[0].message


def test_backoff() -> None:
    from minedraft.backends.vllm.drafter_watch import Restarts
    from minedraft.backends.vllm.settings import DrafterSettings

    engine = {"model": "m", "num_gpu_blocks_override": 9}
    restarts = Restarts(DrafterSettings(engine=engine, max_restarts=5, max_restart_backoff_s=5.0))
    assert [restarts.next_backoff_s(1.0) for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]
    assert [restarts.next_backoff_s(up_s) for up_s in (600.0, 599.0)] == [1.0, 2.0]
    restarts = Restarts(DrafterSettings(engine=engine, max_restarts=0, require_drafter=False))
    assert [restarts.next_backoff_s(0.0) for _ in range(2000)][-1] == 60.0


def test_a_drafter_that_can_not_start(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """The engine's start is refused in words, and it isn't tried again."""
    from minedraft.backends.vllm.errors import VllmWorldError

    for script, words, options in [
        ("load fails", "no such model", {}),
        ("no start", "raise start_timeout_s", {"start_timeout_s": 0.3, "hang_timeout_s": 0.5}),
    ]:
        channel = open_channel(script, **options)
        with pytest.raises(VllmWorldError, match=words):
            channel.wait_ready()
        assert channel.pid is None
        assert not channel._watch._thread.is_alive()
    assert len(lives(tmp_path)) <= 2


def naps(folder: Path) -> list[str]:
    file = folder / "naps"
    return file.read_text().split() if file.exists() else []


def test_sleep_and_wake(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """Down while it sleeps; up again as soon as it is awake, though nobody has asked for news in between."""
    channel = open_channel("good")
    channel.wait_ready()
    for work_id in range(3):
        draft(channel, work_id)  # in hand when it is told to sleep: those drafts are for nobody
        channel.sleep()
        channel.sleep()
        down = await_down(channel)
        assert down.is_asleep
        channel.wake()
        channel.wake()
        await_news(channel, "Up")
        draft(channel, 10 + work_id)
        assert await_news(channel, "Drafted")[0].work_id == 10 + work_id
    assert naps(tmp_path) == ["Sleep", "Wake"] * 3
    assert len(lives(tmp_path)) == 1


def test_woken_before_it_sleeps(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """However fast vLLM changes its mind, one order is out at a time, and the last word counts."""
    channel = open_channel("good")
    channel.wait_ready()
    for _ in range(20):
        channel.sleep()
        channel.wake()
    await_news(channel, "Down", "Up")
    assert naps(tmp_path) == ["Sleep", "Wake"]
    channel.sleep()
    channel.wake()
    channel.sleep()
    await_news(channel, "Down")
    draft(channel, 1)
    assert "behind" in await_news(channel, "Late")[0].message
    await_true(lambda: naps(tmp_path) == ["Sleep", "Wake", "Sleep"])


def test_a_new_drafter_is_sent_to_sleep_too(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """One that dies asleep is replaced; the next comes up awake, and sleeps until it is wanted."""
    channel = open_channel("dies asleep")
    channel.wait_ready()
    channel.sleep()
    await_news(channel, "Down")
    await_true(lambda: not channel.poll() and naps(tmp_path) == ["Sleep", "Sleep"])
    channel.wake()
    await_news(channel, "Up")
    assert len(lives(tmp_path)) == 2


def test_sleep_amid_a_reset(open_channel: Callable[..., Any], tmp_path: Path) -> None:
    """The answer to the reset is not taken for that to a wake."""
    channel = open_channel("fails")
    channel.wait_ready()
    draft(channel, 1)
    assert not await_news(channel, "Down")[0].is_asleep  # the reset is on its way
    channel.sleep()
    await_true(lambda: not channel.poll() and naps(tmp_path) == ["Sleep"])
    channel.wake()
    await_news(channel, "Up")
    assert naps(tmp_path) == ["Sleep", "Wake"]


def test_secrets_are_not_among_the_arguments(open_channel: Callable[..., Any]) -> None:
    """Anybody on a machine can read those of any process."""
    channel = open_channel("good", engine={"hf_token": "a secret"})
    channel.wait_ready()
    shown = (Path("/proc") / str(channel.pid) / "cmdline").read_bytes()
    assert b"scripted_drafter" in shown
    assert b"secret" not in shown


def test_closing_between_two_lives(open_channel: Callable[..., Any]) -> None:
    """Also while the next start is waited for, and while one loads: nobody is left, and it takes no grace."""
    channel = open_channel("dies", restart_backoff_s=600.0, max_restart_backoff_s=600.0)
    channel.wait_ready()
    await_true(lambda: channel.pid is None)
    started = time.monotonic()
    channel.close()
    channel = open_channel("no start")
    channel.close()
    channel.close()
    assert time.monotonic() - started < 9.0

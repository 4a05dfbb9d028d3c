from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.codec import Record
from minedraft.journal import JournalError, JournalHeader, JournalWriter, Recorder, feed, read_journal
from minedraft.request import Request
from minedraft.work import DrafterReady, DraftWork, RequestAborted, RequestArrived
from tests.streams import Tape, ToyWorld, items, run, times

HEADER = JournalHeader("0.1.0", {"num_batches": 2}, {"mode": "fixed"}, 7)
WORK = DraftWork(0, 0, ("a",), (0,), (0,), (0,), (5,), (2,), ())


def write(path, records, header=HEADER, close=True):
    writer = JournalWriter(path, header)
    writer.on_start(0.25)
    for now_s, item in records:
        (writer.on_submit if isinstance(item, DraftWork) else writer.on_event)(now_s, item)
    if close:
        writer.close()
    else:
        writer._file.close()


def _is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class TickingBackend:
    """A real clock moves between any two looks at it."""

    def __init__(self, events):
        self.ticks = itertools.count()
        self.events = iter(events)
        self.works = []

    def now(self):
        return float(next(self.ticks))

    def submit(self, work):
        self.works.append(work)

    def next_event(self):
        return next(self.events, None)

    def ready(self):
        return False


class TestRecorder:
    def test_time_passes_only_inside_next_event_and_sinks_get_what_the_core_sees(self):
        events = [DrafterReady(), RequestAborted("a")]
        backend, tape = TickingBackend(events), Tape()
        recorder = Recorder(backend, tape)
        assert recorder.now() == recorder.now() == tape.start_s == 0.0
        recorder.submit(WORK)
        assert recorder.now() == 0.0
        assert recorder.next_event() is events[0]
        assert recorder.now() == recorder.now() == 1.0
        assert recorder.next_event() is events[1]
        recorder.submit(WORK)
        assert recorder.now() == 2.0
        assert recorder.next_event() is None
        assert recorder.now() >= 2.0
        assert tape.records == [(0.0, WORK), (1.0, events[0]), (2.0, events[1]), (2.0, WORK)]
        assert backend.works == [WORK, WORK]

    def test_with_closes_all_sinks_also_after_an_exception(self):
        tapes = Tape(), Tape()
        with pytest.raises(RuntimeError), Recorder(TickingBackend([]), *tapes):
            raise RuntimeError
        assert [tape.num_closed for tape in tapes] == [1, 1]

    def test_a_work_that_breaks_the_backend_is_in_the_journal(self):
        class Broken(TickingBackend):
            def submit(self, work):
                raise OSError("unplugged")

        tape = Tape()
        with pytest.raises(OSError, match="unplugged"):
            Recorder(Broken([]), tape).submit(WORK)
        assert tape.records == [(0.0, WORK)]


class TestFile:
    @given(st.lists(st.tuples(times, items), max_size=6))
    def test_round_trip(self, tmp_path_factory, pairs):
        path = tmp_path_factory.mktemp("journal") / "run.jsonl"
        write(path, pairs)
        journal = read_journal(path)
        assert journal.complete is journal.torn is None
        assert journal.header == HEADER
        assert journal.start_s == 0.25
        assert list(journal) == [Record(*pair) for pair in pairs]
        assert list(journal) == [Record(*pair) for pair in pairs], "a journal can be read twice"
        assert journal.complete is True
        assert journal.torn is False

    def test_e5_same_seed_same_bytes(self, tmp_path):
        for name in ("a", "b"):
            run(ToyWorld(3), JournalWriter(tmp_path / name, HEADER))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        run(ToyWorld(4), JournalWriter(tmp_path / "c", HEADER))
        assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()

    def test_header_bytes_do_not_depend_on_the_order_of_keys(self, tmp_path):
        write(tmp_path / "a", [], JournalHeader("1", {"x": 1, "y": 2}))
        write(tmp_path / "b", [], JournalHeader("1", {"y": 2, "x": 1}))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_every_torn_prefix_is_readable_up_to_its_last_whole_line(self, tmp_path):
        records = [
            Record(0.5, RequestArrived(Request("a", 3, 4))),
            Record(0.5, WORK),
            Record(1.0, RequestAborted("a")),
        ]
        write(tmp_path / "whole", records)
        whole = (tmp_path / "whole").read_bytes()
        path = tmp_path / "torn"
        for length in range(whole.index(b"\n") + 1, len(whole)):
            path.write_bytes(whole[:length])
            journal = read_journal(path)
            got = list(journal)
            num_whole = max(0, whole[:length].count(b"\n") - 2)
            # A line that lacks only its newline is whole too.
            assert len(got) in (num_whole, num_whole + 1)
            assert got == records[: len(got)]
            rest = whole[:length].rpartition(b"\n")[2]
            assert journal.complete is (rest == b'["end"]')
            if not rest.startswith(b'["start",'):
                assert journal.torn is not (not rest or _is_json(rest))

    def test_a_killed_process_loses_nothing(self, tmp_path):
        path = tmp_path / "run.jsonl"
        code = (
            "import os, sys\n"
            "from minedraft.journal import JournalHeader, JournalWriter\n"
            "from minedraft.work import RequestAborted\n"
            "writer = JournalWriter(sys.argv[1], JournalHeader('1'))\n"
            "writer.on_start(0.0)\n"
            "for i in range(100): writer.on_event(float(i), RequestAborted(str(i)))\n"
            "os.kill(os.getpid(), 9)\n"
        )
        assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
        journal = read_journal(path)
        assert [record.now_s for record in journal] == [float(i) for i in range(100)]
        assert journal.complete is False
        assert journal.torn is False

    def test_a_bad_line_is_named(self, tmp_path):
        path = tmp_path / "run.jsonl"
        write(path, [Record(0.5, RequestAborted("a"))] * 3)
        lines = path.read_bytes().splitlines(keepends=True)
        lines[3] = b'["aborted",1.0\n'
        path.write_bytes(b"".join(lines))
        with pytest.raises(JournalError, match=r"run\.jsonl:4: ") as caught:
            list(read_journal(path))
        assert "\n" not in str(caught.value)

    def test_nothing_may_follow_the_end(self, tmp_path):
        path = tmp_path / "run.jsonl"
        write(path, [])
        with path.open("ab") as file:
            file.write(b'["ready",1.0]\n')
        with pytest.raises(JournalError, match=r":4: a line after the end"):
            list(read_journal(path))

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("", "no journal header"),
            ("\n", "no journal header"),
            ("{", "no journal header"),
            ("[]\n", "not a journal"),
            ('{"format":"other"}\n', "not a journal"),
            ('{"format":"minedraft-journal","version":99}\n', "version 99"),
            ('{"format":"minedraft-journal","version":1,"seed":0}\n', "lacks minedraft, scheduler"),
        ],
    )
    def test_bad_headers(self, tmp_path, text, fault):
        path = tmp_path / "run.jsonl"
        path.write_text(text)
        with pytest.raises(JournalError, match=fault):
            read_journal(path)

    def test_a_bad_start_is_named(self, tmp_path):
        path = tmp_path / "run.jsonl"
        write(path, [])
        text = path.read_text().replace('["start",0.25]', '["start",x]')
        path.write_text(text)
        with pytest.raises(JournalError, match=r":2: "):
            read_journal(path)

    def test_missing_files_are_the_systems_error(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            read_journal(tmp_path / "nothing")

    def test_a_header_that_is_not_json_leaves_no_file(self, tmp_path):
        with pytest.raises(TypeError):
            JournalWriter(tmp_path / "run.jsonl", JournalHeader("1", {"x": object()}))
        assert not (tmp_path / "run.jsonl").exists()

    def test_the_header_lists_the_fields(self, tmp_path):
        write(tmp_path / "run.jsonl", [])
        head = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
        assert head["fields"]["draft"][:2] == ["work_id", "batch"]
        assert head["seed"] == 7

    def test_close_twice(self, tmp_path):
        writer = JournalWriter(tmp_path / "run.jsonl", HEADER)
        writer.close()
        writer.close()
        assert (tmp_path / "run.jsonl").read_text().count('["end"]\n') == 1


def test_feed_tells_sinks_what_a_recorder_told(tmp_path):
    live, later = Tape(), Tape()
    run(ToyWorld(5), live, JournalWriter(tmp_path / "run.jsonl", HEADER))
    feed(read_journal(tmp_path / "run.jsonl"), later)
    assert later.start_s == live.start_s
    assert later.records == live.records
    assert later.num_closed == 0

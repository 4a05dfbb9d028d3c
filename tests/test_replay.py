from __future__ import annotations

import pytest

from minedraft import Scheduler, load_policies
from minedraft.codec import Asked, Record
from minedraft.journal import JournalHeader, JournalWriter, read_journal
from minedraft.replay import ReplayBackend, replay
from minedraft.work import DrafterReady, VerifyWork
from tests.streams import Tape, ToyWorld, make_scheduler, run, small_config

HEADER = JournalHeader("0.1.0")


def record(path, seed, mode="psd"):
    tape = Tape()
    run(ToyWorld(seed), tape, JournalWriter(path, HEADER), mode=mode)
    return tape.records


@pytest.mark.parametrize("mode", ["psd", "sd", "ar"])
@pytest.mark.parametrize("seed", range(8))
def test_e7_a_replay_takes_the_same_decisions(tmp_path, seed, mode):
    path = tmp_path / "run.jsonl"
    records = record(path, seed, mode)
    report = replay(read_journal(path), make_scheduler(mode))
    num_works = sum(hasattr(item, "batch") for _, item in records)
    assert report.first_difference is None
    assert report.num_decisions == num_works > 0
    num_marks = sum(isinstance(item, Asked) for _, item in records)
    assert report.num_events == len(records) - num_works - num_marks


def test_another_core_is_found_out(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path, 1)
    other = Scheduler(small_config(num_speculative_tokens=3), load_policies({"mode": "fixed,mode=psd"}))
    difference = replay(read_journal(path), other).first_difference
    assert difference is not None
    assert difference.recorded != difference.replayed
    assert "num_draft was" in str(difference)
    silent = replay(read_journal(path), make_scheduler("ar")).first_difference
    assert silent is not None
    assert "recorded DraftWork" in str(silent) or "was" in str(silent)


def test_a_changed_decision_is_found_where_it_is(tmp_path):
    records = record(tmp_path / "run.jsonl", 2)
    at = [i for i, (_, item) in enumerate(records) if isinstance(item, VerifyWork)][4]
    changed = records[at].item._replace(batch=9)
    records[at] = Record(records[at].now_s, changed)
    report = _replay(records)
    difference = report.first_difference
    assert difference is not None
    assert difference.recorded == changed
    assert difference.decision == report.num_decisions
    assert difference.decision == sum(hasattr(item, "batch") for _, item in records[:at])
    assert difference.now_s == records[at].now_s
    assert "batch was 9, is" in str(difference)


def test_a_missing_and_an_extra_decision_are_found(tmp_path):
    records = record(tmp_path / "run.jsonl", 2)
    at = [i for i, (_, item) in enumerate(records) if isinstance(item, VerifyWork)][4]
    missing = _replay(records[:at] + records[at + 1 :]).first_difference
    assert missing is not None
    assert missing.recorded in (None, records[at + 1].item)
    extra = _replay([*records[: at + 1], *records[at:]]).first_difference
    assert extra is not None
    assert extra.recorded == records[at].item
    assert str(extra)


def test_a_run_that_was_cut_off_anywhere_still_agrees(tmp_path):
    records = record(tmp_path / "run.jsonl", 6)
    for length in range(0, len(records), 7):
        assert _replay(records[:length]).first_difference is None


def test_the_clock_is_the_recorded_one():
    backend = ReplayBackend([Record(2.0, DrafterReady()), Record(3.5, DrafterReady())], start_s=1.0)
    seen = [backend.now()]
    while backend.next_event() is not None:
        seen.append(backend.now())
    assert seen == [1.0, 2.0, 3.5]


def _replay(records):
    class OnTape:
        start_s = 0.0

        def __iter__(self):
            return iter(records)

    return replay(OnTape(), make_scheduler())

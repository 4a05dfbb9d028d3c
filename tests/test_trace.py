from __future__ import annotations

import itertools
import json
import random

import pytest

from minedraft.commands.drive import Recordings
from minedraft.commands.simulate import new_collector, simulate
from minedraft.config import parse_config
from minedraft.journal import JournalHeader, JournalWriter, feed, read_journal
from minedraft.request import Request
from minedraft.trace import TraceWriter, batch_name
from minedraft.work import (
    DrafterLost,
    DraftResult,
    DraftWork,
    RequestAborted,
    RequestArrived,
    VerifyWork,
    WorkDone,
    WorkFailed,
)
from tests.streams import Tape, ToyWorld, run
from tests.test_metrics import BY_HAND, done, draft, verify


def written(path, records, **options):
    writer = TraceWriter(path, **options)
    writer.on_start(1.0)
    for now_s, item in records:
        (writer.on_submit if isinstance(item, VerifyWork | DraftWork) else writer.on_event)(now_s, item)
    writer.close()
    return json.loads(path.read_text())


def slices(events, process, lane):
    return [
        (e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, lane)
    ]


def lanes(events):
    """(process, lane) by name."""
    named = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    return {e["args"]["name"]: (e["pid"], e["tid"]) for e in named}


def test_by_hand(tmp_path):
    events = written(tmp_path / "t.json", BY_HAND)
    at = lanes(events)
    assert sorted(at) == ["batch A", "batch B", "drafter", "target"]
    assert slices(events, *at["target"]) == [
        ("verify A r1", 0.0, 400_000.0),
        ("verify B r1", 1_000_000.0, 500_000.0),
        ("verify A r2", 1_500_000.0, 500_000.0),
        ("verify B r2", 2_000_000.0, 400_000.0),
    ]
    assert slices(events, *at["drafter"]) == [
        ("draft A r2", 500_000.0, 1_000_000.0),
        ("draft B r2", 1_500_000.0, 500_000.0),
    ]
    assert slices(events, *at["batch A"]) == [
        ("verifying", 0.0, 400_000.0),
        ("drafting", 400_000.0, 1_100_000.0),
        ("verifying", 1_500_000.0, 500_000.0),
    ]
    (verified,) = [e for e in events if e["name"] == "verify A r2"]
    assert verified["args"] == {
        "work": 3,
        "requests": 1,
        "new_tokens": 1,
        "drafts": 3,
        "accepted": 3,
        "committed": 4,
    }
    running = [(e["ts"], e["args"]["n"]) for e in events if e["ph"] == "C" and e["name"] == "running requests"]
    assert running == [(0.0, 1), (1_000_000.0, 2), (2_000_000.0, 1)]
    per_batch = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "requests per batch"]
    assert per_batch == [{"A": 1, "B": 0}, {"A": 1, "B": 1}, {"A": 0, "B": 1}]


def test_a_batch_that_waits_for_the_target_is_drafted(tmp_path):
    records = [*BY_HAND[:11], (2.75, BY_HAND[12][1]._replace(work_id=9))]
    records[-2] = (2.6, BY_HAND[10][1])
    events = written(tmp_path / "t.json", records)
    assert slices(events, *lanes(events)["batch B"])[-1] == ("drafted", 1_600_000.0, 150_000.0)


def test_an_ingestion_is_no_phase_of_its_batch(tmp_path):
    records = [
        (1.0, RequestArrived(Request("a", 10, 5))),
        (1.0, verify(0, 0, ["a"], [0])),
        (1.0, draft(1, 0, ["a"], [0])),
        (1.25, WorkDone(1, DraftResult((0,)), 1.0, 1.25)),
        (1.25, draft(2, 0, ["a"], [0])),
        (1.5, done(0, [0], [1], 1.0, 1.5)),
        (1.75, WorkFailed(2, "too late")),
        (1.75, draft(3, 0, ["a"], [4])),
        (2.0, WorkDone(3, DraftResult((4,)), 1.75, 2.0)),
    ]
    events = written(tmp_path / "t.json", records)
    at = lanes(events)
    assert slices(events, *at["batch A"]) == [("verifying", 0.0, 500_000.0), ("drafting", 750_000.0, 250_000.0)]
    assert slices(events, *at["drafter"]) == [
        ("ingest A", 0.0, 250_000.0),
        ("ingest A (failed)", 250_000.0, 500_000.0),
        ("draft A r2", 750_000.0, 250_000.0),
    ]


def test_failures(tmp_path):
    records = [
        (1.0, RequestArrived(Request('"odd"\n', 10, 5))),
        (1.0, draft(0, 0, ['"odd"\n'], [4])),
        (1.5, WorkFailed(0, 'said "no"')),
        (1.5, draft(1, 0, ['"odd"\n'], [4])),
        (2.0, DrafterLost("gone")),
        (2.0, RequestAborted('"odd"\n')),
    ]
    events = written(tmp_path / "t.json", records, show_requests=True)
    assert slices(events, *lanes(events)["drafter"]) == [
        ("draft A r1 (failed)", 0.0, 500_000.0),
        ("draft A r1 (failed)", 500_000.0, 500_000.0),
    ]
    instants = [(e["name"], e["ts"], e["args"]["detail"]) for e in events if e["ph"] == "i"]
    assert instants == [
        ("arrival", 0.0, '"odd"\n'),
        ("work failed", 500_000.0, 'said "no"'),
        ("drafter lost", 1_000_000.0, "gone"),
        ("abort", 1_000_000.0, '"odd"\n'),
    ]
    quiet = written(tmp_path / "t.json", records)
    assert not [e for e in quiet if e["name"] in ("arrival", "abort")]


@pytest.mark.parametrize("seed", range(4))
def test_a_run_gives_lanes_without_overlap(tmp_path, seed):
    tape = Tape()
    run(ToyWorld(seed), tape, TraceWriter(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())
    num_done = sum(type(item).__name__ in ("WorkDone", "WorkFailed") for _, item in tape.records)
    assert sum(e["ph"] == "X" and e["pid"] == 1 for e in events) >= num_done - 2
    for name, lane in lanes(events).items():
        if not name.startswith("batch"):
            continue  # failed works are shown from their submission, which may be before the device began
        end = 0.0
        for _, ts, duration in sorted(slices(events, *lane), key=lambda item: (item[1], item[2])):
            assert ts >= end - 0.01, name
            end = ts + duration


def spans_ns(events):
    """Whole slices by (process, lane), in whole nanoseconds, in order of time; failed works have no device time."""
    found = {}
    for e in events:
        if e["ph"] == "X" and "(failed)" not in e["name"]:
            start, duration = round(e["ts"] * 1000), round(e["dur"] * 1000)
            if not duration:
                continue  # a PEARL drafter may have the drafts already, also while it works for another target
            found.setdefault((e["pid"], e["tid"]), []).append((start, start + duration))
    return {lane: sorted(spans) for lane, spans in found.items()}


COST = {
    "verify_base_s": 0.01,
    "verify_per_context_token_s": 4e-7,
    "prefill_per_token_s": 4e-5,
    "draft_base_s": 0.002,
    "draft_per_seq_s": 1e-4,
    "draft_prefill_per_token_s": 1e-5,
}


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("mode", ["ar", "sd", "psd", "pearl", "pearl-minedraft"])
@pytest.mark.parametrize("seed", range(3))
def test_slices_of_a_lane_do_not_overlap_by_a_nanosecond(tmp_path, mode, num_replicas, seed):
    """Times that are no round numbers, and tight lanes: rounding a start and a duration by themselves overlaps."""
    tree = {
        "mode": mode,
        "seed": seed,
        "scheduler": {"max_batch_size": 3},
        "workload": {
            "num_requests": 30,
            "arrivals": {"kind": "poisson", "rate": 40.0},
            "output_lens": {"mean": 20, "p50": 15},
        },
        "devices": {"num_replicas": num_replicas, "round_overhead_s": 0.0001234567},
        "cost": {"kind": "linear", **{name: value / 3 for name, value in COST.items()}},
    }
    config = parse_config(tree)
    simulate(config, new_collector(config), Recordings(trace=str(tmp_path / "t.json")), label=None)
    spans = spans_ns(json.loads((tmp_path / "t.json").read_text()))
    num_drafters = {"ar": 0, "sd": num_replicas}.get(mode, 1)  # sd drafts on each target's own devices
    assert sum(process == 1 for process, _ in spans) == num_replicas + num_drafters
    for lane, of_lane in spans.items():
        assert len(of_lane) > 5, lane
        for before, after in itertools.pairwise(of_lane):
            assert after[0] >= before[1], (lane, before, after)


def test_a_slice_ends_where_the_next_begins(tmp_path):
    """Back to back at any time of a long run, to the last digit."""
    rng = random.Random(5)
    times_s = list(itertools.accumulate((rng.random() / 7 for _ in range(400)), initial=rng.random() * 1e5))
    writer = TraceWriter(tmp_path / "t.json")
    for number, (start_s, end_s) in enumerate(itertools.pairwise(times_s)):
        writer.on_submit(start_s, draft(number, 0, ["a"], [1]))
        writer.on_event(end_s, WorkDone(number, DraftResult((1,)), start_s, end_s))
    writer.close()
    for spans in spans_ns(json.loads((tmp_path / "t.json").read_text())).values():
        assert len(spans) == 400
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


def test_a_trace_from_a_journal_is_the_live_one(tmp_path):
    journal = JournalWriter(tmp_path / "j", JournalHeader("1"))
    run(ToyWorld(2), journal, TraceWriter(tmp_path / "live"))
    later = TraceWriter(tmp_path / "later")
    feed(read_journal(tmp_path / "j"), later)
    later.close()
    later.close()
    assert (tmp_path / "later").read_bytes() == (tmp_path / "live").read_bytes()


def test_a_run_that_dies_leaves_whole_events(tmp_path, monkeypatch):
    monkeypatch.setattr("minedraft.trace.WRITE_BYTES", 1)
    writer = TraceWriter(tmp_path / "t.json")
    writer.on_start(0.0)
    for now_s, item in BY_HAND[:8]:
        (writer.on_submit if isinstance(item, VerifyWork | DraftWork) else writer.on_event)(now_s, item)
    text = (tmp_path / "t.json").read_text()
    assert len(json.loads(text + "]")) > 8
    writer.close()


def test_many_batches_have_names():
    assert [batch_name(i) for i in (0, 1, 25, 26)] == ["A", "B", "Z", "26"]

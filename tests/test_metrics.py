from __future__ import annotations

import itertools
import json
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minedraft.metrics
from minedraft.codec import Asked
from minedraft.histogram import PERCENTILE_ERROR
from minedraft.journal import JournalHeader, JournalWriter, read_journal
from minedraft.metrics import Kept, MetricsCollector, metrics_from_journal
from minedraft.request import FinishReason, Request, RequestOutput
from minedraft.summary import Slo
from minedraft.work import (
    NUM_ZERO_DRAFT_CAUSES,
    DrafterLost,
    DrafterReady,
    DraftResult,
    DraftWork,
    RequestAborted,
    RequestArrived,
    VerifyResult,
    VerifyWork,
    WorkDone,
    WorkFailed,
    ZeroDraft,
)
from tests.streams import Tape, ToyWorld, run

NO_CAUSES = (0,) * NUM_ZERO_DRAFT_CAUSES
MODEL_LEN = 96  # of streams.small_config


def verify(work_id, batch, ids, drafts, *, last=None, sizes=(1, 1), incarnations=None, causes=()):
    n = len(ids)
    zero = list(NO_CAUSES)
    for cause in causes:
        zero[cause] += 1
    return VerifyWork(
        work_id,
        batch,
        tuple(ids),
        tuple(incarnations or (0,) * n),
        (0,) * n,
        (0,) * n,
        (1,) * n,
        tuple(drafts),
        tuple(last or (True,) * n),
        tuple(zero),
        sizes,
        (),
    )


def draft(work_id, batch, ids, drafts):
    n = len(ids)
    return DraftWork(work_id, batch, tuple(ids), (0,) * n, (0,) * n, (0,) * n, (1,) * n, tuple(drafts), ())


def done(work_id, accepted, committed, start_s, end_s, reasons=None):
    return WorkDone(work_id, VerifyResult(tuple(accepted), tuple(committed), reasons), start_s, end_s)


def drafted(work_id, counts, start_s, end_s):
    return WorkDone(work_id, DraftResult(tuple(counts)), start_s, end_s)


def tell(records, **options):
    return retell(MetricsCollector(**options), records)


def retell(collector, records):
    collector.on_start(0.0)
    for now_s, item in records:
        if isinstance(item, VerifyWork | DraftWork):
            collector.on_submit(now_s, item)
        elif isinstance(item, Asked):
            collector.on_asked(now_s)
        else:
            collector.on_event(now_s, item)
    return collector


# Two requests in two batches, by hand. Times in seconds:
#   a arrives 1.0 (prompt 10, at most 5 tokens), b arrives 1.5 (prompt 20, stops after 2).
#   target: prefill of a 1.0-1.4, prefill of b 2.0-2.5, verify a 2.5-3.0, verify b 3.0-3.4
#   drafter: a 1.5-2.5, b 2.5-3.0 (while a is being verified)
BY_HAND = [
    (1.0, RequestArrived(Request("a", 10, 5, 1.0))),
    (1.0, verify(0, 0, ["a"], [0], sizes=(1, 0), causes=[ZeroDraft.PREFILL])),
    (1.4, done(0, [0], [1], 1.0, 1.4)),
    (1.4, draft(1, 0, ["a"], [4])),
    (1.5, RequestArrived(Request("b", 20, 100, 1.5))),
    (2.0, verify(2, 1, ["b"], [0], sizes=(1, 1), causes=[ZeroDraft.PREFILL])),
    (2.5, drafted(1, [4], 1.5, 2.5)),
    (2.5, done(2, [0], [1], 2.0, 2.5)),
    (2.5, verify(3, 0, ["a"], [3], sizes=(1, 1))),
    (2.5, draft(4, 1, ["b"], [2])),
    (3.0, drafted(4, [2], 2.5, 3.0)),
    (3.0, done(3, [3], [4], 2.5, 3.0)),  # a has 5 tokens: ended by length, and nobody says so
    (3.0, verify(5, 1, ["b"], [2], sizes=(0, 1))),
    (3.4, done(5, [1], [1], 3.0, 3.4, (FinishReason.STOP,))),
]


def test_by_hand():
    slo = Slo(ttft_ms=500.0, e2el_ms=2500.0)
    summary = tell(BY_HAND, num_target_devices=4, num_draft_devices=1, slo=slo).summarize()
    got = summary.to_dict()
    assert got["duration"] == got["makespan"] == pytest.approx(2.4)
    assert (got["completed"], got["failed"], got["num_unfinished"]) == (2, 0, 0)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (30, 7)
    assert got["request_throughput"] == pytest.approx(2 / 2.4)
    assert got["request_goodput"] == pytest.approx(1 / 2.4)  # b's first token took 1.0 s
    assert got["slo_attainment"] == 1 / 2
    assert got["output_throughput"] == pytest.approx(7 / 2.4)
    assert got["total_token_throughput"] == pytest.approx(37 / 2.4)
    assert got["output_throughput_per_device"] == pytest.approx(7 / 2.4 / 5)
    assert got["request_throughput_per_device"] == pytest.approx(2 / 2.4 / 5)
    assert got["total_token_throughput_per_device"] == pytest.approx(37 / 2.4 / 5)
    assert got["max_output_tokens_per_s"] == 5.0  # seconds from 1.0: 1 + 1, then 4 + 1
    assert got["max_concurrent_requests"] == 2
    assert got["mean_ttft_ms"] == pytest.approx((400 + 1000) / 2)
    assert got["median_e2el_ms"] == pytest.approx((2000 + 1900) / 2)
    assert got["mean_tpot_ms"] == pytest.approx((1600 / 4 + 900 / 1) / 2)
    assert got["mean_itl_ms"] == pytest.approx((1600 + 900) / 2)  # one chunk each after the first
    assert got["mean_queue_ms"] == pytest.approx((0 + 500) / 2)
    assert got["mean_service_ms"] == pytest.approx((2000 + 1400) / 2)
    assert got["p90_ttft_ms"] == pytest.approx(940)
    assert got["std_ttft_ms"] == pytest.approx(300)
    assert got["spec_decode_num_drafts"] == 2
    assert got["spec_decode_draft_tokens"] == 5
    assert got["spec_decode_accepted_tokens"] == 4
    assert got["spec_decode_acceptance_rate"] == pytest.approx(80.0)
    assert got["spec_decode_acceptance_length"] == pytest.approx(3.0)
    assert got["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5, 0.5]
    assert got["num_drafted_tokens"] == 6
    assert got["rounds"] == 4
    assert got["mean_batch_size"] == 1.0
    assert got["mean_running_requests"] == pytest.approx(6 / 4)
    assert got["max_running_requests"] == 2
    assert got["mean_imbalance"] == pytest.approx(2 / 4)
    assert got["empty_batch_share"] == pytest.approx(2 / 4)
    assert got["backlog_by_tenth"] == [], "two requests have no tenths"
    assert got["zero_draft_causes"]["prefill"] == 2
    assert sum(got["zero_draft_causes"].values()) == 2
    assert got["mean_verify_ms"] == pytest.approx((400 + 500 + 500 + 400) / 4)
    assert got["mean_draft_ms"] == pytest.approx((1000 + 500) / 2)
    assert got["target_utilisation"] == pytest.approx(1.8 / 2.4)
    assert got["draft_utilisation"] == pytest.approx(1.5 / 2.4)
    assert got["overlapped_draft_share"] == pytest.approx(1.0 / 1.5)
    assert got["decode_verify_share"] == pytest.approx(1.4 / 2.0)  # decoding from 1.4 to 3.4
    assert (got["num_preemptions"], got["num_failed_works"], got["num_drafter_losses"]) == (0, 0, 0)
    json.dumps(got, allow_nan=False)


def test_by_hand_detailed():
    lists = tell(BY_HAND).detailed()
    assert lists["input_lens"] == [10, 20]
    assert lists["output_lens"] == [5, 2]
    assert lists["start_times"] == [1.0, 1.5]
    assert lists["ttfts"] == pytest.approx([0.4, 1.0])
    assert lists["latencies"] == pytest.approx([2.0, 1.9])
    assert lists["queue_times"] == pytest.approx([0.0, 0.5])
    assert [len(gaps) for gaps in lists["itls"]] == [1, 1]
    assert lists["itls"][0] == pytest.approx([1.6])
    assert lists["errors"] == ["", ""]


def test_nothing_at_all():
    got = tell([]).summarize().to_dict()
    assert got["duration"] == 0.0
    assert got["completed"] == got["failed"] == got["rounds"] == 0
    assert got["mean_ttft_ms"] == got["request_throughput"] == got["target_utilisation"] == 0.0
    assert got["request_goodput"] is got["slo_attainment"] is None
    json.dumps(got, allow_nan=False)
    assert tell([]).detailed()["itls"] == []


def test_one_token_has_no_tpot_and_keeps_any_tpot_limit():
    records = [
        (0.0, RequestArrived(Request("a", 10, 1))),
        (0.0, verify(0, 0, ["a"], [0])),
        (1.0, done(0, [0], [1], 0.0, 1.0)),
    ]
    summary = tell(records, slo=Slo(tpot_ms=0.001)).summarize()
    assert summary.completed == 1
    assert summary.tpot.mean == summary.itl.mean == 0.0
    assert summary.ttft.mean == summary.e2el.mean == 1000.0
    assert summary.request_goodput == 1.0


class TestEnds:
    START = (
        (0.0, RequestArrived(Request("a", 10, 3, 0.0))),
        (0.0, RequestArrived(Request("b", 10, 9, 0.0))),
        (0.0, verify(0, 0, ["a", "b"], [0, 0])),
        (1.0, done(0, [0, 0], [1, 1], 0.0, 1.0)),
    )

    def test_a_late_result_of_an_aborted_request_is_nobodys(self):
        records = [
            *self.START,
            (1.0, verify(1, 0, ["a", "b"], [2, 2])),
            (1.5, RequestAborted("b")),
            (2.0, done(1, [1, 2], [2, 3], 1.0, 2.0)),
        ]
        summary = tell(records).summarize()
        assert (summary.completed, summary.num_aborted, summary.failed) == (1, 1, 1)
        assert summary.total_output_tokens == 3
        assert summary.spec_decode_num_drafts == 1
        assert summary.spec_decode_accepted_tokens == 1
        assert summary.max_output_tokens_per_s == 2.0
        assert summary.duration == 2.0
        assert tell(records).detailed()["output_lens"] == [3, 1]
        assert tell(records).detailed()["errors"] == ["", "aborted"]

    def test_a_reused_id_is_another_request(self):
        records = [
            *self.START,
            (1.0, verify(1, 0, ["a", "b"], [0, 0])),
            (1.5, RequestAborted("b")),
            (1.5, RequestArrived(Request("b", 7, 1, 1.5))),
            (2.0, done(1, [0, 0], [1, 1], 1.0, 2.0)),
            (2.0, verify(2, 0, ["b"], [0], incarnations=[5])),
            (3.0, done(2, [0], [1], 2.0, 3.0)),
        ]
        collector = tell(records)
        assert collector.detailed()["output_lens"] == [2, 1, 1]
        assert collector.detailed()["errors"] == ["unfinished", "aborted", ""]
        assert collector.summarize().num_preemptions == 0

    def test_an_abort_after_the_end_changes_nothing(self):
        records = [
            *self.START,
            (1.0, verify(1, 0, ["a", "b"], [1, 1])),
            (2.0, done(1, [1, 1], [2, 1], 1.0, 2.0, (None, FinishReason.STOP))),
            (2.5, RequestAborted("a")),
            (2.5, RequestAborted("b")),
            (2.5, RequestAborted("who?")),
        ]
        summary = tell(records).summarize()
        assert (summary.completed, summary.failed) == (2, 0)
        assert summary.e2el.mean == 2000.0
        assert summary.duration == 2.0

    def test_outputs_tell_what_the_stream_does_not(self):
        collector = tell([*self.START, (1.0, verify(1, 0, ["a", "b"], [0, 0])), (1.5, WorkFailed(1, "bad"))])
        assert collector.summarize().num_unfinished == 2
        collector.on_outputs([RequestOutput("a", FinishReason.ERROR, 10, 1)])
        collector.on_outputs([RequestOutput("b", FinishReason.LENGTH, 10, 1)])
        summary = collector.summarize()
        assert (summary.completed, summary.num_errors, summary.num_unfinished) == (1, 1, 0)
        assert summary.num_failed_works == 1
        assert summary.e2el.mean == 1500.0

    def test_the_context_limit_ends_requests(self):
        assert tell(self.START, max_model_len=11).summarize().completed == 2
        assert tell(self.START, max_model_len=12).summarize().completed == 0

    def test_reasons_of_the_world(self):
        records = [*self.START[:3], (1.0, done(0, [0, 0], [1, 0], 0.0, 1.0, ("length", "error")))]
        records[-1] = (
            1.0,
            done(0, [0, 0], [1, 0], 0.0, 1.0, (FinishReason.LENGTH, FinishReason.ERROR)),
        )
        summary = tell(records).summarize()
        assert (summary.completed, summary.num_errors) == (1, 1)


def test_preemptions_are_new_stays():
    records = [(0.0, RequestArrived(Request("a", 10, 9)))]
    for i, incarnation in enumerate([3, 3, 5, 5, 9]):
        records.append((float(i), verify(i, 0, ["a"], [0], incarnations=[incarnation])))
        records.append((i + 0.5, done(i, [0], [1], float(i), i + 0.5)))
    assert tell(records).summarize().num_preemptions == 2
    collector = tell(records[:5])
    assert collector.summarize().num_preemptions == 0
    for now_s, item in records[5:]:
        (collector.on_submit if isinstance(item, VerifyWork) else collector.on_event)(now_s, item)
    assert collector.summarize().num_preemptions == 2, "a summary midway changes nothing"


def test_a_lost_drafters_work_is_not_drafting():
    records = [
        (0.0, DrafterReady()),
        (0.0, RequestArrived(Request("a", 10, 9))),
        (0.0, draft(0, 0, ["a"], [4])),
        (0.5, DrafterLost("gone")),
        (1.0, drafted(0, [4], 0.0, 1.0)),
    ]
    summary = tell(records).summarize()
    assert summary.mean_draft_ms == 0.0
    assert summary.num_drafted_tokens == 0
    assert summary.num_drafter_losses == 1


def test_counts_over_a_byte():
    records = [
        (0.0, RequestArrived(Request("a", 10, 1000))),
        (0.0, verify(0, 0, ["a"], [600])),
        (1.0, done(0, [500], [501], 0.0, 1.0)),
    ]
    summary = tell(records).summarize()
    assert summary.spec_decode_accepted_tokens == 500
    assert len(summary.spec_decode_per_position_acceptance_rates) == 600


def test_a_result_that_nobody_asked_for_is_left_to_the_core():
    assert tell([(1.0, done(5, [], [], 0.0, 1.0))]).summarize().rounds == 0


def test_a_work_that_only_ingests_is_no_drafting():
    """The drafter is busy with it, and that is all."""
    records = [
        (0.0, RequestArrived(Request("a", 10, 2, 0.0))),
        (0.0, verify(0, 0, ["a"], [0])),
        (0.0, draft(1, 0, ["a"], [0])),
        (3.0, drafted(1, [0], 0.0, 3.0)),
        (3.0, draft(2, 0, ["a"], [0])),
        (4.0, done(0, [0], [1], 0.0, 4.0)),
        (4.0, DrafterLost("with the second one")),
        (4.0, draft(3, 0, ["a"], [1])),
        (6.0, drafted(3, [1], 4.0, 6.0)),
        (6.0, verify(4, 0, ["a"], [1])),
        (8.0, done(4, [0], [1], 6.0, 8.0)),
    ]
    for max_kept in (None, Kept(1, 1, 1)):
        collector = tell(records, max_kept=max_kept)
        summary = collector.summarize()
        assert (summary.mean_draft_ms, summary.overlapped_draft_share) == (2000.0, 0.0)
        assert summary.draft_utilisation == pytest.approx(5 / 8)
        assert collector.device_times_s() == (6.0, 2.0)


# ------------------------------------------------------------------- reference


def reference(tape, ended):
    """The same figures, the slow and obvious way, from a tape and the engine's own account of who ended."""
    people, works = [], {}
    by_id = {}
    verify_spans, draft_spans, sizes = [], [], []
    drafts, accepted, per_second, causes, entries, preemptions = [], [], {}, list(NO_CAUSES), 0, 0
    last_s = 0.0
    for now_s, item in tape.records:
        if isinstance(item, VerifyWork):
            members = [by_id[i] for i in item.request_ids]
            works[item.work_id] = (item, members)
            for person, incarnation in zip(members, item.incarnations, strict=True):
                if not person["stays"]:
                    person["scheduled"] = now_s
                if incarnation not in person["stays"]:
                    preemptions += bool(person["stays"])
                    person["stays"].append(incarnation)
            continue
        if isinstance(item, DraftWork):
            works[item.work_id] = (item, [])
            continue
        last_s = now_s
        if isinstance(item, RequestArrived):
            person = {"request": item.request, "chunks": [], "scheduled": None, "stays": [], "aborted": False}
            people.append(person)
            by_id[item.request.request_id] = person
        elif isinstance(item, RequestAborted) and item.request_id in by_id:
            by_id[item.request_id]["aborted"] = True
        elif isinstance(item, DrafterLost):
            works = {i: entry for i, entry in works.items() if isinstance(entry[0], VerifyWork)}
        elif isinstance(item, WorkFailed):
            works.pop(item.work_id, None)
        elif isinstance(item, WorkDone) and item.work_id in works:
            work, members = works.pop(item.work_id)
            if isinstance(work, DraftWork):
                if any(work.num_draft):
                    draft_spans.append((item.started_s, item.ended_s))
                continue
            verify_spans.append((item.started_s, item.ended_s))
            sizes.append(work.batch_sizes)
            causes = [x + y for x, y in zip(causes, work.zero_draft, strict=True)]
            for i, person in enumerate(members):
                entries += 1
                if person["aborted"]:
                    continue
                if work.num_draft[i]:
                    drafts.append(work.num_draft[i])
                    accepted.append(item.result.num_accepted[i])
                committed = item.result.num_committed[i]
                if committed:
                    person["chunks"].append((now_s, committed))
                    second = int(now_s - people[0]["request"].arrival_s)
                    per_second[second] = per_second.get(second, 0) + committed
    good = {output.request_id for output in ended if output.finish_reason in ("stop", "length")}
    finished = [p for p in people if p["request"].request_id in good]
    start_s = min(p["request"].arrival_s for p in people)
    ttft = [p["chunks"][0][0] - p["request"].arrival_s for p in finished]
    e2el = [p["chunks"][-1][0] - p["request"].arrival_s for p in finished]
    counts = [sum(n for _, n in p["chunks"]) for p in finished]
    tpot = [(e - t) / (n - 1) for t, e, n in zip(ttft, e2el, counts, strict=True) if n > 1]
    itl = [b[0] - a[0] for p in finished for a, b in itertools.pairwise(p["chunks"])]
    queue = [p["scheduled"] - p["request"].arrival_s for p in finished]
    decode = [(p["chunks"][0][0], p["chunks"][-1][0]) for p in people if p["chunks"]]
    figures = {
        "completed": len(finished),
        "failed": len(people) - len(finished),
        "total_input_tokens": sum(p["request"].prompt_len for p in finished),
        "total_output_tokens": sum(counts),
        "max_output_tokens_per_s": max(per_second.values(), default=0),
        "makespan": max((p["chunks"][-1][0] for p in finished), default=start_s) - start_s,
        "spec_decode_num_drafts": len(drafts),
        "spec_decode_draft_tokens": sum(drafts),
        "spec_decode_accepted_tokens": sum(accepted),
        "spec_decode_per_position_acceptance_rates": [
            sum(a > i for a in accepted) / len(drafts) for i in range(max(drafts, default=0))
        ],
        "rounds": len(verify_spans),
        "mean_batch_size": entries / len(verify_spans) if verify_spans else 0.0,
        "mean_imbalance": statistics.fmean(max(s) - min(s) for s in sizes) if sizes else 0.0,
        "mean_running_requests": statistics.fmean(map(sum, sizes)) if sizes else 0.0,
        "zero_draft_causes": {c.name.lower(): causes[c] for c in ZeroDraft if c is not ZeroDraft.NONE},
        "num_preemptions": preemptions,
        "overlapped_draft_share": share(verify_spans, draft_spans),
        "decode_verify_share": share(verify_spans, decode),
    }
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", tpot), ("itl", itl), ("queue", queue)):
        values = sorted(values)
        figures[f"mean_{name}_ms"] = 1000 * statistics.fmean(values) if values else 0.0
        figures[f"std_{name}_ms"] = 1000 * statistics.pstdev(values) if values else 0.0
        for p in (50, 90, 95, 99):
            figures[f"p{p}_{name}_ms"] = 1000 * percentile(values, p)
        figures[f"median_{name}_ms"] = figures[f"p50_{name}_ms"]
    end_s = [p["chunks"][-1][0] for p in finished]
    figures["peak"] = max(
        (
            sum(int(p["request"].arrival_s - first) <= second <= int(end - first) for p, end in alive)
            for first in [min((p["request"].arrival_s for p in finished), default=0.0)]
            for alive in [list(zip(finished, end_s, strict=True))]
            for second in range(int(last_s) + 2)
        ),
        default=0,
    )
    return figures


def percentile(values, p):
    if not values:
        return 0.0
    rank = (len(values) - 1) * p / 100
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)


def share(busy, spans):
    """Seconds of the union of `spans` during `busy`, by cutting time at every end."""
    cuts = sorted({t for pair in (*busy, *spans) for t in pair})
    both = total = 0.0
    for left, right in itertools.pairwise(cuts):
        middle = (left + right) / 2
        if any(a <= middle < b for a, b in spans):
            total += right - left
            both += (right - left) * any(a <= middle < b for a, b in busy)
    return both / total if total else 0.0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 20),
    st.sampled_from(["psd", "sd", "ar"]),
    st.sampled_from([1, 7, 100_000]),
    st.booleans(),
)
def test_equals_the_obvious_reference(seed, mode, flush_rows, with_outputs):
    tape = Tape()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minedraft.metrics, "FLUSH_ROWS", flush_rows)
        collector = MetricsCollector(max_model_len=MODEL_LEN)
        if with_outputs:
            turns = run(ToyWorld(seed), tape, collector, mode=mode)
            got = collector.summarize().to_dict()
        else:
            turns = run(ToyWorld(seed), tape, mode=mode)
            got = tell(tape.records, max_model_len=MODEL_LEN).summarize().to_dict()
    want = reference(tape, [output for turn in turns for output in turn])
    assert got.pop("max_concurrent_requests") == want.pop("peak")
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    if with_outputs:
        assert got["num_unfinished"] == 0
        aborted = sum(output.finish_reason == "abort" for turn in turns for output in turn)
        assert got["num_aborted"] == aborted


@pytest.mark.parametrize("seed", range(3))
def test_a_journal_gives_the_same_summary_as_the_live_run(tmp_path, seed):
    live = MetricsCollector(num_target_devices=2)
    world = ToyWorld(seed)
    run(world, live, JournalWriter(tmp_path / "run.jsonl", JournalHeader("0.1.0")), max_verify_failures=99)
    later = MetricsCollector(num_target_devices=2, max_model_len=MODEL_LEN)
    assert metrics_from_journal(read_journal(tmp_path / "run.jsonl"), later) == live.summarize()
    default = metrics_from_journal(read_journal(tmp_path / "run.jsonl"))
    assert default.num_target_devices == 1


# ------------------------------------------------------------- runs too long to keep


MANY = 10**9


def same_but_for_percentiles(got: dict[str, object], want: dict[str, object], *, leave_out: str = "") -> None:
    assert got.keys() == want.keys()
    assert want["percentile_error"] == 0.0
    assert got["percentile_error"] == PERCENTILE_ERROR < 0.0006
    for name, value in want.items():
        if name in ("percentile_error", leave_out):
            continue
        rough = re.match(r"p\d+_|median_", name)
        # The toy world tells of some arrivals late, when who was gone by then is no longer known to the millisecond.
        most = 1.0 if name == "backlog_by_tenth" else 1e-5
        assert got[name] == pytest.approx(value, rel=1.01 * PERCENTILE_ERROR if rough else 1e-6, abs=most), name


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1 << 20),
    st.sampled_from(["psd", "sd", "ar"]),
    st.sampled_from([Kept(2, 20, 9), Kept(9, MANY, MANY), Kept(MANY, 12, MANY), Kept(MANY, MANY, 6)]),
    st.booleans(),
    st.integers(30, 90),
)
def test_a_folded_run_has_the_same_figures(seed, mode, max_kept, with_outputs, num_requests):
    """Whatever sets off the folding, and though requests are aborted, preempted and refused."""
    options = {"max_model_len": MODEL_LEN, "slo": Slo(ttft_ms=400.0, e2el_ms=2000.0)}
    exact, folded = MetricsCollector(**options, max_kept=None), MetricsCollector(**options, max_kept=max_kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minedraft.metrics, "FLUSH_ROWS", 1)
        if with_outputs:
            run(ToyWorld(seed, num_requests=num_requests), exact, folded, mode=mode)
        else:
            tape = Tape()
            run(ToyWorld(seed, num_requests=num_requests), tape, mode=mode)
            for collector in (exact, folded):
                retell(collector, tape.records)
    want = exact.summarize().to_dict()
    # Whole seconds are counted from the first request that completed, which the folded run may have to guess.
    leave_out = "max_concurrent_requests" if exact.detailed()["errors"][0] else ""
    same_but_for_percentiles(folded.summarize().to_dict(), want, leave_out=leave_out)
    assert folded.summarize() == folded.summarize(), "a look changes nothing"
    with pytest.raises(RuntimeError, match="max_kept=None"):
        folded.detailed()

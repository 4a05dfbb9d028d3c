"""Recorded acceptance: the two forms of a log, journals as logs, exact replay, any k, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.cli import run_cli
from minedraft.config import ConfigError, parse_config
from minedraft.journal import JournalError
from minedraft.sim.acceptance import AcceptanceModel, BetaRate
from minedraft.sim.acceptance_log import (
    RIGHT,
    UNKNOWN,
    WRONG,
    AcceptanceLogError,
    LoggedRequest,
    read_acceptance_log,
)
from minedraft.sim.acceptance_replay import LoggedAcceptance
from minedraft.sim.workload import WorkloadError

Rounds = list[tuple[int, int]]
rounds = st.lists(st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1)
some_rounds = rounds.filter(lambda pairs: any(k for k, _ in pairs))


def log_of(path: Path, *lines: Any) -> list[LoggedRequest]:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_acceptance_log(path)


def line_of(pairs: Rounds, **fields: Any) -> dict[str, Any]:
    return {"num_draft": [k for k, _ in pairs], "num_accepted": [accepted for _, accepted in pairs], **fields}


def replayed(model: AcceptanceModel, request_id: str, drafts: list[int], start: int = 1) -> list[int]:
    """Accepted drafts of each round; a round of none asks for nothing."""
    counts, position = [], start
    for k in drafts:
        counts.append(model.num_accepted(request_id, position, k) if k else 0)
        position += counts[-1] + 1
    return counts


# --- the two forms


def test_the_two_lines_of_the_docstring_say_the_same(tmp_path: Path) -> None:
    by_rounds, by_outcomes = log_of(
        tmp_path / "log.jsonl",
        {"num_draft": 4, "num_accepted": [4, 2, 0, 1]},
        {"outcomes": "?1111?110010"},
    )
    assert by_rounds == by_outcomes
    assert by_rounds.rate == 7 / 10
    assert set(by_rounds.outcomes) == {RIGHT, WRONG, UNKNOWN}
    assert by_rounds.request_id is None


@given(pairs=some_rounds, start=st.integers(0, 3), seed=st.integers(0, 9))
def test_the_rounds_of_the_record_repeat_exactly(
    tmp_path_factory: pytest.TempPathFactory, pairs: Rounds, start: int, seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "repeat.jsonl"
    requests = log_of(path, line_of(pairs, request_id="a", start=start))
    for model in (LoggedAcceptance(requests, by_id=True, seed=seed), LoggedAcceptance(requests, seed=seed)):
        assert replayed(model, "a", [k for k, _ in pairs], start) == [accepted for _, accepted in pairs]


@given(
    pairs=some_rounds,
    position=st.integers(0, 90),
    short=st.integers(1, 4),
    long=st.integers(4, 9),
    first=st.lists(st.integers(0, 120), max_size=3),
)
def test_fates_do_not_depend_on_draft_length_or_on_what_was_asked_before(
    pairs: Rounds, position: int, short: int, long: int, first: list[int]
) -> None:
    outcomes = bytes([UNKNOWN, *(RIGHT if accepted else WRONG for k, accepted in pairs if k), UNKNOWN])
    one, other = (LoggedAcceptance([LoggedRequest(None, outcomes)], seed=5) for _ in range(2))
    accepted = one.num_accepted("r", position, long)
    for elsewhere in first:
        other.num_accepted("r", elsewhere, 3)
        other.num_accepted("s", elsewhere, 3)
    assert other.num_accepted("r", position, short) == min(accepted, short)
    assert other.num_accepted("r", position, long) == accepted
    other.forget("r")
    other.forget("never seen")
    assert other.num_accepted("r", position, long) == accepted
    if accepted >= 2:
        assert other.num_accepted("r", position + 1, long - 1) == accepted - 1


def test_a_longer_text_starts_the_record_over() -> None:
    model = LoggedAcceptance([LoggedRequest(None, bytes([WRONG, RIGHT, RIGHT]))])
    assert [model.num_accepted("r", position, 3) for position in range(6)] == [0, 2, 1, 0, 2, 1]


def test_unknown_positions_have_the_requests_own_rate() -> None:
    outcomes = bytes([RIGHT, RIGHT, RIGHT, WRONG] + [UNKNOWN] * 4_000)
    model = LoggedAcceptance([LoggedRequest(None, outcomes)], seed=3)
    right = sum(model.num_accepted("r", position, 1) for position in range(4, 4_004))
    assert right / 4_000 == pytest.approx(0.75, abs=0.02)
    assert model.conditional_rates("r", 3) == (0.75,) * 3
    assert LoggedAcceptance([LoggedRequest(None, outcomes)], seed=4).num_accepted("r", 4, 999) != model.num_accepted(
        "r", 4, 999
    )


def test_lots_are_drawn_per_request_and_cover_the_log() -> None:
    requests = [LoggedRequest(f"{i}", bytes([RIGHT] * i + [WRONG])) for i in range(5)]
    model = LoggedAcceptance(requests, seed=2)
    drawn = [model.recorded(f"r{i}").request_id for i in range(200)]
    assert sorted({str(request_id) for request_id in drawn}) == ["0", "1", "2", "3", "4"]
    again = LoggedAcceptance(requests, seed=2)
    assert [again.recorded(f"r{i}").request_id for i in reversed(range(200))] == drawn[::-1]


# --- journals


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = run_cli(["simulate", *arguments, "--json", "-"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    figures: dict[str, Any] = json.loads(captured.out)
    return figures


SMALL = (
    "--set",
    "workload.num_requests=12",
    "--set",
    "workload.output_lens=40",
    "--set",
    "acceptance.draft_probs=true",
)


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_a_run_repeats_with_its_own_journal_as_the_log(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "run.jsonl"
    beta = "acceptance={kind='beta',mean=0.6,concentration=3.0}"
    log = f"acceptance={{path='{path}',by_id=true}}"
    recorded = run(capsys, "--mode", mode, *SMALL, "--set", beta, "--journal", str(path))
    repeated = run(capsys, "--mode", mode, *SMALL, "--set", log)
    assert recorded["config"].pop("acceptance") != repeated["config"].pop("acceptance")
    assert recorded == repeated
    longer = run(capsys, "--mode", mode, *SMALL, "--set", log, "--set", "scheduler.num_speculative_tokens=6")
    assert longer["spec_decode_acceptance_length"] > recorded["spec_decode_acceptance_length"]


def test_what_a_journal_says_is_what_happened(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With preemptions, aborts, failed steps and selected drafts, against the model that decided."""
    path = tmp_path / "run.jsonl"
    options = ["workload.aborts={probability=0.4,mean_patience_s=2.0}", "faults.verify_failure_rate=0.05"]
    options += ["scheduler.num_target_blocks=30", "scheduler.max_batch_size=4", "scheduler.draft_capacity=9"]
    options += [
        "acceptance={kind='beta',mean=0.6,concentration=3.0,draft_probs=true}",
        "scheduler.max_verify_failures=50",
    ]
    arguments = [argument for option in options for argument in ("--set", option)]
    figures = run(capsys, *SMALL, *arguments, "--policy", "selection=tetris", "--journal", str(path))
    assert min(figures[name] for name in ("num_aborted", "num_preemptions", "num_failed_works")) > 0
    truth = BetaRate(0.6, 3.0, seed=figures["seed"])
    requests = read_acceptance_log(path)
    known = 0
    for request in requests:
        assert request.request_id is not None
        for position, outcome in enumerate(request.outcomes):
            known += outcome != UNKNOWN
            if outcome != UNKNOWN:
                assert truth.num_accepted(request.request_id, position, 1) == outcome
    assert len(requests) > 8
    assert known > 100


def test_a_journal_without_drafts_is_no_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ar.jsonl"
    run(capsys, "--mode", "ar", *SMALL, "--journal", str(path))
    with pytest.raises(AcceptanceLogError, match=r"ar\.jsonl: no request in it has a verified draft; record one"):
        read_acceptance_log(path)


# --- refusals


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not JSON: .*; write one object per line"),
        ("[1]", r":2: a list, must be an object such as"),
        ('{"num_draft": 4}', r":2: give num_draft and num_accepted, or outcomes alone"),
        ('{"outcomes": "1", "num_draft": 4}', r":2: give num_draft and num_accepted, or outcomes alone"),
        ('{"num_draft": 4, "num_acepted": [1]}', r":2: unknown field 'num_acepted'; did you mean 'num_accepted'"),
        ('{"num_draft": 4, "num_accepted": 1}', r":2: num_accepted is 1, must be a list"),
        ('{"num_draft": 4, "num_accepted": [1, 5]}', r":2: num_accepted\[1\] is 5, above the 4 drafts"),
        ('{"num_draft": [4], "num_accepted": [1, 2]}', r":2: num_draft has 1 rounds, num_accepted 2"),
        ('{"num_draft": 4, "num_accepted": [1.5]}', r":2: num_accepted\[0\] is 1.5, must be a whole number >= 0"),
        ('{"num_draft": true, "num_accepted": [1]}', r":2: num_draft\[0\] is True"),
        ('{"num_draft": 4, "num_accepted": [1], "start": -1}', r":2: start is -1"),
        ('{"num_draft": 4, "num_accepted": []}', r":2: no position's outcome is known; leave the request out"),
        ('{"outcomes": "1x"}', r":2: outcomes\[1\] is 'x', must be 1 \(right\), 0 \(wrong\) or \? \(unknown\)"),
        ('{"outcomes": ""}', r":2: outcomes is '', must be text"),
        ('{"outcomes": "?"}', r":2: no position's outcome is known"),
        ('{"outcomes": "1", "request_id": 3}', r":2: request_id is 3, must be text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"outcomes": "10"}}\n{line}\n')
    with pytest.raises(AcceptanceLogError, match=message) as caught:
        read_acceptance_log(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_log(tmp_path: Path) -> None:
    with pytest.raises(AcceptanceLogError, match="check the path of the log"):
        read_acceptance_log(tmp_path / "none.jsonl")
    with pytest.raises(AcceptanceLogError, match="check the path of the log"):
        read_acceptance_log(tmp_path)
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(AcceptanceLogError, match="write one JSON object per request"):
        read_acceptance_log(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AcceptanceLogError, match="not text in UTF-8"):
        read_acceptance_log(path)
    path.write_text('{"format": "minedraft-journal"\n')
    with pytest.raises(JournalError, match="no journal header"):
        read_acceptance_log(path)


def test_by_id_needs_ids(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(ValueError, match="request 2 of the acceptance log has no request_id"):
        LoggedAcceptance(log_of(path, {"outcomes": "1", "request_id": "a"}, {"outcomes": "0"}), by_id=True)
    with pytest.raises(ValueError, match="has request 'a' twice"):
        LoggedAcceptance(log_of(path, *[{"outcomes": "1", "request_id": "a"}] * 2), by_id=True)
    with pytest.raises(ValueError, match="empty"):
        LoggedAcceptance([])
    model = LoggedAcceptance(log_of(path, {"outcomes": "1", "request_id": "request-1"}), by_id=True)
    with pytest.raises(WorkloadError, match=r"no request 'request-2'; did you mean 'request-1'\? acceptance.by_id"):
        model.num_accepted("request-2", 1, 1)


def test_a_configuration_names_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(ConfigError, match=r"acceptance\.path: .*log\.jsonl: No such file"):
        parse_config({"acceptance": {"path": str(path)}})
    path.write_text('{"outcomes": "10"}\n')
    with pytest.raises(
        ConfigError, match=r"acceptance\.by_id: is set, but request 1 .* has no request_id; give each one"
    ):
        parse_config({"acceptance": {"path": str(path), "by_id": True}})
    path.write_text('{"outcomes": "10", "request_id": "a"}\n')
    assert run_cli(["simulate", "--set", f"acceptance={{path='{path}',by_id=true}}"]) != 0
    assert "the acceptance log has no request 'r0'; its first is 'a'; acceptance.by_id" in capsys.readouterr().err

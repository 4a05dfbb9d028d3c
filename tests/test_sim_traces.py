"""Trace readers: the formats, the options, one-line errors with file and line, streaming."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from minedraft.sim.traces import TRACE_FORMATS, Trace, TraceError, TraceOptions
from minedraft.sim.workload import AtOnce

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:00.0319601,3180,8
2023-11-17 00:00:01,110,27
"""
MOONCAKE = """{"timestamp": 500, "input_length": 6758, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 1500, "input_length": 100, "output_length": 7}
"""
JSONL = """{"arrival_s": 0, "prompt_len": 3, "output_len": 4}
{"arrival_s": 1.5, "prompt_len": 5, "output_len": 6, "request_id": "x", "priority": 2, "max_draft_tokens": 0,
"""
SHAREGPT = json.dumps(
    [
        {"id": "a", "conversations": [{"from": "human", "value": "x" * 9}, {"from": "gpt", "value": "é" * 4}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "starts with an answer"}]},
        {
            "id": "c",
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "user", "value": '[a "quoted" ] bracket'},
                {"from": "assistant", "value": "y" * 40},
                {"from": "user", "value": "more"},
            ],
        },
    ],
    indent=1,
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_azure(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, AZURE), "azure")
    requests = list(trace)
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 0.0520001, 1.02004], abs=1e-9)
    assert [(r.prompt_len, r.output_len, r.max_tokens) for r in requests] == [
        (4808, 10, 10),
        (3180, 8, 8),
        (110, 27, 27),
    ]
    assert list(trace) == requests


def test_azure_with_zones_and_other_column_order(tmp_path: Path) -> None:
    text = "GeneratedTokens,TIMESTAMP,ContextTokens\n1,2024-05-10 00:00:00.5+00:00,2\n3,2024-05-10T02:00:01+02:00,4\n"
    requests = list(Trace(write(tmp_path, text), "azure"))
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in requests] == [(0.0, 2, 1), (0.5, 4, 3)]


def test_mooncake(tmp_path: Path) -> None:
    requests = list(Trace(write(tmp_path, MOONCAKE), "mooncake"))
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in requests] == [(0.5, 6758, 5), (1.5, 100, 7)]


def test_jsonl_with_all_fields(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0, "prompt_len": 3, "output_len": 4},
        {
            "arrival_s": 1.5,
            "prompt_len": 5,
            "output_len": 6,
            "request_id": "x",
            "priority": 2,
            "max_tokens": 9,
            "max_draft_tokens": 0,
            "abort_after_s": 0.5,
        },
    ]
    first, second = Trace(write(tmp_path, "\n".join(map(json.dumps, rows))), "jsonl")
    assert (first.request_id, first.max_tokens, first.priority, first.max_draft_tokens) == ("t0", 4, 0, None)
    assert (second.request_id, second.max_tokens, second.priority) == ("x", 9, 2)
    assert (second.max_draft_tokens, second.abort_after_s) == (0, 0.5)


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_sharegpt_takes_the_first_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("minedraft.sim.traces._BLOCK", block)
    requests = list(Trace(write(tmp_path, SHAREGPT), "sharegpt"))
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in requests] == [(0.0, 3, 1), (0.0, 6, 10)]


def test_sharegpt_with_a_tokenizer_and_arrivals(tmp_path: Path) -> None:
    options = TraceOptions(count_tokens=len, arrivals=AtOnce(4.0))
    requests = list(Trace(write(tmp_path, SHAREGPT), "sharegpt", options))
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in requests] == [(4.0, 9, 4), (4.0, 21, 40)]


def test_options(tmp_path: Path) -> None:
    options = TraceOptions(max_requests=2, time_scale=0.5, max_prompt_len=4000, max_output_len=9, max_tokens=100)
    requests = list(Trace(write(tmp_path, AZURE), "azure", options))
    assert [(r.prompt_len, r.output_len, r.max_tokens) for r in requests] == [(4000, 9, 100), (3180, 8, 100)]
    assert requests[1].arrival_s == pytest.approx(0.0260, abs=1e-4)


def test_lines_are_read_as_they_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE + "this line is never reached\n")
    assert len(list(itertools.islice(Trace(path, "mooncake"), 2))) == 2


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("azure", "", r"trace.txt:1: no column 'TIMESTAMP'"),
        ("azure", "TIMESTAMP,ContextTokens\n", r":1: no column 'GeneratedTokens'; the header must name"),
        ("azure", AZURE + "2023-11-17 00:00:02,1\n", r":5: 2 fields for 3 columns"),
        ("azure", AZURE + "yesterday,1,2\n", r":5: TIMESTAMP is 'yesterday'; use YYYY-MM-DD"),
        ("azure", AZURE + "2023-13-17 00:00:02,1,2\n", r":5: TIMESTAMP is"),
        ("azure", AZURE + "2023-11-17 00:00:02,-1,2\n", r":5: ContextTokens is '-1', must be a whole number >= 1"),
        ("azure", AZURE + "2023-11-17 00:00:00,1,2\n", r":5: arrival .* before .*; sort the file by time"),
        ("mooncake", MOONCAKE + "{oops\n", r":4: not JSON \(.*\); put one JSON object on each line"),
        ("mooncake", MOONCAKE + "[1]\n", r":4: a JSON list; put one JSON object on each line"),
        ("mooncake", MOONCAKE + '{"timestamp": 1}\n', r":4: no field 'input_length'; every line must have"),
        ("mooncake", '{"timestamp": -1, "input_length": 1, "output_length": 1}', r":1: timestamp is -1"),
        ("mooncake", '{"timestamp": NaN, "input_length": 1, "output_length": 1}', r":1: timestamp is nan"),
        ("mooncake", '{"timestamp": 1, "input_length": 1.5, "output_length": 1}', r":1: input_length is 1.5"),
        ("jsonl", JSONL, r":2: not JSON"),
        ("jsonl", '{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "request_id": 7}', r":1: request_id is 7"),
        ("jsonl", '{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "priority": "x"}', r":1: priority is 'x'"),
        ("jsonl", '{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "abort_after_s": -1}', r":1: .*abort_after_s"),
        (
            "azure",
            AZURE + f"2023-11-17 00:00:02,1,{'9' * 5000}\n",
            r":5: GeneratedTokens is '9+, must be a whole number",
        ),
        ("azure", AZURE + f"2023-11-17 00:00:02,{'9' * 20},2\n", r":5: .*prompt_len is 9+, must be from 1 to"),
        ("mooncake", "[" * 100_000, r":1: not JSON \(nested too deeply"),
        ("mooncake", '{"timestamp": 1.7e18, "input_length": 1, "output_length": 1}', r":1: .*arrival_s is 17"),
        ("jsonl", '{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "max_tokens": 0}', r":1: .*max_tokens is 0"),
        ("jsonl", '{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "max_draft_tokens": -1}', r":1: .*_tokens is -1"),
        (
            "jsonl",
            '{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "abort_after_s": "x"}',
            r":1: abort_after_s is 'x'",
        ),
        ("jsonl", '{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "request_id": "\\ud800"}', r":1: request_id is"),
        ("jsonl", f'{{"arrival_s": 0, "prompt_len": {"9" * 5000}, "output_len": 4}}', r":1: not JSON \(.*digits"),
        ("sharegpt", "[" * 100_000, r":1: not JSON \(nested too deeply"),
        ("sharegpt", f"[{'9' * 5000}]", r":1: not JSON \(.*number too long"),
        ("sharegpt", "{}", r":1: does not start with '\['"),
        ("sharegpt", "[\n{}]", r":2: no list 'conversations'"),
        ("sharegpt", '[{"conversations": []},\n\n{"conversations": [', r":3: not JSON"),
        ("sharegpt", '[{"conversations": []} {}]', r":1: '{' between items"),
        ("sharegpt", '[{"conversations": []},\n', r":2: the array has no end"),
    ],
)
def test_bad_files_are_refused_with_line_and_remedy(tmp_path: Path, form: str, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        list(Trace(write(tmp_path, text), form))
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


EMPTY = {
    "azure": ["TIMESTAMP,ContextTokens,GeneratedTokens\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n\n\n"],
    "mooncake": ["", "\n \n"],
    "jsonl": ["", "\n"],
    "sharegpt": ["[]", " [ ]\n", '[{"conversations": []}]', '[{"conversations": [{"from": "gpt", "value": "a"}]}]'],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in EMPTY.items() for text in texts])
def test_a_trace_without_requests_is_refused(tmp_path: Path, form: str, text: str) -> None:
    assert set(EMPTY) == set(TRACE_FORMATS)
    path = write(tmp_path, text)
    for options in (TraceOptions(), TraceOptions(arrivals=AtOnce(1.0)), TraceOptions(max_prompt_len=1, max_tokens=1)):
        with pytest.raises(TraceError, match=r"trace.txt: no requests; the format .* needs at least one"):
            list(Trace(path, form, options))


def test_options_that_leave_nothing_of_a_trace_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no requests; max_requests is 0: raise it"):
        list(Trace(write(tmp_path, AZURE), "azure", TraceOptions(max_requests=0)))


def test_missing_file_and_wrong_encoding(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="check the path"):
        list(Trace(tmp_path / "nowhere", "jsonl"))
    path = tmp_path / "latin"
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TraceError, match="not UTF-8"):
        list(Trace(path, "jsonl"))


def test_unknown_format_and_bad_options() -> None:
    with pytest.raises(ValueError, match=f"'csv'; known: {', '.join(TRACE_FORMATS)}"):
        Trace("x", "csv")
    with pytest.raises(ValueError, match=r"TraceOptions.time_scale is 0"):
        TraceOptions(time_scale=0)
    with pytest.raises(ValueError, match=r"TraceOptions.max_requests is -1"):
        TraceOptions(max_requests=-1)
    with pytest.raises(ValueError, match=r"TraceOptions.max_prompt_len is 0"):
        TraceOptions(max_prompt_len=0)

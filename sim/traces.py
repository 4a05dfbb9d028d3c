"""Readers of recorded traces, streaming: a file is read as simulated time gets to its lines.

Every reader yields `SimRequest` in order of arrival, with the first arrival at 0 s unless the format gives
absolute times from a start of its own (Mooncake, plain JSONL). A bad line is a `TraceError` of one line:
file, line number, what is wrong and what to do about it.

Formats, by name:

* `azure`: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference trace 2023 and 2024).
* `mooncake`: JSON lines with timestamp (milliseconds), input_length, output_length.
* `sharegpt`: a JSON array of {"conversations": [{"from": …, "value": …}, …]}; no arrival times.
* `jsonl`: JSON lines with arrival_s, prompt_len, output_len and optionally request_id, priority, max_tokens,
  max_draft_tokens, abort_after_s.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from minedraft.json_text import parse_json
from minedraft.sim.workload import Arrivals, SimRequest, whole_number, with_arrivals

Tokenizer = Callable[[str], int]


class TraceError(ValueError):
    """A trace can't be read: one line with file, line number and remedy."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What to make of a trace.

    Attributes:
        max_requests: stop after this many; None for all.
        time_scale: factor on arrival times, above 0: 0.5 doubles the load.
        max_prompt_len: clip longer prompts to this many tokens; None for no clip.
        max_output_len: clip longer outputs to this many tokens; None for no clip.
        max_tokens: the user's limit per request; None gives each its own (clipped) output length as limit, so
            that requests end by LENGTH and policies can see what is left of them.
        arrivals: replaces the trace's arrival times; None keeps them.
        seed: of the stream "arrivals" that `arrivals` uses.
        count_tokens: for texts, how many tokens one has; None estimates a token per 4 characters, rounded up.

    Raises:
        ValueError: a field is out of range.
    """

    max_requests: int | None = None
    time_scale: float = 1.0
    max_prompt_len: int | None = None
    max_output_len: int | None = None
    max_tokens: int | None = None
    arrivals: Arrivals | None = None
    seed: int = 0
    count_tokens: Tokenizer | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.time_scale < math.inf:
            raise ValueError(f"TraceOptions.time_scale is {self.time_scale}, must be finite and > 0")
        if self.max_requests is not None and self.max_requests < 0:
            raise ValueError(f"TraceOptions.max_requests is {self.max_requests}, must be >= 0")
        for name in ("max_prompt_len", "max_output_len", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"TraceOptions.{name} is {value}, must be >= 1")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file as a workload; iterate it as often as you like.

    Attributes:
        path: the file.
        format: a key of `TRACE_FORMATS`.
        options: what to make of it.

    Raises:
        ValueError: the format is unknown. Iterating raises `TraceError` for a bad file.
    """

    path: str | Path
    format: str
    options: TraceOptions = TraceOptions()

    def __post_init__(self) -> None:
        if self.format not in TRACE_FORMATS:
            raise ValueError(f"unknown trace format {self.format!r}; known: {', '.join(TRACE_FORMATS)}")

    def __iter__(self) -> Iterator[SimRequest]:
        """A fresh pass over the file."""
        options = self.options
        try:
            rows = TRACE_FORMATS[self.format](Path(self.path), options)
            requests = _requests(rows, Path(self.path), options)
            if options.arrivals is not None:
                requests = with_arrivals(requests, options.arrivals, options.seed)
            first = next(requests, None)
            if first is None:
                raise TraceError(f"{self.path}: no requests; {self._missing()}")
            yield first
            yield from requests
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror}; check the path") from error
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 at byte {error.start} of a block"
            raise TraceError(f"{self.path}: {problem}; convert the file to UTF-8") from error

    def _missing(self) -> str:
        """What to do about a trace without requests."""
        if self.options.max_requests == 0:
            return "max_requests is 0: raise it"
        return f"the format {self.format!r} needs {_LEAST[self.format]}: is the file whole?"


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a trace, as it stands there."""

    line: int
    arrival_s: float
    prompt_len: int
    output_len: int
    extra: Mapping[str, Any]


def _requests(rows: Iterator[_Row], path: Path, options: TraceOptions) -> Iterator[SimRequest]:
    """Apply the options, and check the order of arrival."""
    previous_s = 0.0
    for index, row in enumerate(rows):
        if options.max_requests is not None and index >= options.max_requests:
            return
        if row.arrival_s < previous_s:
            _fail(
                path,
                row.line,
                f"arrival {row.arrival_s} s is before the previous line's {previous_s} s",
                "sort the file by time",
            )
        previous_s = row.arrival_s
        prompt_len = min(row.prompt_len, options.max_prompt_len or row.prompt_len)
        output_len = min(row.output_len, options.max_output_len or row.output_len)
        extra = row.extra
        try:
            yield SimRequest(
                request_id=extra.get("request_id", f"t{index}"),
                arrival_s=row.arrival_s * options.time_scale,
                prompt_len=prompt_len,
                output_len=output_len,
                max_tokens=options.max_tokens or extra.get("max_tokens", output_len),
                priority=extra.get("priority", 0),
                max_draft_tokens=extra.get("max_draft_tokens"),
                abort_after_s=extra.get("abort_after_s"),
            )
        except (TypeError, ValueError) as error:
            _fail(path, row.line, str(error), _FIX_LINE)


_ONE_PER_LINE: Final = "put one JSON object on each line"
_FIX_LINE: Final = "correct or drop the line"


def _fail(path: Path, line: int, problem: str, remedy: str) -> NoReturn:
    raise TraceError(f"{path}:{line}: {problem}; {remedy}")


def _count(path: Path, line: int, name: str, value: Any) -> int:
    """A token count of at least 1."""
    count = whole_number(value) if isinstance(value, str) else value
    if type(count) is not int or count < 1:
        _fail(path, line, f"{name} is {value!r:.60}, must be a whole number >= 1", _FIX_LINE)
    return count


def _seconds(path: Path, line: int, name: str, value: Any) -> float:
    """A time of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        _fail(path, line, f"{name} is {value!r}, must be a finite number >= 0", _FIX_LINE)
    return float(value)


# --- Azure

_TIMESTAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_EPOCH: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _azure_rows(path: Path, options: TraceOptions) -> Iterator[_Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.reader(file)
        header = [name.strip() for name in next(table, [])]
        missing = [name for name in _AZURE_COLUMNS if name not in header]
        if missing:
            _fail(path, 1, f"no column {missing[0]!r}", f"the header must name {', '.join(_AZURE_COLUMNS)}")
        time_at, prompt_at, output_at = (header.index(name) for name in _AZURE_COLUMNS)
        start: tuple[int, float] | None = None
        for cells in table:
            line = table.line_num
            if not cells:
                continue
            if len(cells) != len(header):
                _fail(path, line, f"{len(cells)} fields for {len(header)} columns", _FIX_LINE)
            whole_s, fraction_s = _azure_time(path, line, cells[time_at])
            start = start or (whole_s, fraction_s)
            # Whole seconds and fractions apart: since an epoch, a float has no room for the seventh digit.
            arrival_s = (whole_s - start[0]) + (fraction_s - start[1])
            prompt_len = _count(path, line, "ContextTokens", cells[prompt_at])
            output_len = _count(path, line, "GeneratedTokens", cells[output_at])
            yield _Row(line, arrival_s, prompt_len, output_len, {})


def _azure_time(path: Path, line: int, text: str) -> tuple[int, float]:
    """Whole seconds since some epoch, and the fraction; times without a zone are taken as UTC."""
    match = _TIMESTAMP.fullmatch(text.strip())
    if match:
        try:
            moment = dt.datetime.fromisoformat(match[1] + (match[3] or "+00:00").replace("Z", "+00:00"))
        except ValueError:
            match = None
    if not match:
        _fail(path, line, f"TIMESTAMP is {text!r}", "use YYYY-MM-DD HH:MM:SS.fffffff")
    since = moment - _EPOCH
    return since.days * 86_400 + since.seconds, float(match[2] or 0.0)


# --- JSON lines


def _json_lines(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers; blank lines are skipped."""
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = parse_json(text)
            except json.JSONDecodeError as error:
                _fail(path, line, f"not JSON ({error.msg} at column {error.colno})", _ONE_PER_LINE)
            if not isinstance(row, dict):
                _fail(path, line, f"a JSON {type(row).__name__}", _ONE_PER_LINE)
            missing = [name for name in needed if name not in row]
            if missing:
                _fail(path, line, f"no field {missing[0]!r}", f"every line must have {', '.join(needed)}")
            yield line, row


def _mooncake_rows(path: Path, options: TraceOptions) -> Iterator[_Row]:
    for line, row in _json_lines(path, ("timestamp", "input_length", "output_length")):
        yield _Row(
            line,
            _seconds(path, line, "timestamp", row["timestamp"]) / 1000.0,
            _count(path, line, "input_length", row["input_length"]),
            _count(path, line, "output_length", row["output_length"]),
            {},
        )


def _jsonl_rows(path: Path, options: TraceOptions) -> Iterator[_Row]:
    for line, row in _json_lines(path, ("arrival_s", "prompt_len", "output_len")):
        if not isinstance(row.get("request_id", ""), str):
            _fail(path, line, f"request_id is {row['request_id']!r}, must be a string", "put it in quotes")
        if not _is_unicode(row.get("request_id") or ""):
            _fail(path, line, f"request_id is {row['request_id']!r}, which is no valid text", _FIX_LINE)
        for name in ("priority", "max_tokens", "max_draft_tokens"):
            if row.get(name) is not None and type(row[name]) is not int:
                _fail(path, line, f"{name} is {row[name]!r}, must be a whole number", _FIX_LINE)
        if row.get("abort_after_s") is not None:
            _seconds(path, line, "abort_after_s", row["abort_after_s"])
        yield _Row(
            line,
            _seconds(path, line, "arrival_s", row["arrival_s"]),
            _count(path, line, "prompt_len", row["prompt_len"]),
            _count(path, line, "output_len", row["output_len"]),
            {name: value for name, value in row.items() if value is not None},
        )


def _is_unicode(text: str) -> bool:
    """Whether it can be written to a file: half of a surrogate pair can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- ShareGPT

_BLOCK: Final = 1 << 20  # characters per read
_PROMPT_ROLES: Final = ("human", "user")
_OUTPUT_ROLES: Final = ("gpt", "chatgpt", "bard", "assistant")


def _sharegpt_rows(path: Path, options: TraceOptions) -> Iterator[_Row]:
    """First prompt and first answer of each conversation; conversations without the two are skipped."""
    count_tokens = options.count_tokens or _estimate_tokens
    for line, item in _array_items(path):
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            _fail(path, line, "no list 'conversations'", 'use [{"conversations": [{"from": …}]}]')
        pair = _first_exchange(turns)
        if pair is not None:
            prompt_len, output_len = count_tokens(pair[0]), count_tokens(pair[1])
            yield _Row(line, 0.0, max(1, prompt_len), max(1, output_len), {})


def _first_exchange(turns: list[Any]) -> tuple[str, str] | None:
    """The first non-empty prompt that a non-empty answer follows at once."""
    prompt = ""
    for turn in turns:
        role, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(text, str) or not text:
            prompt = ""
        elif role in _PROMPT_ROLES:
            prompt = text
        elif role in _OUTPUT_ROLES and prompt:
            return prompt, text
    return None


def _estimate_tokens(text: str) -> int:
    """A token per 4 characters, rounded up: the rule of thumb for English with a BPE vocabulary."""
    return -(-len(text) // 4)


class _ArrayScanner:
    """Takes the items of one JSON array from a file, a block at a time."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0
        self._decode = json.JSONDecoder().raw_decode
        self.line = 1

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            self.line += self._text.count("\n", start, self._at)
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Pass the character that `peek` showed."""
        self._at += 1

    def item(self) -> Any:
        """The JSON value that starts here."""
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._read():
                    continue
                line = self.line + self._text.count("\n", self._at, error.pos)
                _fail(self._path, line, f"not JSON ({error.msg})", "the file must be one JSON array")
            except (RecursionError, ValueError):  # thousands of brackets, or of digits
                fault = "not JSON (nested too deeply, or a number too long)"
                _fail(self._path, self.line, fault, "the file must be one JSON array")
            self.line += self._text.count("\n", self._at, end)
            self._at = end
            return value

    def _read(self) -> bool:
        # What is kept doubles at least, so that an item of any size costs linear time in all.
        kept = self._text[self._at :]
        block = self._file.read(max(_BLOCK, len(kept)))
        self._text, self._at = kept + block, 0
        return bool(block)


def _array_items(path: Path) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array with the lines on which they start."""
    with path.open(encoding="utf-8-sig") as file:
        scanner = _ArrayScanner(path, file)
        if scanner.peek() != "[":
            _fail(path, scanner.line, "does not start with '['", "the file must be one JSON array")
        scanner.skip()
        if scanner.peek() == "]":
            return
        while scanner.peek():
            line = scanner.line
            yield line, scanner.item()
            follower = scanner.peek()
            scanner.skip()
            if follower == "]":
                return
            if follower and follower != ",":
                _fail(path, scanner.line, f"{follower!r} between items", "separate the items with commas")
        _fail(path, scanner.line, "the array has no end", "the file seems cut off; fetch it again")


_LEAST: Final = {
    "azure": "at least one line below the header",
    "mooncake": "at least one line",
    "sharegpt": "at least one conversation in which an answer follows a prompt",
    "jsonl": "at least one line",
}

TRACE_FORMATS: Final[Mapping[str, Callable[[Path, TraceOptions], Iterator[_Row]]]] = {
    "azure": _azure_rows,
    "mooncake": _mooncake_rows,
    "sharegpt": _sharegpt_rows,
    "jsonl": _jsonl_rows,
}

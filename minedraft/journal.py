"""Runs on disk: write what a `Recorder` tells (`JournalWriter`), and read it back (`read_journal`, `feed`).

Law of this file: no clock of its own, no knowledge of what a sink does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from minedraft.codec import FIELDS, Asked, Pooled, Record, decode, encode
from minedraft.json_text import parse_json
from minedraft.recorder import Recorder, Sink
from minedraft.whole_writes import write_whole
from minedraft.work import DraftWork, Event, VerifyWork, Work

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "Journal",
    "JournalError",
    "JournalHeader",
    "JournalWriter",
    "Recorder",
    "Sink",
    "feed",
    "read_journal",
]

FORMAT: Final = "minedraft-journal"
FORMAT_VERSION: Final = 1


class JournalError(ValueError):
    """A journal can't be read; one line that names the file, the line number and the fault."""


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """What is needed to build the core of a recorded run again. All values must be JSON.

    Attributes:
        minedraft: version of the package that recorded.
        scheduler: the scheduler's configuration by field.
        policies: policy spec by slot, as `load_policies` takes them.
        seed: seed of the run.
        extra: anything else (the world's configuration, say).
    """

    minedraft: str
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    policies: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


class JournalWriter:
    """A `Sink` that writes a run to a file of JSON lines.

    Every line goes to the operating system as soon as it is known, in one write, so that a killed process
    loses none of them. The same run gives the same bytes: no time stamps, no host names, keys sorted.

    Args:
        path: the file, overwritten.
        header: see `JournalHeader`.

    Raises:
        OSError: the file can't be written.
        TypeError: the header isn't JSON.
    """

    def __init__(self, path: str | Path, header: JournalHeader) -> None:
        head = {"format": FORMAT, "version": FORMAT_VERSION, "fields": FIELDS, **asdict(header)}
        text = json.dumps(head, sort_keys=True, separators=(",", ":"))
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 (closed by close)
        try:
            self._put(text)
        except OSError:
            self._file.close()
            raise

    def on_start(self, now_s: float) -> None:
        """See `Sink`."""
        self._put(f'["start",{float(now_s)!r}]')

    def on_asked(self, now_s: float) -> None:
        """See `Sink`."""
        self._put(encode(now_s, Asked()))

    def on_submit(self, now_s: float, work: Work) -> None:
        """See `Sink`."""
        self._put(encode(now_s, work))

    def on_event(self, now_s: float, event: Event) -> None:
        """See `Sink`."""
        self._put(encode(now_s, event))

    def on_pooled(self, now_s: float, answers: Pooled) -> None:
        """Write what a pool of the world answered; worlds without one never call it."""
        self._put(encode(now_s, answers))

    def close(self) -> None:
        """See `Sink`. Writes a last line by which a reader knows that the journal is whole."""
        if not self._file.closed:
            try:
                self._put('["end"]')
            finally:
                self._file.close()

    def _put(self, line: str) -> None:
        write_whole(self._file, f"{line}\n".encode("ascii"))


class Journal:
    """A journal on disk. Iterating streams its records and may be done again.

    Attributes:
        path: the file.
        header: what the run was made with.
        start_s: the time that the core saw until the first event, in seconds.
        complete: whether the last full iteration found the line that `JournalWriter.close` writes; None
            before.
        torn: whether the last full iteration found, and left out, a half-written last line; None before.
    """

    def __init__(self, path: Path, header: JournalHeader, start_s: float) -> None:
        self.path = path
        self.header = header
        self.start_s = start_s
        self.complete: bool | None = None
        self.torn: bool | None = None

    def __iter__(self) -> Iterator[Record]:
        self.complete = self.torn = None
        ended = torn = False
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 or line.startswith(b'["start",'):
                    continue
                if ended:
                    raise JournalError(f"{self.path}:{number}: a line after the end of the journal")
                if line.startswith(b'["end"]'):
                    ended = True
                    continue
                try:
                    record = decode(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        torn = True
                        continue
                    raise JournalError(f"{self.path}:{number}: {_first_line(error)}") from error
                yield record
        self.complete, self.torn = ended, torn


def read_journal(path: str | Path) -> Journal:
    """Open a journal: read its header now, its records when iterated.

    Raises:
        OSError: the file can't be read.
        JournalError: the header is missing, broken, or of another format or version. Iterating raises it for
            a bad line, except for a half-written last one, which `Journal.torn` reports.
    """
    path = Path(path)
    with path.open("rb") as file:
        first, second = file.readline(), file.readline()
    try:
        head = parse_json(first)
    except ValueError as error:
        raise JournalError(f"{path}:1: no journal header: {_first_line(error)}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise JournalError(f"{path}:1: not a journal of minedraft (its header has no format {FORMAT!r})")
    if head.get("version") != FORMAT_VERSION:
        raise JournalError(
            f"{path}:1: journal format version {head.get('version')!r}; this program reads {FORMAT_VERSION}"
        )
    missing = [f.name for f in fields(JournalHeader) if f.name not in head]
    if missing:
        raise JournalError(f"{path}:1: the header lacks {', '.join(missing)}")
    header = JournalHeader(**{f.name: head[f.name] for f in fields(JournalHeader)})
    return Journal(path, header, _start_of(path, second))


def _start_of(path: Path, line: bytes) -> float:
    if not line.startswith(b'["start",'):
        return 0.0
    try:
        return float(parse_json(line)[1])
    except (ValueError, TypeError, IndexError) as error:
        if not line.endswith(b"\n"):
            return 0.0  # torn: the process died at once
        raise JournalError(f"{path}:2: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def feed(journal: Journal, *sinks: Sink) -> None:
    """Tell sinks of a recorded run as a `Recorder` would have told them live; doesn't close them.

    Raises:
        JournalError: a line is bad.
    """
    for sink in sinks:
        sink.on_start(journal.start_s)
    for now_s, item in journal:
        for sink in sinks:
            if isinstance(item, VerifyWork | DraftWork):
                sink.on_submit(now_s, item)
            elif isinstance(item, Asked):
                sink.on_asked(now_s)
            elif not isinstance(item, Pooled):
                sink.on_event(now_s, item)

"""Writes a run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

The file is a JSON array of trace events, written as the run goes. It is whole JSON once closed; the format
lets readers do without the closing bracket, so a run that dies leaves a timeline that opens too. Format:
"Trace Event Format", Google, times in microseconds, here since the start of the run.

Law of this file: nothing is kept but what is in flight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from minedraft.whole_writes import write_whole
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    RequestDisplaced,
    VerifyResult,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
)

DEVICES: Final = 1  # "process" of the lanes of device groups
TARGET_LANE: Final = 1
DRAFTER_LANE: Final = 2
BATCHES: Final = 2  # "process" of the lanes of sub-batches

WRITE_BYTES: Final = 1 << 16


class _InFlight(NamedTuple):
    work: Work
    round: int
    submitted_s: float


class TraceWriter:
    """A `Sink` that writes a timeline.

    One lane per device group has a slice per work, from the device's own start to its end. One lane per
    sub-batch has its phases as the core sees them: drafting, drafted (waiting for the target), verifying.
    Counters show the requests in sub-batches. Instants mark failed works and a drafter that is lost or ready.

    Args:
        path: the file, overwritten.
        show_requests: also mark arrivals and aborts.
        num_targets: lanes of targets, where there are several.
        shares_drafter: all of them have one drafter; else each has a lane for its own.
        num_batches: of each target: batch b belongs to target b // num_batches.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        show_requests: bool = False,
        num_targets: int = 1,
        num_batches: int = 1,
        shares_drafter: bool = True,
    ) -> None:
        self._show_requests = show_requests
        self._num_targets = num_targets
        self._num_drafters = 1 if shares_drafter else num_targets
        self._num_batches = num_batches
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 (closed by close)
        self._pending: list[str] = []
        self._num_pending_bytes = 0
        self._separator = "[\n"
        self._start_s = 0.0
        self._in_flight: dict[int, _InFlight] = {}
        self._rounds: dict[int, int] = {}  # verifications submitted, per batch
        self._drafted_since_s: dict[int, float] = {}
        self._sizes: tuple[int, ...] = ()
        self._name_lanes()

    def on_start(self, now_s: float) -> None:
        """See `Sink`."""
        self._start_s = now_s

    def on_asked(self, now_s: float) -> None:
        """See `Sink`; nothing to do."""

    def on_submit(self, now_s: float, work: Work) -> None:
        """See `Sink`."""
        batch = work.batch
        if batch not in self._rounds:
            self._rounds[batch] = 0
            self._put_lane("thread_name", BATCHES, batch, f"batch {batch_name(batch)}")
        if isinstance(work, VerifyWork):
            self._rounds[batch] += 1
            since_s = self._drafted_since_s.pop(batch, now_s)
            if since_s < now_s:
                self._put_slice("drafted", BATCHES, batch, since_s, now_s)
            sizes = work.batch_sizes if self._num_targets == 1 else self._sizes_of_all(work)
            if sizes != self._sizes:
                self._put_sizes(now_s, sizes)
            number = self._rounds[batch]
        else:
            if not _only_ingests(work):
                self._drafted_since_s.pop(batch, None)
            number = self._rounds[batch] + 1
        self._in_flight[work.work_id] = _InFlight(work, number, now_s)

    def on_event(self, now_s: float, event: Event) -> None:
        """See `Sink`."""
        if isinstance(event, WorkDone):
            self._put_done(now_s, event)
        elif isinstance(event, WorkFailed):
            self._put_instant("work failed", now_s, event.message)
            self._put_failed(now_s, event.work_id)
        elif isinstance(event, DrafterLost):
            self._put_instant("drafter lost", now_s, event.message)
            for work_id, (work, _, _) in tuple(self._in_flight.items()):
                if isinstance(work, DraftWork):
                    self._put_failed(now_s, work_id)
        elif isinstance(event, DrafterReady):
            self._put_instant("drafter ready", now_s, "")
        elif isinstance(event, RequestDisplaced):
            self._put_instant("displaced", now_s, event.request_id)
        elif self._show_requests:
            self._put_request(now_s, event)

    def close(self) -> None:
        """See `Sink`. Ends the array."""
        if not self._file.closed:
            self._pending.append("\n]\n")
            try:
                self._write()
            finally:
                self._file.close()

    def _put_done(self, now_s: float, event: WorkDone) -> None:
        entry = self._in_flight.pop(event.work_id, None)
        if entry is None:  # a drafter that was lost before
            return
        work, number, submitted_s = entry
        lane = self._drafter_lane(work)
        args = f'"work":{work.work_id},"requests":{len(work.request_ids)},"new_tokens":{sum(work.num_new)}'
        if isinstance(event.result, VerifyResult):
            lane = self._target_lane(work)
            accepted, committed = sum(event.result.num_accepted), sum(event.result.num_committed)
            args += f',"drafts":{sum(work.num_draft)},"accepted":{accepted},"committed":{committed}'
        else:
            args += f',"drafts":{sum(event.result.num_drafted)}'
        self._put_slice(_title(work, number), DEVICES, lane, event.started_s, event.ended_s, args)
        self._put_phase(work, submitted_s, now_s)

    def _put_failed(self, now_s: float, work_id: int) -> None:
        """Show a work that came to nothing, from its submission to the news: no device time is known."""
        entry = self._in_flight.pop(work_id, None)
        if entry is None:
            return
        work, number, submitted_s = entry
        lane = self._target_lane(work)
        if isinstance(work, DraftWork):
            lane = self._drafter_lane(work)
        args = f'"work":{work_id},"requests":{len(work.request_ids)}'
        self._put_slice(f"{_title(work, number)} (failed)", DEVICES, lane, submitted_s, now_s, args)
        self._put_phase(work, submitted_s, now_s, " (failed)")

    def _put_phase(self, work: Work, submitted_s: float, now_s: float, how: str = "") -> None:
        """What the work was for its batch; an ingestion is nothing: the batch has its own phases meanwhile."""
        if isinstance(work, DraftWork):
            if _only_ingests(work):
                return
            self._drafted_since_s[work.batch] = now_s  # if it failed, the batch goes on without drafts
        self._put_slice(f"{_phase(work)}{how}", BATCHES, work.batch, submitted_s, now_s)

    def _put_request(self, now_s: float, event: RequestArrived | RequestAborted) -> None:
        if isinstance(event, RequestArrived):
            self._put_instant("arrival", now_s, event.request.request_id)
        else:
            self._put_instant("abort", now_s, event.request_id)

    def _sizes_of_all(self, work: VerifyWork) -> tuple[int, ...]:
        """Sizes of all targets' batches, those of other targets as of their last verification."""
        sizes = list(self._sizes) or [0] * (self._num_targets * self._num_batches)
        first = work.batch // self._num_batches * self._num_batches
        sizes[first : first + self._num_batches] = work.batch_sizes
        return tuple(sizes)

    def _put_sizes(self, now_s: float, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        ts = self._us(now_s)
        args = ",".join(f'"{batch_name(i)}":{size}' for i, size in enumerate(sizes))
        self._put(f'"ph":"C","name":"running requests","pid":{BATCHES},"ts":{ts},"args":{{"n":{sum(sizes)}}}')
        self._put(f'"ph":"C","name":"requests per batch","pid":{BATCHES},"ts":{ts},"args":{{{args}}}')

    def _put_slice(self, name: str, process: int, lane: int, start_s: float, end_s: float, args: str = "") -> None:
        start_ns, end_ns = self._ns(start_s), self._ns(end_s)
        ts, duration = _us_text(start_ns), _us_text(end_ns - start_ns)  # so that a slice ends where the next begins
        self._put(f'"ph":"X","name":"{name}","pid":{process},"tid":{lane},"ts":{ts},"dur":{duration},"args":{{{args}}}')

    def _put_instant(self, name: str, now_s: float, detail: str) -> None:
        args = json.dumps({"detail": detail})
        self._put(f'"ph":"i","s":"g","name":"{name}","pid":{DEVICES},"tid":0,"ts":{self._us(now_s)},"args":{args}')

    def _name_lanes(self) -> None:
        self._put_lane("process_name", DEVICES, 0, "device groups")
        self._put_lane("thread_name", DEVICES, TARGET_LANE, "target" if self._num_targets == 1 else "target 0")
        self._put_lane("thread_name", DEVICES, DRAFTER_LANE, "drafter" if self._num_drafters == 1 else "drafter 0")
        for number in range(1, self._num_targets):
            self._put_lane("thread_name", DEVICES, DRAFTER_LANE + number, f"target {number}")
        for number in range(1, self._num_drafters):
            lane = DRAFTER_LANE + self._num_targets - 1 + number
            self._put_lane("thread_name", DEVICES, lane, f"drafter {number}")
        self._put_lane("process_name", BATCHES, 0, "sub-batches")

    def _put_lane(self, what: str, process: int, lane: int, name: str) -> None:
        self._put(f'"ph":"M","name":"{what}","pid":{process},"tid":{lane},"args":{{"name":"{name}"}}')

    def _target_lane(self, work: Work) -> int:
        """The first target's lane lies above the drafter's, those of the others below."""
        number = 0 if self._num_targets == 1 else work.batch // self._num_batches
        return DRAFTER_LANE + number if number else TARGET_LANE

    def _drafter_lane(self, work: Work) -> int:
        """The lanes of other drafters, if there are any, lie below those of the targets."""
        number = 0 if self._num_drafters == 1 else work.batch // self._num_batches
        return DRAFTER_LANE + self._num_targets - 1 + number if number else DRAFTER_LANE

    def _us(self, time_s: float) -> str:
        """Microseconds since the start, to the nanosecond."""
        return _us_text(self._ns(time_s))

    def _ns(self, time_s: float) -> int:
        """Whole nanoseconds since the start."""
        return round((time_s - self._start_s) * 1e9)

    def _put(self, fields: str) -> None:
        """Add an event; they are written in blocks of whole ones, so that a killed run leaves no half one."""
        text = f"{self._separator}{{{fields}}}"
        self._separator = ",\n"
        self._pending.append(text)
        self._num_pending_bytes += len(text)
        if self._num_pending_bytes >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        write_whole(self._file, "".join(self._pending).encode("ascii"))
        self._pending.clear()
        self._num_pending_bytes = 0


def _us_text(time_ns: int) -> str:
    """Nanoseconds as microseconds, to the last digit (for 50 days)."""
    return f"{time_ns / 1000:.3f}"


def batch_name(index: int) -> str:
    """A, B, ... Z, then numbers."""
    return chr(ord("A") + index) if index < 26 else str(index)


def _only_ingests(work: DraftWork) -> bool:
    return not any(work.num_draft)


def _title(work: Work, number: int) -> str:
    if isinstance(work, DraftWork) and _only_ingests(work):
        return f"ingest {batch_name(work.batch)}"
    verb = "verify" if isinstance(work, VerifyWork) else "draft"
    return f"{verb} {batch_name(work.batch)} r{number}"


def _phase(work: Work) -> str:
    return "verifying" if isinstance(work, VerifyWork) else "drafting"

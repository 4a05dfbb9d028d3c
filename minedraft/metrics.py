"""Collects a run's figures from the stream at the seam, live or from a journal.

What a request went through is derived from works and events alone, so the same code serves a simulator, real
devices and a file, and the core measures nothing.

Law of this file: appending to lists is all that happens per event; arithmetic is done by numpy, on thousands
of rows at a time, so that a simulator that makes 40,000 steps a second can afford it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from minedraft.folding import Folded
from minedraft.intervals import length_s
from minedraft.journal import Journal, feed
from minedraft.metrics_table import NOBODY, Entries, Table
from minedraft.request import FinishReason, Request, RequestId, RequestOutput
from minedraft.run_data import ABORTED, COMPLETED, ERROR, OPEN, Ints, RunData
from minedraft.summary import Slo, Summary, detailed, summarize
from minedraft.work import (
    NUM_ZERO_DRAFT_CAUSES,
    DrafterLost,
    DraftResult,
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

# 1 MB of lists, which spreads numpy's fixed costs. Not Final, since tests change it in compiled builds too.
FLUSH_ROWS = 16_384


class Kept(NamedTuple):
    """How much of a run is kept.

    Attributes:
        num_requests: requests, at about 250 bytes each.
        num_gaps: gaps between the chunks of requests, at 8 bytes.
        num_works: works of a kind, at 16 bytes.
    """

    num_requests: int
    num_gaps: int
    num_works: int


MAX_KEPT: Final = Kept(100_000, 2_000_000, 1_000_000)  # 60 MB, and about as much again while it is summarised
FOLD_SHARE: Final = 8  # what is kept of a longer run may grow by one in so many of these before it is folded again

NAN: Final = float("nan")
NO_STAY: Final = -1
Verifying = tuple[VerifyWork, list[int], float]  # a work, the rows of its entries, when it was submitted in seconds
NO_WORK: Final[Verifying] = (VerifyWork(-1, -1, *((),) * 10), [], 0.0)

STATUS_OF: Final = {
    FinishReason.STOP: COMPLETED,
    FinishReason.LENGTH: COMPLETED,
    FinishReason.ABORT: ABORTED,
    FinishReason.ERROR: ERROR,
}


class MetricsCollector:
    """A `Sink` that computes a `Summary`.

    A request ends when the world reports a finish reason for it, when it is aborted, or when its committed
    tokens reach `max_tokens` or the context limit. What only the core knows (it refused the request, or gave
    up on it after failed works) can be told with `on_outputs`; untold, such a request counts as unfinished,
    which is failed too.

    A run of up to `MAX_KEPT` is kept whole, besides a buffer of 3 MB. Of a longer one it folds what has ended (see
    `Folded`), so that memory grows with the requests that are there at once and no longer with those that were; its
    percentiles are within `Summary.percentile_error`.

    Args:
        num_target_devices: devices of the target's group, for per-device figures.
        num_draft_devices: devices of the drafter's group.
        slo: limits for goodput.
        max_model_len: context limit in tokens at which the core ends requests; None for none.
        max_kept: beyond any of these a run is folded; None to keep all of any run, for `detailed`.
    """

    def __init__(
        self,
        *,
        num_target_devices: int = 1,
        num_draft_devices: int = 1,
        slo: Slo | None = None,
        max_model_len: int | None = None,
        max_kept: Kept | None = MAX_KEPT,
    ) -> None:
        self._num_target_devices = num_target_devices
        self._num_draft_devices = num_draft_devices
        self._slo = slo
        self._max_model_len = max_model_len
        self._last_event_s = 0.0
        self._first_arrival_s = 0.0
        # Requests that have ended, once there are too many; rows and spans then hold the rest.
        self._folded: Folded | None = None
        self._max_kept = max_kept
        self._fold_at = Kept(sys.maxsize, sys.maxsize, sys.maxsize) if max_kept is None else max_kept
        # One row per request; row 0 is NOBODY's.
        self._row_of: dict[RequestId, int] = {}
        self._status = bytearray([ERROR])
        self._arrival_s = array("d", [0.0])
        self._end_s = array("d", [0.0])
        self._prompt_len = array("q", [0])
        self._limit = array("q", [0])
        self._stay = array("q", [NO_STAY])
        self._first_scheduled_s = array("d", [0.0])
        self._num_preemptions = 0
        # Works in flight, and when they were submitted; for a verify work, with the rows of its entries.
        self._verifying: dict[int, Verifying] = {}
        self._drafting: dict[int, float] = {}
        self._ingesting: dict[int, float] = {}  # draft works that ask for no drafts
        # Per batch, its last verify work and the rows: most works name the same requests as the one before.
        self._previous: dict[int, Verifying] = {}
        # Per work.
        self._verify_spans = array("d")
        self._draft_spans = array("d")
        self._new_verify_spans: list[float] = []  # those to come, emptied by _flush
        self._new_draft_spans: list[float] = []
        self._ingest_spans = array("d")
        self._num_drafted_tokens = 0
        self._num_failed_works = 0
        self._num_drafter_losses = 0
        self._batch_sizes: dict[tuple[int, ...], int] = {}
        # Per entry, emptied by _flush.
        self._rows: list[int] = []
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._committed: list[int] = []
        self._seen_s: list[float] = []  # per work, as are the next two
        self._num_entries: list[int] = []
        self._causes: list[int] = []  # NUM_ZERO_DRAFT_CAUSES for each work
        self._table = Table()

    def on_start(self, now_s: float) -> None:
        """See `Sink`. Nothing is measured from here: a run begins with its first arrival."""

    def on_asked(self, now_s: float) -> None:
        """See `Sink`; nothing to do."""

    def on_submit(self, now_s: float, work: Work) -> None:
        """See `Sink`."""
        if not isinstance(work, VerifyWork):
            (self._drafting if any(work.num_draft) else self._ingesting)[work.work_id] = now_s
            return
        before, rows, _ = self._previous.get(work.batch, NO_WORK)
        if before.request_ids != work.request_ids or before.incarnations != work.incarnations:
            row_of = self._row_of
            rows = [row_of[request_id] for request_id in work.request_ids]
            self._note_stays(now_s, rows, work.incarnations)
        self._verifying[work.work_id] = self._previous[work.batch] = (work, rows, now_s)

    def on_event(self, now_s: float, event: Event) -> None:
        """See `Sink`."""
        self._last_event_s = now_s
        if isinstance(event, WorkDone):
            if isinstance(event.result, VerifyResult):
                self._verified(now_s, event, event.result)
            else:
                self._drafted_done(event, event.result)
        elif isinstance(event, RequestArrived):
            self._arrived(event.request)
        elif isinstance(event, RequestAborted):
            self._leave(event.request_id, ABORTED)
        elif isinstance(event, RequestDisplaced):
            self._void_results(self._row_of.get(event.request_id))
        elif isinstance(event, WorkFailed):
            self._num_failed_works += 1
            self._verifying.pop(event.work_id, None)
            self._drafting.pop(event.work_id, None)
            self._ingesting.pop(event.work_id, None)
        elif isinstance(event, DrafterLost):
            self._num_drafter_losses += 1
            self._drafting.clear()
            self._ingesting.clear()

    def on_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Take what `Engine.step` returned for the last event. Optional, see the class."""
        for output in outputs:
            self._leave(output.request_id, STATUS_OF[output.finish_reason])

    def close(self) -> None:
        """See `Sink`; nothing to do."""

    def summarize(self) -> Summary:
        """Figures of the stream so far."""
        return summarize(
            self.run_data(),
            slo=self._slo,
            num_target_devices=self._num_target_devices,
            num_draft_devices=self._num_draft_devices,
            folded=self._folded,
        )

    def detailed(self) -> dict[str, list[Any]]:
        """Per-request lists, see `summary.detailed`, and `itls`.

        Raises:
            RuntimeError: the run was longer than `max_kept`.
        """
        if self._folded is not None:
            raise RuntimeError("requests of this run were folded; make the collector with max_kept=None")
        run = self.run_data()
        return {**detailed(run), "itls": self._table.gaps.per_request(len(run.status) + 1)[1:]}

    def device_times_s(self) -> tuple[float, float]:
        """Device time of all verify works that came back, and of all works that drafted, in seconds."""
        run = self.run_data()
        verify_s, draft_s = length_s(run.verify_spans_s), length_s(run.draft_spans_s)
        if self._folded is None:
            return verify_s, draft_s
        before = self._folded.device_times_s
        return before[0] + verify_s, before[1] + draft_s

    def run_data(self) -> RunData:
        """The stream so far as columns; of a long run, what has not been folded."""
        self._flush()
        table = self._table
        status = np.frombuffer(bytes(self._status), dtype=np.uint8).astype(np.int64)
        end_s = np.array(self._end_s)
        # The core ends a request at its limit without the world's saying so. Such a request was over before
        # any abort that came later: an abort that came in time would have kept it below its limit.
        at_limit = table.num_output >= np.array(self._limit)
        at_limit[NOBODY] = False
        by_core = at_limit & (status != COMPLETED)
        status[by_core] = COMPLETED
        end_s[by_core] = table.last_token_s[by_core]
        completed = status == COMPLETED
        return RunData(
            status=status[1:],
            arrival_s=np.array(self._arrival_s)[1:],
            prompt_len=np.array(self._prompt_len)[1:],
            output_len=table.num_output[1:],
            first_scheduled_s=np.array(self._first_scheduled_s)[1:],
            first_token_s=table.first_token_s[1:],
            last_token_s=table.last_token_s[1:],
            end_s=end_s[1:],
            gaps_s=table.gaps.of(completed),
            verify_spans_s=np.array(self._verify_spans).reshape(-1, 2),
            draft_spans_s=np.array(self._draft_spans).reshape(-1, 2),
            ingest_spans_s=np.array(self._ingest_spans).reshape(-1, 2),
            last_event_s=self._last_event_s,
            max_tokens_in_a_second=table.seconds.most,
            num_drafts=table.num_drafts,
            num_draft_tokens=table.num_draft_tokens,
            num_accepted_at=table.num_accepted_at,
            num_drafted_tokens=self._num_drafted_tokens,
            num_entries=table.num_entries,
            num_preemptions=self._num_preemptions,
            num_failed_works=self._num_failed_works,
            num_drafter_losses=self._num_drafter_losses,
            zero_draft=tuple(table.zero_draft.tolist()),
            batch_sizes=self._batch_sizes,
        )

    def _arrived(self, request: Request) -> None:
        if len(self._status) > self._fold_at.num_requests:
            self._fold()
        if len(self._status) == 1 and self._folded is None:
            self._first_arrival_s = request.arrival_s
        if request.request_id in self._row_of:
            self._previous.clear()  # a name that is used again
        self._row_of[request.request_id] = len(self._status)
        limit = request.max_tokens
        if self._max_model_len is not None:
            limit = min(limit, max(1, self._max_model_len - request.prompt_len))
        self._status.append(OPEN)
        self._arrival_s.append(request.arrival_s)
        self._end_s.append(NAN)
        self._prompt_len.append(request.prompt_len)
        self._limit.append(limit)
        self._stay.append(NO_STAY)
        self._first_scheduled_s.append(NAN)

    def _note_stays(self, now_s: float, rows: list[int], incarnations: tuple[int, ...]) -> None:
        """Look for requests that are in the running set for the first time, or again."""
        stay = self._stay
        for row, incarnation in zip(rows, incarnations):  # noqa: B905 - mypyc turns only this into a plain loop
            known = stay[row]
            if known == incarnation:
                continue
            if known == NO_STAY:
                self._first_scheduled_s[row] = now_s
            else:
                self._num_preemptions += 1
            stay[row] = incarnation

    def _leave(self, request_id: RequestId, status: int) -> None:
        """A request is over for a reason that no verify result carries."""
        row = self._row_of.get(request_id)
        if row is not None and self._end(row, status):
            self._void_results(row)

    def _void_results(self, row: int | None) -> None:
        """What a verification in flight says of a request is nobody's."""
        for work_id, (work, rows, since_s) in self._verifying.items():
            if row in rows:
                kept = [NOBODY if other == row else other for other in rows]
                self._verifying[work_id] = (work, kept, since_s)

    def _end(self, row: int, status: int) -> bool:
        if self._status[row] != OPEN:
            return False
        self._status[row] = status
        self._end_s[row] = self._last_event_s
        return True

    def _drafted_done(self, event: WorkDone, result: DraftResult) -> None:
        if self._drafting.pop(event.work_id, None) is not None:
            self._new_draft_spans += (event.started_s, event.ended_s)
            self._num_drafted_tokens += sum(result.num_drafted)
        elif self._ingesting.pop(event.work_id, None) is not None:
            self._ingest_spans.extend((event.started_s, event.ended_s))

    def _verified(self, now_s: float, event: WorkDone, result: VerifyResult) -> None:
        entry = self._verifying.pop(event.work_id, None)
        if entry is None:
            return  # never submitted: the core will say so
        work, rows, _ = entry
        self._rows += rows
        self._drafted += work.num_draft
        self._accepted += result.num_accepted
        self._committed += result.num_committed
        self._seen_s.append(now_s)
        self._num_entries.append(len(rows))
        self._causes += work.zero_draft
        self._new_verify_spans += (event.started_s, event.ended_s)
        sizes = work.batch_sizes
        self._batch_sizes[sizes] = self._batch_sizes.get(sizes, 0) + 1
        if result.finish_reasons is not None:
            for row, reason in zip(rows, result.finish_reasons):  # noqa: B905 - as above
                if reason is not None:
                    self._end(row, STATUS_OF[reason])
        if len(self._rows) >= FLUSH_ROWS:
            self._flush()
            num_works = max(map(len, (self._verify_spans, self._draft_spans, self._ingest_spans))) // 2
            if num_works > self._fold_at.num_works or len(self._table.gaps) > self._fold_at.num_gaps:
                self._fold()

    def _flush(self) -> None:
        """Fold the buffered entries into one row per request."""
        num_entries = np.array(self._num_entries, dtype=np.int64)
        self._table.add(
            Entries(
                row=np.array(self._rows, dtype=np.int64),
                num_draft=_small_ints(self._drafted),
                num_accepted=_small_ints(self._accepted),
                num_committed=_small_ints(self._committed),
                seen_s=np.repeat(np.array(self._seen_s, dtype=np.float64), num_entries),
            ),
            zero_draft=_small_ints(self._causes).reshape(-1, NUM_ZERO_DRAFT_CAUSES),
            num_rows=len(self._status),
            origin_s=self._first_arrival_s,
        )
        self._verify_spans.extend(self._new_verify_spans)
        self._draft_spans.extend(self._new_draft_spans)
        for times in (self._seen_s, self._new_verify_spans, self._new_draft_spans):
            times.clear()
        counts = (self._rows, self._drafted, self._accepted, self._committed, self._num_entries, self._causes)
        for column in counts:
            column.clear()

    def _fold(self) -> None:
        """Forget the requests that have ended, and past works, but for what they come to."""
        assert self._max_kept is not None
        if self._folded is None:
            self._folded = Folded(self._slo)
        run = self.run_data()
        self._folded.fold(run, self._settled_s())
        del self._verify_spans[:], self._draft_spans[:], self._ingest_spans[:]
        open_rows = np.flatnonzero(run.status == OPEN) + 1  # row 0 is not in the data
        self._keep(np.concatenate([[NOBODY], open_rows]))
        more = [num // FOLD_SHARE for num in self._max_kept]
        # As many requests and gaps as are left have to come before the next time, or it would cost more than it saves.
        self._fold_at = Kept(2 * len(self._status) + more[0], 2 * len(self._table.gaps) + more[1], more[2])

    def _settled_s(self) -> float:
        """No work that is in flight or is yet to be submitted began before this moment."""
        submitted_s = [since_s for _, _, since_s in self._verifying.values()]
        return min([self._last_event_s, *submitted_s, *self._drafting.values(), *self._ingesting.values()])

    def _keep(self, rows: Ints) -> None:
        """Forget all rows but these, and number them anew."""
        new_rows = np.zeros(len(self._status), dtype=np.int64)  # NOBODY's number for those that go
        new_rows[rows] = np.arange(len(rows))
        self._table.keep(rows, new_rows)
        self._status = bytearray(np.frombuffer(bytes(self._status), dtype=np.uint8)[rows].tobytes())
        self._arrival_s = array("d", np.array(self._arrival_s)[rows].tobytes())
        self._end_s = array("d", np.array(self._end_s)[rows].tobytes())
        self._prompt_len = array("q", np.array(self._prompt_len)[rows].tobytes())
        self._limit = array("q", np.array(self._limit)[rows].tobytes())
        self._stay = array("q", np.array(self._stay)[rows].tobytes())
        self._first_scheduled_s = array("d", np.array(self._first_scheduled_s)[rows].tobytes())
        new: list[int] = new_rows.tolist()
        self._row_of = {request_id: new[row] for request_id, row in self._row_of.items() if new[row]}
        for work_id, (work, old, since_s) in self._verifying.items():
            self._verifying[work_id] = (work, [new[row] for row in old], since_s)
        self._previous.clear()


def _small_ints(values: list[int]) -> Ints:
    """A column of counts; going through bytes takes a third of the time, and nearly all counts fit one."""
    try:
        return np.frombuffer(bytes(values), dtype=np.uint8).astype(np.int64)
    except ValueError:
        return np.array(values, dtype=np.int64)


def metrics_from_journal(journal: Journal, collector: MetricsCollector | None = None) -> Summary:
    """The summary of a recorded run.

    Args:
        journal: the run.
        collector: a fresh one with the wanted options; None for the defaults.

    Raises:
        JournalError: a line of the journal is bad.
    """
    collector = collector or MetricsCollector()
    feed(journal, collector)
    return collector.summarize()

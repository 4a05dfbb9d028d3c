"""How well drafting hides behind verification in a recorded run: figures of a journal's measured part.

Law of this file: a pure function of a journal. Shares and acceptance are those of `minedraft.summary`; added are the
step time against the longer of the two stages, and how long accepted tokens take to get to the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minedraft.codec import Asked, Pooled, Record
from minedraft.journal import Sink, read_journal
from minedraft.metrics import MetricsCollector
from minedraft.work import DraftWork, RequestArrived, VerifyResult, VerifyWork, WorkDone


@dataclass(frozen=True, slots=True)
class Overlap:
    """Figures of one run.

    Attributes:
        hidden: seconds of drafting while the target verified / seconds of drafting.
        busy: share of the time with a request between its first and last token in which the target was verifying.
        step_ratio: mean time from one verification's start to the next one's / the longer of the mean verification
            and the mean drafting, over full decoding steps.
        step_ms: that mean time, milliseconds.
        verify_ms: mean verification of the same steps, milliseconds.
        draft_ms: mean drafting of the run, milliseconds.
        acceptance_length: 1 + accepted tokens per draft.
        batch: mean entries of a verification.
        rounds: verifications.
        feedback_ms: per verification that found the drafter free: from the model's output to the drafter's start of
            the job that carries the accepted tokens, milliseconds.
        num_late: verifications after which no job went out at once, since the drafter was busy with the other
            sub-batch or nothing was left to draft; they have no such figure.
    """

    hidden: float
    busy: float
    step_ratio: float
    step_ms: float
    verify_ms: float
    draft_ms: float
    acceptance_length: float
    batch: float
    rounds: int
    feedback_ms: list[float]
    num_late: int


def read_overlap(path: Path, prefix: str, num_draft_devices: int = 1) -> Overlap:
    """The figures of the requests whose ids begin with `prefix`; what was recorded before the first one is left out."""
    records = measured(read_journal(path), prefix)
    metrics, steps, feedback = MetricsCollector(num_draft_devices=num_draft_devices), Steps(), Feedback()
    for sink in (metrics, steps, feedback):
        tell(sink, records)
    summary = metrics.summarize()
    longer_ms = max(steps.verify_ms, summary.mean_draft_ms)
    return Overlap(
        hidden=summary.overlapped_draft_share,
        busy=summary.decode_verify_share,
        step_ratio=steps.step_ms / longer_ms if longer_ms else 0.0,
        step_ms=steps.step_ms,
        verify_ms=steps.verify_ms,
        draft_ms=summary.mean_draft_ms,
        acceptance_length=summary.spec_decode_acceptance_length,
        batch=summary.mean_batch_size,
        rounds=summary.rounds,
        feedback_ms=[1000.0 * seconds for seconds in feedback.found_s],
        num_late=feedback.num_late,
    )


def measured(records: Iterable[Record], prefix: str) -> list[Record]:
    """Records from the first arrival of a measured request on. Whoever came before must have ended by then."""
    kept: list[Record] = []
    for record in records:
        item = record.item
        if kept or (isinstance(item, RequestArrived) and item.request.request_id.startswith(prefix)):
            kept.append(record)
    return kept


def tell(sink: Sink, records: list[Record]) -> None:
    """What `minedraft.journal.feed` does, for a part of a journal."""
    sink.on_start(records[0].now_s if records else 0.0)
    for now_s, item in records:
        if isinstance(item, VerifyWork | DraftWork):
            sink.on_submit(now_s, item)
        elif isinstance(item, Asked):
            sink.on_asked(now_s)
        elif not isinstance(item, Pooled):
            sink.on_event(now_s, item)


class Watch:
    """A `Sink` that keeps the works in flight."""

    def __init__(self) -> None:
        self.in_flight: dict[int, VerifyWork | DraftWork] = {}

    def on_start(self, now_s: float) -> None: ...

    def on_asked(self, now_s: float) -> None: ...

    def close(self) -> None: ...

    def on_submit(self, now_s: float, work: VerifyWork | DraftWork) -> None:
        self.in_flight[work.work_id] = work

    def on_event(self, now_s: float, event: object) -> None:
        if isinstance(event, WorkDone) and (work := self.in_flight.pop(event.work_id, None)) is not None:
            self.done(work, event)

    def done(self, work: VerifyWork | DraftWork, event: WorkDone) -> None:
        raise NotImplementedError


class Steps(Watch):
    """Times of full decoding steps: every entry yields tokens and carries drafts, in this step and in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.verify_s: list[float] = []
        self.step_s: list[float] = []
        self._previous: WorkDone | None = None

    def done(self, work: VerifyWork | DraftWork, event: WorkDone) -> None:
        if not isinstance(work, VerifyWork):
            return
        full = all(work.is_last) and all(work.num_draft)
        if full and self._previous is not None:
            self.step_s.append(event.started_s - self._previous.started_s)
            self.verify_s.append(self._previous.ended_s - self._previous.started_s)
        self._previous = event if full else None

    @property
    def verify_ms(self) -> float:
        return 1000.0 * float(np.mean(self.verify_s)) if self.verify_s else 0.0

    @property
    def step_ms(self) -> float:
        return 1000.0 * float(np.mean(self.step_s)) if self.step_s else 0.0


class Feedback(Watch):
    """From the end of a verification to the moment at which the drafter has its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.found_s: list[float] = []
        self.num_late = 0
        self._verified_s: dict[int, float] = {}  # by sub-batch: when its last verification ended
        self._is_fresh: dict[int, bool] = {}  # by sub-batch: whether the core hasn't been asked twice since
        self._since_s: dict[int, float] = {}  # by draft work

    def on_asked(self, now_s: float) -> None:
        for batch, fresh in self._is_fresh.items():
            if not fresh:
                del self._verified_s[batch]
                self.num_late += 1
        self._is_fresh = dict.fromkeys(self._verified_s, False)

    def on_submit(self, now_s: float, work: VerifyWork | DraftWork) -> None:
        super().on_submit(now_s, work)
        if not isinstance(work, DraftWork) or not any(work.num_draft):
            return
        if (ended_s := self._verified_s.pop(work.batch, None)) is not None:
            self._since_s[work.work_id] = ended_s
            del self._is_fresh[work.batch]

    def done(self, work: VerifyWork | DraftWork, event: WorkDone) -> None:
        if isinstance(event.result, VerifyResult):
            self._verified_s[work.batch] = event.ended_s
            self._is_fresh[work.batch] = True
        elif work.work_id in self._since_s:
            self.found_s.append(event.started_s - self._since_s.pop(work.work_id))

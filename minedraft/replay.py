"""Run a recorded list of events through a fresh core and compare its decisions with the recorded ones (E7).

This is how a run on real devices is proved on a CPU: the core gets exactly the events and times that it got
there, and must submit exactly the same works.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from minedraft.codec import Asked, Pooled, Record
from minedraft.journal import Journal, JournalHeader
from minedraft.kv_cache import SharedPool
from minedraft.request import RequestId
from minedraft.scheduler import Scheduler
from minedraft.work import DraftWork, Event, VerifyWork, Work


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that a replay took otherwise.

    Attributes:
        decision: its number, from 0.
        num_events: events that came before it.
        now_s: time of the decision, in seconds on the recorded clock.
        recorded: what was decided then; None if nothing.
        replayed: what is decided now; None if nothing.
    """

    decision: int
    num_events: int
    now_s: float
    recorded: Work | None
    replayed: Work | None

    def __str__(self) -> str:
        where = f"decision {self.decision} after {self.num_events} events, at {self.now_s!r} s"
        if self.recorded is None or self.replayed is None or type(self.recorded) is not type(self.replayed):
            return f"{where}: recorded {_kind(self.recorded)}, replayed {_kind(self.replayed)}"
        parts = [
            f"{name} was {then!r}, is {now!r}"
            for name, then, now in zip(self.recorded._fields, self.recorded, self.replayed, strict=True)
            if then != now
        ]
        return f"{where}: {_kind(self.recorded)}: {'; '.join(parts)}"


def _kind(work: Work | None) -> str:
    return "nothing" if work is None else f"{type(work).__name__} {work.work_id} of batch {work.batch}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found.

    Attributes:
        num_events: events fed to the core.
        num_decisions: works compared.
        first_difference: where the replay left the recorded run and stopped; None if they agree to the end.
    """

    num_events: int
    num_decisions: int
    first_difference: Difference | None


class ReplayBackend:
    """A `Backend` that feeds recorded events at their recorded times and keeps what is submitted.

    Attributes:
        submitted: every work that the core decided on.
    """

    def __init__(self, records: Iterable[Record], start_s: float = 0.0) -> None:
        self.submitted: list[Work] = []
        self._records = iter(records)
        self._now_s = start_s
        self._next = next(self._records, None)

    def now(self) -> float:
        """Recorded time of the last event, in seconds."""
        return self._now_s

    def submit(self, work: Work) -> None:
        """Keep the decision."""
        self.submitted.append(work)

    def next_event(self) -> Event | None:
        """The next recorded event; recorded works and marks between events are passed over."""
        while (record := self._next) is not None:
            self._next = next(self._records, None)
            item = record.item
            if not isinstance(item, VerifyWork | DraftWork | Asked | Pooled):
                self._now_s = record.now_s
                return item
        return None

    def ready(self) -> bool:
        """Whether the recorded core saw another event before it was asked for work."""
        return self._next is not None and not isinstance(self._next.item, VerifyWork | DraftWork | Asked | Pooled)


class RecordedAnswers:
    """The `PoolAnswers` of a recorded run, one call of the core at a time."""

    def __init__(self) -> None:
        self.load(None)

    def load(self, answers: Pooled | None) -> None:
        """Answer as the pool did during one call; None if it said nothing but what the core's books say."""
        self._free = None if answers is None else answers.num_free
        self._hits: defaultdict[RequestId, deque[tuple[int, int]]] = defaultdict(deque)
        self._freed: defaultdict[RequestId, deque[int]] = defaultdict(deque)
        for owner, tokens, blocks in () if answers is None else answers.hits:
            self._hits[owner].append((tokens, blocks))
        for owner, num_blocks in () if answers is None else answers.freed:
            self._freed[owner].append(num_blocks)

    def num_free_blocks(self, accounted: int) -> int:
        """See `PoolAnswers`."""
        return accounted if self._free is None else self._free

    def prefix_hit(self, owner: RequestId) -> tuple[int, int]:
        """See `PoolAnswers`."""
        return self._hits[owner].popleft() if self._hits[owner] else (0, 0)

    def num_freed_blocks(self, owner: RequestId, held: int) -> int:
        """See `PoolAnswers`."""
        return self._freed[owner].popleft() if self._freed[owner] else held


def recorded_pool(header: JournalHeader) -> SharedPool | None:
    """The target pool to build a recorded run's core with; None if the run's world left the books to the core.

    Raises:
        KeyError: the header holds no scheduler configuration.
    """
    if not header.extra.get("shared_pool"):
        return None
    return SharedPool(header.scheduler["num_target_blocks"], header.scheduler["block_size"], RecordedAnswers())


class _Replay:
    """One pass over a journal."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        pool = scheduler.state.target_pool
        self._pool = pool if isinstance(pool, SharedPool) else None
        self.num_events = 0
        self.num_decisions = 0
        self.difference: Difference | None = None
        self._decided: deque[Work] = deque()
        self._now_s = 0.0

    def take(self, record: Record, answers: Pooled | None) -> bool:
        """Follow one record, with the pool's answers to it; False once the replay has left the recorded run."""
        now_s, item = record
        assert not isinstance(item, Pooled)
        if isinstance(item, VerifyWork | DraftWork):
            return self._compare(item, self._decided.popleft() if self._decided else None)
        if self._decided:
            return self._compare(None, self._decided[0])
        self._now_s = now_s
        if self._pool is not None and isinstance(self._pool.answers, RecordedAnswers):
            self._pool.answers.load(answers)
            self._pool.sync()
        if isinstance(item, Asked):
            self._decided.extend(self.scheduler.schedule(now_s))
        else:
            self.num_events += 1
            self.scheduler.update(item, now_s)
        return True

    def _compare(self, then: Work | None, now: Work | None) -> bool:
        if then != now or type(then) is not type(now):
            self.difference = Difference(self.num_decisions, self.num_events, self._now_s, then, now)
            return False
        self.num_decisions += 1
        return True


def replay(journal: Journal, scheduler: Scheduler) -> ReplayReport:
    """Feed a journal's events to a fresh scheduler and compare every decision.

    The scheduler is asked for work exactly where the recorded one was, so this serves worlds that own their loop too.
    Decisions behind the last record are not compared: a run that was killed may have lost them.

    Args:
        journal: the recorded run.
        scheduler: built as the journal's header says (its target pool by `recorded_pool`), and not used before.

    Raises:
        JournalError: a line of the journal is bad.
        WorldError: the recorded world broke the contract of the seam.
    """
    run = _Replay(scheduler)
    for record, answers in _with_answers(journal):
        if not run.take(record, answers):
            break
    return ReplayReport(run.num_events, run.num_decisions, run.difference)


def _with_answers(records: Iterable[Record]) -> Iterator[tuple[Record, Pooled | None]]:
    """Records with what the pool said to them, which is known, and so written, only after the call."""
    held: Record | None = None
    for record in records:
        if isinstance(record.item, Pooled):
            if held is not None:
                yield held, record.item
            held = None
            continue
        if held is not None:
            yield held, None
        held = record
    if held is not None:
        yield held, None

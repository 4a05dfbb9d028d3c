"""Runs a core in a world to its end with everybody watching, and keeps what was done if it fails (`drive`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from minedraft.backend import Backend
from minedraft.commands.errors import CommandError, InterruptedRunError, unusable_file
from minedraft.commands.progress import ProgressBar
from minedraft.engine import Engine
from minedraft.journal import JournalHeader, JournalWriter, Recorder, Sink
from minedraft.metrics import MetricsCollector
from minedraft.policy import PolicyError
from minedraft.request import FinishReason, RequestOutput
from minedraft.scheduler import Scheduler
from minedraft.summary import Summary
from minedraft.trace import TraceWriter
from minedraft.work import WorldError


class Recordings(NamedTuple):
    """Files to write while a run goes on; None for those that nobody wants."""

    journal: str | None = None
    trace: str | None = None


NO_RECORDINGS: Final = Recordings()


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        summary: figures, of what was done until the failure if there was one.
        failure: why the run stopped early; None if it went to its end.
        num_refused: requests that the core refused or gave up on.
        detail: why the first of those was.
        replicas: figures of each target, where several share a drafter.
        unwritten: why a file could not be written to its end; None if all were. The figures don't suffer.
    """

    summary: Summary
    failure: CommandError | None = None
    num_refused: int = 0
    detail: str = ""
    replicas: tuple[Summary, ...] = ()
    unwritten: CommandError | None = None

    @property
    def error(self) -> CommandError | None:
        """Why the command fails: the run did, or nobody got anything, or a file is not whole."""
        if self.failure is None and self.num_refused and not self.summary.completed:
            return CommandError(f"no request could be served: {self.detail}")
        return self.failure or self.unwritten


def drive(
    scheduler: Scheduler,
    backend: Backend,
    collector: MetricsCollector,
    *,
    header: JournalHeader,
    recordings: Recordings = NO_RECORDINGS,
    label: str | None = "running",
    total: int | None = None,
    note_ended: Callable[[str], None] | None = None,
    world_errors: tuple[type[Exception], ...] = (),
) -> Outcome:
    """Run to the end.

    Args:
        scheduler: fresh.
        backend: the world.
        collector: fresh; it is told everything.
        header: of the journal.
        recordings: what else to write.
        label: for the progress bar; None for none.
        total: number of requests, if known.
        note_ended: told the id of every request that ends.
        world_errors: exceptions of this world that are the user's business, one line each.

    Raises:
        CommandError: a file can't be opened; nothing has run.
    """
    outcome = Outcome(collector.summarize())
    expected: tuple[type[Exception], ...] = (WorldError, *world_errors)
    with closing_files(outcome), ExitStack() as stack:
        recorder = stack.enter_context(Recorder(backend, collector, *_open(recordings, header, stack)))
        bar = stack.enter_context(ProgressBar(label, total))
        watch(Engine(scheduler, recorder), [collector], outcome, bar, header, note_ended, expected)
    outcome.summary = collector.summarize()
    return outcome


@contextmanager
def closing_files(outcome: Outcome) -> Iterator[None]:
    """Keep in the outcome that a file could not be written to its end: the figures are there all the same."""
    try:
        yield
    except OSError as error:
        outcome.unwritten = unusable_file(error)


class Steps(Protocol):
    """Something that runs in steps, as `Engine` does."""

    def step(self) -> list[RequestOutput] | None:
        """See `Engine.step`."""
        ...


def watch(
    engine: Steps,
    collectors: Sequence[MetricsCollector],
    outcome: Outcome,
    bar: ProgressBar,
    header: JournalHeader,
    note_ended: Callable[[str], None] | None,
    expected: tuple[type[Exception], ...],
) -> None:
    """Run to the end, or until it fails, which is kept in the outcome; see `drive` for the arguments."""
    try:
        while (ended := engine.step()) is not None:
            if ended:
                bar.num_done += len(ended)
                for collector in collectors:
                    collector.on_outputs(ended)
                _note(outcome, ended, note_ended)
    except KeyboardInterrupt:
        outcome.failure = InterruptedRunError()
    except PolicyError as error:
        outcome.failure = CommandError(f"{error}{_whose(error, header)}")
    except expected as error:
        outcome.failure = CommandError(str(error))
    except OSError as error:
        outcome.failure = unusable_file(error)


def _whose(error: PolicyError, header: JournalHeader) -> str:
    """Which policy it was, and what to do."""
    spec = header.policies.get(error.slot)
    return "" if spec is None else f"; correct {spec['name']!r}, or choose another {error.slot} policy"


def _open(recordings: Recordings, header: JournalHeader, stack: ExitStack) -> list[Sink]:
    sinks: list[Sink] = []
    try:
        if recordings.journal is not None:
            sinks.append(JournalWriter(recordings.journal, header))
            stack.callback(sinks[-1].close)
        if recordings.trace is not None:
            sinks.append(TraceWriter(recordings.trace))
            stack.callback(sinks[-1].close)
    except OSError as error:
        raise unusable_file(error) from error
    return sinks


def _note(outcome: Outcome, ended: Iterable[RequestOutput], note_ended: Callable[[str], None] | None) -> None:
    for output in ended:
        if note_ended is not None:
            note_ended(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            outcome.num_refused += 1
            outcome.detail = outcome.detail or f"request {output.request_id!r}: {output.detail}"

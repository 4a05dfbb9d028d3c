"""A simulated run of several targets that share a drafter, with figures of all and of each (`simulate_star`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from minedraft.commands.drive import Outcome, Recordings, closing_files, watch
from minedraft.commands.errors import CommandError, unusable_file
from minedraft.commands.progress import ProgressBar
from minedraft.config import RunConfig
from minedraft.engine import Engine
from minedraft.journal import JournalHeader, JournalWriter, Recorder, Sink
from minedraft.merged import MergedSink
from minedraft.metrics import MetricsCollector
from minedraft.scheduler import Scheduler
from minedraft.summary import Summary
from minedraft.trace import TraceWriter
from minedraft.work import WorldError


def simulate_star(
    config: RunConfig,
    collector: MetricsCollector,
    recordings: Recordings,
    label: str | None,
    *,
    header: JournalHeader,
) -> Outcome:
    """One simulated run of `config.devices.num_replicas` replicas.

    Args:
        config: of the run.
        collector: fresh; is told of all replicas as if they were one.
        recordings: one journal per replica is written, see `journal_paths`, and one timeline of all.
        label: for the progress bar; None for none.
        header: of the journals.

    Raises:
        CommandError: the first request is bad, or a file can't be opened.
    """
    from minedraft.sim.star import StarEngine
    from minedraft.sim.traces import TraceError
    from minedraft.sim.workload import WorkloadError

    try:
        star = config.build_star()
    except (TraceError, WorkloadError) as error:
        raise CommandError(str(error)) from error
    num_replicas = len(star.replicas)
    parts = [_collector_of_one(config) for _ in range(num_replicas)]
    outcome = Outcome(collector.summarize())
    expected = (WorldError, TraceError, WorkloadError)
    with closing_files(outcome), ExitStack() as stack:
        sinks = _open(config, recordings, header, parts, collector, stack)
        engines = [
            Engine(Scheduler(config.scheduler_config(), config.build_policies()), Recorder(replica, *watching))
            for replica, watching in zip(star.replicas, sinks, strict=True)
        ]
        bar = stack.enter_context(ProgressBar(label, config.workload.num_requests))
        watch(StarEngine(star, engines), [collector, *parts], outcome, bar, header, star.note_ended, expected)
    outcome.replicas = tuple([part.summarize() for part in parts])
    outcome.summary = _combined(collector, parts, outcome.replicas)
    return outcome


def journal_paths(path: str, num_replicas: int) -> list[str]:
    """Where each replica's journal goes: run.0.jsonl, run.1.jsonl and so on for run.jsonl."""
    whole = Path(path)
    return [str(whole.with_name(f"{whole.stem}.{number}{whole.suffix}")) for number in range(num_replicas)]


def journals_text(path: str, num_replicas: int) -> str:
    """Which journals a star wrote, in one line."""
    names = journal_paths(path, num_replicas)
    return f"one journal per target: {names[0]} to {names[-1]}"


def _collector_of_one(config: RunConfig) -> MetricsCollector:
    """For one replica; the shared drafter's devices count in full, so its figures per device don't add up."""
    from minedraft.commands.simulate import new_collector

    devices = config.devices.model_copy(update={"num_replicas": 1})
    return new_collector(config.model_copy(update={"devices": devices}))


def _open(
    config: RunConfig,
    recordings: Recordings,
    header: JournalHeader,
    parts: Sequence[MetricsCollector],
    collector: MetricsCollector,
    stack: ExitStack,
) -> list[list[Sink]]:
    """By replica, all that watch it."""
    num_replicas, num_batches = len(parts), config.scheduler_config().num_batches
    of_all: list[Sink] = [collector]
    watching: list[list[Sink]] = [[part] for part in parts]
    try:
        if recordings.trace is not None:
            trace = TraceWriter(
                recordings.trace,
                num_targets=num_replicas,
                num_batches=num_batches,
                shares_drafter=config.mode == "ar" or config.num_draft_devices > 0,
            )
            stack.callback(trace.close)
            of_all.append(trace)
        if recordings.journal is not None:
            for sinks, path in zip(watching, journal_paths(recordings.journal, num_replicas), strict=True):
                sinks.append(JournalWriter(path, header))
                stack.callback(sinks[-1].close)
    except OSError as error:
        raise unusable_file(error) from error
    for number, sinks in enumerate(watching):
        sinks.append(MergedSink(number, num_replicas, num_batches, *of_all))
    return watching


def _combined(collector: MetricsCollector, parts: Sequence[MetricsCollector], each: Sequence[Summary]) -> Summary:
    """Figures of all, in which a target's device time is set against its own, not against anybody's.

    Utilisation of the targets is their mean; overlap is that of a replica's drafting with its own target's
    verification. Running requests are those of all replicas: the sum of each one's mean over its own verifications,
    and of each one's most. What else is per verification (its requests, imbalance) is one replica's, as it stands.
    """
    whole = collector.summarize()
    busy_s, _ = collector.device_times_s()
    drafting_s = [part.device_times_s()[1] for part in parts]
    hidden_s = sum(s * summary.overlapped_draft_share for s, summary in zip(drafting_s, each, strict=True))
    total_s = whole.duration * len(parts)
    return dataclasses.replace(
        whole,
        target_utilisation=min(1.0, busy_s / total_s) if total_s else 0.0,
        overlapped_draft_share=hidden_s / sum(drafting_s) if any(drafting_s) else 0.0,
        decode_verify_share=sum(summary.decode_verify_share for summary in each) / len(each),
        mean_running_requests=sum(summary.mean_running_requests for summary in each),
        max_running_requests=sum(summary.max_running_requests for summary in each),
    )

"""`minedraft simulate`: one run in the simulated world."""

from __future__ import annotations

from collections.abc import Sequence

import typer

import minedraft
from minedraft.commands.drive import NO_RECORDINGS, Outcome, Recordings, drive
from minedraft.commands.errors import CommandError
from minedraft.commands.outputs import check_outputs, files_read
from minedraft.commands.report import Column, as_json, check_writable, print_report, write_json
from minedraft.config import RunConfig, load_config
from minedraft.config_tree import Override
from minedraft.journal import JournalHeader
from minedraft.metrics import MAX_KEPT, MetricsCollector
from minedraft.scheduler import Scheduler
from minedraft.summary import Slo


def simulate_command(
    path: str | None, overrides: Sequence[Override], json_path: str | None, recordings: Recordings, detailed: bool
) -> None:
    """Run, print the table, write the files.

    Raises:
        ConfigError: the configuration can't be used.
        CommandError: the run failed; what was done by then has been written.
    """
    check_writable(json_path)
    config = load_config(path, overrides)
    check_outputs({"--json": json_path, **_recorded(recordings, config)}, files_read(path, config.to_dict()))
    collector = new_collector(config, keep_all=detailed)
    outcome = simulate(config, collector, recordings)
    column = Column(config.mode, config.mode, config.scheduler_config(), outcome, config.closed_loop)
    details = collector.detailed() if detailed else {}
    if json_path != "-":
        print_report([column], title=f"Simulated run: {config.mode}, seed {config.seed}")
    if json_path is not None:
        write_json(json_path, {**as_json(column, "simulate", config.seed), **details, "config": config.to_dict()})
    if recordings.journal is not None and config.devices.num_replicas > 1:
        from minedraft.commands.simulate_star import journals_text

        typer.echo(journals_text(recordings.journal, config.devices.num_replicas), err=True)
    if outcome.error is not None:
        raise outcome.error


def _recorded(recordings: Recordings, config: RunConfig) -> dict[str, str | None]:
    """By option, the files that a run records to; replicas have a journal each."""
    journal, num_replicas = recordings.journal, config.devices.num_replicas
    if journal is None or num_replicas == 1:
        return {"--journal": journal, "--trace": recordings.trace}
    from minedraft.commands.simulate_star import journal_paths

    journals = {f"--journal (of replica {i})": file for i, file in enumerate(journal_paths(journal, num_replicas))}
    return {**journals, "--trace": recordings.trace}


def new_collector(config: RunConfig, *, keep_all: bool = False) -> MetricsCollector:
    """A collector for a run with this configuration; `keep_all` for the lists per request of a run of any length."""
    return MetricsCollector(
        num_target_devices=config.num_target_devices,
        num_draft_devices=config.num_draft_devices,
        slo=None if config.slo is None else Slo(**config.slo.arguments()),
        max_model_len=config.scheduler_config().model_len,
        max_kept=None if keep_all else MAX_KEPT,
    )


def simulate(
    config: RunConfig,
    collector: MetricsCollector,
    recordings: Recordings = NO_RECORDINGS,
    label: str | None = "simulating",
) -> Outcome:
    """One simulated run.

    Raises:
        CommandError: the first request is bad, or a file can't be opened.
    """
    from minedraft.sim.traces import TraceError
    from minedraft.sim.workload import WorkloadError

    if config.devices.num_replicas > 1:
        from minedraft.commands.simulate_star import simulate_star

        return simulate_star(config, collector, recordings, label, header=journal_header(config))
    try:
        backend = config.build_world()
    except (TraceError, WorkloadError) as error:
        raise CommandError(str(error)) from error
    return drive(
        Scheduler(config.scheduler_config(), config.build_policies()),
        backend,
        collector,
        header=journal_header(config),
        recordings=recordings,
        label=label,
        total=config.workload.num_requests,
        note_ended=backend.note_ended,
        world_errors=(TraceError, WorkloadError),
    )


def journal_header(config: RunConfig) -> JournalHeader:
    """All that is needed to build the core of this run again, and its world."""
    return JournalHeader(
        minedraft=minedraft.__version__,
        scheduler=config.scheduler_config().given(),
        policies=config.policy_specs(),
        seed=config.seed,
        extra={"world": "sim", "config": config.to_dict()},
    )

"""`minedraft replay`: feed a recorded run to a fresh core and compare every decision."""

from __future__ import annotations

import typer

from minedraft.commands.errors import FAILED_CHECK, CommandError, unusable_file
from minedraft.config import RunConfig, build_policies
from minedraft.config_messages import FieldError
from minedraft.config_tables import PoliciesTable
from minedraft.journal import Journal, JournalError, JournalHeader, read_journal
from minedraft.policy import PolicyError
from minedraft.replay import recorded_pool, replay
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig
from minedraft.work import WorldError


def replay_command(path: str) -> None:
    """Replay and say what came of it.

    Raises:
        CommandError: the journal can't be used, is cut off before its first decision, or a decision differs.
    """
    try:
        journal = read_journal(path)
        report = replay(journal, _scheduler(path, journal.header))
    except OSError as error:
        raise unusable_file(error) from error
    except (JournalError, PolicyError, WorldError) as error:
        raise CommandError(str(error) if isinstance(error, JournalError) else f"{path}: {error}") from error
    counts = f"{report.num_decisions:,} decisions over {report.num_events:,} events"
    if report.first_difference is not None:
        raise CommandError(f"{path}: the replay differs after {counts}: {report.first_difference}", FAILED_CHECK)
    if not report.num_decisions and not journal.complete:
        raise CommandError(
            f"{path}: nothing to compare: {counts}, and the journal has no end; record it again, or take a longer part",
            FAILED_CHECK,
        )
    typer.echo(f"identical: {counts}{_caveat(journal)}")


def _scheduler(path: str, header: JournalHeader) -> Scheduler:
    """The core of the recorded run, from the journal's header."""
    if not header.scheduler:
        raise CommandError(f"{path}: its header holds no scheduler configuration; record it with a newer program")
    try:
        table = PoliciesTable.model_validate(dict(header.policies))
        specs = RunConfig(policies=table).policy_specs()
        return Scheduler(SchedulerConfig(**header.scheduler), build_policies(specs), recorded_pool(header))
    except FieldError as error:
        raise CommandError(f"{path}: header: {error}") from error
    except (TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise CommandError(f"{path}: header: {first}; was it written by another version of minedraft?") from error


def _caveat(journal: Journal) -> str:
    if journal.complete:
        return ""
    return "; the journal has no end: its run was killed or its disk full, and what it had recorded agrees"

"""Carries out many independent simulated runs, on one core or several (`carry_out`).

Results come back in the order of the tasks and are the same whatever the number of jobs: a run is a function of its
configuration alone.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from minedraft.commands.drive import Outcome
from minedraft.commands.errors import CommandError, InterruptedRunError
from minedraft.commands.progress import ProgressBar
from minedraft.commands.simulate import new_collector, simulate
from minedraft.config import RunConfig

T = TypeVar("T")
R = TypeVar("R")


def run_once(config: RunConfig) -> Outcome:
    """One run, without a progress bar of its own; interrupting it raises.

    Raises:
        CommandError: the run can't begin, or the user interrupted it.
    """
    outcome = simulate(config, new_collector(config), label=None)
    if isinstance(outcome.failure, InterruptedRunError):
        raise outcome.failure
    return outcome


def carry_out(
    work: Callable[[T], R], tasks: Sequence[T], jobs: int, label: str
) -> tuple[list[R | None], CommandError | None]:
    """Do all tasks; Ctrl-C keeps those that are done.

    Args:
        work: does one; with several jobs a function of a module, since it goes to other processes by name.
        tasks: begun in this order; after one that raises a `CommandError` none is kept.
        jobs: processes at work at a time; 1 works in this one.
        label: for the progress bar, which counts tasks.

    Returns:
        What came of each task, None for those that were not finished; and why some were not, or None.
    """
    found: list[R | None] = [None] * len(tasks)
    with ProgressBar(label, len(tasks)) as bar:
        try:
            if min(jobs, len(tasks)) > 1:
                _in_processes(work, tasks, min(jobs, len(tasks)), found, bar)
            else:
                for i, task in enumerate(tasks):
                    found[i] = work(task)
                    bar.num_done += 1
        except KeyboardInterrupt:
            return found, InterruptedRunError()
        except CommandError as error:
            return found, error
    return found, None


def _in_processes(
    work: Callable[[T], R], tasks: Sequence[T], jobs: int, found: list[R | None], bar: ProgressBar
) -> None:
    # Fresh interpreters: forking one that has threads (a progress bar's, numpy's) may lock up.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        with _interrupts_held():
            futures = [pool.submit(work, task) for task in tasks]
        _collect(futures, found, bar)
    except BrokenProcessPool as error:
        remedy = "perhaps for want of memory; try again with a smaller --jobs"
        raise CommandError(f"a worker process died, {remedy}") from error
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(futures: Sequence[Future[R]], found: list[R | None], bar: ProgressBar) -> None:
    """Take results as they come; after a failure only those of earlier tasks, as if all were done one by one."""
    place = {future: i for i, future in enumerate(futures)}
    failed: dict[int, CommandError] = {}
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=place.__getitem__):
            if future.cancelled():
                continue
            try:
                found[place[future]] = future.result()
            except CommandError as error:
                failed[place[future]] = error
                for later in futures[place[future] + 1 :]:
                    later.cancel()
            bar.num_done += 1
    if failed:
        first = min(failed)
        found[first:] = [None] * (len(found) - first)
        raise failed[first]


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the workers are there, which never see it: they keep the mask that they began with.

    A terminal sends it to every process, but only the parent knows what to keep.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

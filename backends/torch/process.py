"""Starting, pinning and ending a worker process.

Law of this file: it must not import torch, since a child imports it before it pins itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Protocol

from minedraft.backends.torch.errors import TorchWorldError
from minedraft.backends.torch.messages import WorkerSpec

_STOP_GRACE_S: Final = 5.0  # for the work in hand to finish


class Worker(Protocol):
    """A running worker, seen from the parent."""

    @property
    def connection(self) -> Connection:
        """The parent's end of the pipe; it reads EOF once the worker is gone."""
        ...

    def end_reason(self) -> str:
        """How it ended; call it only after EOF."""
        ...

    def stop(self) -> None:
        """End it; a second call does nothing."""
        ...


class WorkerProcess:
    """A worker in a spawned process of its own."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self._process = process
        self._connection = connection

    @property
    def connection(self) -> Connection:
        """See `Worker`."""
        return self._connection

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def end_reason(self) -> str:
        """See `Worker`."""
        self._process.join(_STOP_GRACE_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def stop(self) -> None:
        """See `Worker`."""
        self._connection.close()  # an idle worker reads EOF and ends
        self._process.join(_STOP_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def launch_process(spec: WorkerSpec) -> WorkerProcess:
    """Start a worker; it answers `Loaded` or `LoadFailed` on its pipe."""
    context = multiprocessing.get_context("spawn")
    connection, childs_end = context.Pipe()
    process = context.Process(target=_child_main, args=(spec, childs_end), name=f"minedraft-{spec.role}", daemon=True)
    process.start()
    childs_end.close()  # or the child's death would not show as EOF
    return WorkerProcess(process, connection)


def _child_main(spec: WorkerSpec, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    core = parse_device(spec.device)
    if core is not None:
        os.sched_setaffinity(0, {core})
        os.environ["OMP_NUM_THREADS"] = "1"
    if Path(spec.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
    # Only now: torch sizes its thread pools when it is imported.
    import torch

    from minedraft.backends.torch.worker import serve

    if core is not None:
        torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        serve(spec, connection)


def parse_device(name: str) -> int | None:
    """Check a device string.

    Args:
        name: `cpu` (unpinned), `cpu:N` (core N), `cuda` or `cuda:N`.

    Returns:
        The core to pin to, if any.

    Raises:
        TorchWorldError: it is none of these, or this process may not run on that core.
    """
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not index.isdecimal()):
        raise TorchWorldError(f"device {name!r} is unknown; use cpu, cpu:N, cuda or cuda:N")
    if kind == "cuda" or not colon:
        return None
    cores = sorted(os.sched_getaffinity(0))
    if int(index) not in cores:
        raise TorchWorldError(f"device {name!r}: this process may run on cores {cores} only; choose one of them")
    return int(index)

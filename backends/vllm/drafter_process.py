"""One life of the drafter's process, with the two threads that talk to it.

Law of this file: `send` never blocks; `end` does, and leaves nobody of the process's group behind. The group is the
drafter and what it has started (workers of its tensor parallelism, compilers).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.messages import (
    DraftJob,
    LoadFailed,
    Message,
    Order,
    Ping,
    Pong,
    Reset,
    Sleep,
    Stop,
    Wake,
    pack,
    receive,
)
from minedraft.backends.vllm.settings import DrafterSettings

_MAX_ORDERS: Final = 8  # one of each kind is more than there can be; see `messages.py`
_EXIT_S: Final = 5.0  # for a process whose socket is closed to be gone
_GROUP_EXIT_S: Final = 3.0  # for workers to see that the drafter is gone, and to clean up
_POLL_S: Final = 0.02


class DrafterProcess:
    """Starts the process; what it says is handed to `deliver`, from a thread.

    Args:
        settings: of the process.
        spec: JSON for the drafter. It may hold secrets (`hf_token`), so it is not among the process's arguments, which
            anybody on the machine can read.
        module: Python module to run.
        deliver: called with this object and each message but `Pong`; must not block.
        wake: called once the process has nothing more to say, or is condemned.

    Attributes:
        num_heard: messages that came in.
        num_owed: answers that are due: to the start, and to every order but pings.
        num_answers: answers that came in.
        is_pinged: whether a `Pong` is due.
        verdict: why it must be ended, as far as it or its channel said so.
        is_over: whether it has nothing more to say.
    """

    def __init__(
        self,
        settings: DrafterSettings,
        spec: str,
        module: str,
        deliver: Callable[[DrafterProcess, Message], None],
        wake: Callable[[], None],
    ) -> None:
        self.num_heard = 0
        self.num_owed = 1
        self.num_answers = 0
        self.is_pinged = False
        self.verdict = ""
        self.is_over = False
        self._deliver = deliver
        self._wake = wake
        self._socket, theirs = socket.socketpair()
        self.popen = _start([sys.executable, "-m", module, str(theirs.fileno())], spec, settings, theirs)
        self._orders: queue.Queue[bytes | None] = queue.Queue(_MAX_ORDERS)
        self._senders = threading.Lock()  # the target's thread, and the watch's for pings
        self._threads = [
            threading.Thread(target=target, name=f"minedraft-drafter{target.__name__}", daemon=True)
            for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, order: Order) -> None:
        """Send an order at once, as far as the socket takes it; queue the rest. Never blocks.

        At once, because a thread that is woken to send it would wait for the interpreter's lock, which the caller keeps
        until its model runs: that would be the drafter's time.
        """
        if isinstance(order, Ping):
            self.is_pinged = True
        elif isinstance(order, DraftJob | Reset | Sleep | Wake):
            self.num_owed += 1
        with self._senders:
            rest = pack(order)
            if not self._orders.unfinished_tasks:  # else those go first, and the writing thread sees to them
                with contextlib.suppress(OSError):  # full, or it died: the writing thread finds out
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            if rest:
                try:
                    self._orders.put_nowait(rest)
                except queue.Full:
                    self.condemn("it takes no orders any more")

    def condemn(self, reason: str) -> None:
        """Have the process ended by whoever watches it."""
        self.verdict = self.verdict or reason
        self._wake()

    def end(self, grace_s: float) -> str:
        """Stop the process and its group, by force once the grace is over; returns how it ended."""
        if grace_s:
            self.send(Stop())
            self._threads[1].join(grace_s)
        reason = self._reap(_EXIT_S if self.is_over else 0.0)
        self._end_group()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads
        with contextlib.suppress(queue.Full):
            self._orders.put_nowait(None)
        for thread in self._threads:
            thread.join(_EXIT_S)
        self._socket.close()
        return reason

    def _reap(self, patience_s: float) -> str:
        try:
            code = self.popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            return "it had to be killed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _end_group(self) -> None:
        """Wait for the others to go by themselves, which frees shared memory; then don't."""
        deadline = time.monotonic() + _GROUP_EXIT_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.popen.pid, 0)
                time.sleep(_POLL_S)
            os.killpg(self.popen.pid, signal.SIGKILL)

    def _write(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._socket.sendall(order)
            except OSError:
                return  # it died: the reading thread sees EOF
            self._orders.task_done()

    def _read(self) -> None:
        try:
            while (message := receive(self._socket)) is not None:
                self.num_heard += 1
                if isinstance(message, Pong):
                    self.is_pinged = False
                elif isinstance(message, LoadFailed):
                    self.condemn(message.message)
                else:
                    self.num_answers += 1
                    self._deliver(self, message)
        except VllmWorldError as error:
            self.verdict = self.verdict or str(error)
        self.is_over = True
        self._wake()


def _start(command: list[str], spec: str, settings: DrafterSettings, theirs: socket.socket) -> subprocess.Popen[bytes]:
    # One engine core in one process, vLLM would else put it behind a process of its own; and workers that aren't
    # forked, or they would hold the socket open. The V2 model runner, a GPU's default, copies a session's whole text
    # from a list in every round; the V1 runner, which the target has to use anyway, takes it from an array.
    env = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **settings.env,
    }
    log = open(settings.log, "ab") if settings.log else None  # noqa: PTH123, SIM115
    try:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log and subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # if it died: the reading thread sees EOF
            process.stdin.write(spec.encode())
        return process
    finally:
        theirs.close()  # or the child's death would not show as EOF
        if log is not None:
            log.close()

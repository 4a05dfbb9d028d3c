"""The target's end of the drafter: its process, its socket, and what is to be thought of it.

Law of this file: nothing here blocks but `wait_ready` and `wait`. A thread reads replies into a mailbox and another
writes orders, so that a stopped drafter never stops the target. Knows nothing of vLLM or of the core.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.messages import (
    PROTOCOL_VERSION,
    Drafted,
    DraftJob,
    Hello,
    JobFailed,
    LoadFailed,
    Message,
    Order,
    Reset,
    Stop,
    pack,
    receive,
)
from minedraft.backends.vllm.settings import DrafterSettings

logger = logging.getLogger(__name__)

_STOP_GRACE_S: Final = 5.0


class Up(NamedTuple):
    """A drafter with an empty cache is there."""

    hello: Hello


class Down(NamedTuple):
    """The drafter is gone, with all it kept and with the job in hand."""

    message: str


class Late(NamedTuple):
    """A job's drafts didn't come in time; if they still come, they are dropped."""

    work_id: int
    message: str


News = Up | Down | Late | Drafted


class _Process:
    """One life of the drafter's process, with the two threads that talk to it."""

    def __init__(self, settings: DrafterSettings, spec: str, mailbox: _Mailbox) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "minedraft.backends.vllm.drafter", str(theirs.fileno()), spec]
        # One engine core in one process: vLLM would else put it behind a process of its own.
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **settings.env}
        log = open(settings.log, "ab") if settings.log else None  # noqa: PTH123, SIM115
        try:
            self.popen = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log and subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()  # or the child's death would not show as EOF
            if log is not None:
                log.close()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._mailbox = mailbox
        for target in (self._write, self._read):
            threading.Thread(target=target, name=f"minedraft-drafter{target.__name__}", daemon=True).start()

    def send(self, order: Order) -> None:
        """Queue an order; never blocks."""
        self._orders.put(order)

    def end(self, grace_s: float) -> None:
        """Stop the process, by force once the grace is over."""
        if grace_s:
            self.send(Stop())
        self._orders.put(None)
        try:
            self.popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes both threads
        self.socket.close()

    def end_reason(self) -> str:
        """How the process ended; call it after EOF."""
        try:
            code = self.popen.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _write(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self.socket.sendall(pack(order))
            except OSError:
                return  # it died: the reading thread sees EOF

    def _read(self) -> None:
        try:
            while (message := receive(self.socket)) is not None:
                self._mailbox.put(self, message)
        except VllmWorldError:
            logger.exception("the drafter's process is given up")
        self._mailbox.put(self, None)


class _Mailbox:
    """Replies that have come in, and an alarm for whoever waits for one."""

    def __init__(self) -> None:
        self._items: deque[tuple[_Process, Message | None]] = deque()
        self._alarm = threading.Event()

    def put(self, sender: _Process, message: Message | None) -> None:
        self._items.append((sender, message))
        self._alarm.set()

    def take(self) -> tuple[_Process, Message | None] | None:
        self._alarm.clear()
        return self._items.popleft() if self._items else None

    def wait(self, timeout_s: float) -> None:
        if not self._items:
            self._alarm.wait(timeout_s)


class DrafterChannel:
    """Starts the drafter, sends it jobs, and turns what happens to it into `News`.

    Args:
        settings: of the process.
        engine: vLLM engine arguments of the draft engine, complete.
        with_probs: whether jobs will ask for probabilities.
    """

    def __init__(self, settings: DrafterSettings, engine: Mapping[str, Any], with_probs: bool = False) -> None:
        self._settings = settings
        self._spec = json.dumps({"engine": dict(engine), "cpus": list(settings.cpus), "with_probs": with_probs})
        self._mailbox = _Mailbox()
        self._process: _Process | None = None
        self._ready = False
        self._job: DraftJob | None = None
        self._sent_s = 0.0
        self._late: dict[int, float] = {}  # by work id of jobs given up but not answered: when they were sent
        self._freed: list[tuple[str, int]] = []  # for the next job, since that of a job not sent must not be lost
        self._news: deque[News] = deque()
        self._num_restarts = 0
        self._restart_at_s = 0.0
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id of the drafter, None while there is none."""
        return None if self._process is None else self._process.popen.pid

    def wait_ready(self) -> Hello:
        """Wait for the first `Hello`.

        Raises:
            VllmWorldError: the draft model can't be used, or takes too long to load.
        """
        deadline = time.monotonic() + self._settings.start_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self._mailbox.wait(left)
            item = self._mailbox.take()
            if item is None:
                continue
            message = item[1]
            if isinstance(message, Hello):
                self._check(message)
                self._ready = True
                return message
            assert self._process is not None
            reason = message.message if isinstance(message, LoadFailed) else self._process.end_reason()
            self.close()
            raise VllmWorldError(f"the drafter can't start ({reason}); its output has the details")
        self.close()
        raise VllmWorldError(
            f"the drafter was not ready after {self._settings.start_timeout_s} s; raise start_timeout_s"
        )

    def _check(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self.close()
            raise VllmWorldError(f"the drafter speaks version {hello.version} of the protocol, we {PROTOCOL_VERSION}")

    def submit(self, job: DraftJob) -> None:
        """Send a job; news of it will come. The last one must be answered or given up."""
        assert self._job is None, self._job
        if self._late or self._process is None or not self._ready:
            self._freed += job.freed
            self._news.append(Late(job.work_id, "the drafter is behind"))
            return
        self._job = job._replace(freed=self._freed + job.freed)
        self._freed = []
        self._sent_s = time.monotonic()
        self._process.send(self._job)

    def poll(self) -> list[News]:
        """What has happened since the last call."""
        while (item := self._mailbox.take()) is not None:
            self._hear(*item)
        now_s = time.monotonic()
        if self._job is not None and now_s - self._sent_s > self._settings.deadline_s:
            self._late[self._job.work_id] = self._sent_s
            self._news.append(Late(self._job.work_id, f"no drafts after {self._settings.deadline_s} s"))
            self._job = None
        if self._late and now_s - min(self._late.values()) > self._settings.hang_timeout_s:
            self._lose("it hangs")
        if self._process is None and self._restart_at_s and now_s >= self._restart_at_s:
            self._start()
        news = list(self._news)
        self._news.clear()
        return news

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be news, for at most so long."""
        if self._job is not None:
            timeout_s = min(timeout_s, max(0.0, self._sent_s + self._settings.deadline_s - time.monotonic()) + 1e-3)
        if not self._news:
            self._mailbox.wait(timeout_s)

    def close(self) -> None:
        """End the drafter; a second call does nothing."""
        process, self._process = self._process, None
        self._ready = False
        self._restart_at_s = 0.0
        if process is not None:
            process.end(_STOP_GRACE_S)

    def _start(self) -> None:
        self._restart_at_s = 0.0
        self._process = _Process(self._settings, self._spec, self._mailbox)

    def _hear(self, sender: _Process, message: Message | None) -> None:
        if sender is not self._process:
            return  # from an earlier life
        if isinstance(message, Hello):
            self._ready = True
            self._news.append(Up(message))
        elif isinstance(message, Drafted):
            self._late.pop(message.work_id, None)
            if self._job is not None and message.work_id == self._job.work_id:
                self._job = None
                self._news.append(message)
        elif isinstance(message, JobFailed):
            # Its sessions and ours differ: start over with empty ones, as after a death but without reloading.
            logger.warning("drafter: %s; its sessions start over", message.message)
            self._forget(message.message)
            sender.send(Reset())
        else:
            self._lose(message.message if isinstance(message, LoadFailed) else sender.end_reason())

    def _forget(self, message: str) -> None:
        if self._ready:
            self._news.append(Down(message))
        self._ready = False
        self._job = None
        self._late.clear()
        self._freed = []

    def _lose(self, message: str) -> None:
        assert self._process is not None
        logger.warning("the drafter is lost (%s); requests go on without drafts", message)
        self._process.end(0.0)
        self._process = None
        self._forget(message)
        if self._num_restarts < self._settings.max_restarts:
            backoff_s = self._settings.restart_backoff_s * 2**self._num_restarts
            self._restart_at_s = time.monotonic() + backoff_s
            self._num_restarts += 1

"""The target's end of the drafter: jobs sent, drafts received, and what is to be thought of the drafter meanwhile.

Law of this file: nothing here blocks but `wait_ready`, `wait` and `close`. Threads read replies into a mailbox, write
orders and look after the process (`drafter_watch.py`), so a stopped drafter never stops the target. At most one job is
out; the next is sent once it is answered, in time or late. Knows nothing of vLLM or of the core.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from minedraft.backends.vllm.drafter_process import DrafterProcess
from minedraft.backends.vllm.drafter_status import DrafterStatus
from minedraft.backends.vllm.drafter_watch import DrafterWatch
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.messages import (
    PROTOCOL_VERSION,
    Asleep,
    Drafted,
    DraftJob,
    Hello,
    JobFailed,
    Message,
    Reset,
    Sleep,
    Wake,
)
from minedraft.backends.vllm.settings import DrafterSettings

logger = logging.getLogger(__name__)

_MAX_UNREAD: Final = 64  # replies that nobody fetched; a drafter that keeps to the protocol has two
_DRAFTER: Final = "minedraft.backends.vllm.drafter"


class Up(NamedTuple):
    """A drafter with an empty cache is there."""

    hello: Hello


class Down(NamedTuple):
    """The drafter is gone, with all it kept and with the job in hand.

    Attributes:
        message: why.
        is_asleep: whether that was wished for.
    """

    message: str
    is_asleep: bool = False


class Late(NamedTuple):
    """A job's drafts didn't come in time; if they still come, they are dropped."""

    work_id: int
    message: str


News = Up | Down | Late | Drafted


class _Ended(NamedTuple):
    """A process is gone."""

    message: str


class _Nap(Enum):
    """Where a drafter is on its way into its sleep and back."""

    AWAKE = auto()
    FALLING_ASLEEP = auto()  # no `Asleep` yet
    ASLEEP = auto()
    WAKING = auto()  # no `Hello` yet


class _Mailbox:
    """Replies that have come in, and an alarm for whoever waits for one.

    Bounded though nobody may read for weeks, where the target has nothing to do: what the dead have said is thrown
    away, and of several that end unread one is enough to know of.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[DrafterProcess, Message | _Ended]] = deque()
        self._lock = threading.Lock()
        self._alarm = threading.Event()

    def put(self, sender: DrafterProcess, message: Message) -> None:
        with self._lock:
            if len(self._items) >= _MAX_UNREAD:
                sender.condemn("it answers what nobody asked")
                return
            self._items.append((sender, message))
        self._alarm.set()

    def put_end(self, sender: DrafterProcess, message: str) -> None:
        with self._lock:
            self._items = deque(item for item in self._items if item[0] is not sender)
            if not self._items or not isinstance(self._items[-1][1], _Ended):
                self._items.append((sender, _Ended(message)))
        self._alarm.set()

    def take(self) -> tuple[DrafterProcess, Message | _Ended] | None:
        if not self._items:  # without the lock: asked several times in every step
            return None
        with self._lock:
            return self._items.popleft() if self._items else None

    def wait(self, timeout_s: float) -> None:
        self._alarm.clear()
        if not self._items:
            self._alarm.wait(timeout_s)


class DrafterChannel:
    """Has a drafter kept alive, sends it jobs, and turns what happens to it into `News`.

    Args:
        settings: of the process.
        engine: vLLM engine arguments of the draft engine, complete.
        with_probs: whether jobs will ask for probabilities.
        status: is told at once, from a thread, when a drafter is up or is no more.
        module: Python module that is the drafter; for tests.
    """

    def __init__(
        self,
        settings: DrafterSettings,
        engine: Mapping[str, Any],
        with_probs: bool = False,
        status: DrafterStatus | None = None,
        module: str = _DRAFTER,
    ) -> None:
        self._settings = settings
        self._status = status
        self._engine = dict(engine)
        self._with_probs = with_probs
        self._module = module
        self._mailbox = _Mailbox()
        self._terms: Hello | None = None  # what the core plans with; every later drafter must be as good
        self._process: DrafterProcess | None = None  # that the last `Hello` came from, while it lives
        self._ready = False
        self._nap = _Nap.AWAKE
        self._shall_sleep = False
        self._job: DraftJob | None = None
        self._sent_s = 0.0
        self._late_id: int | None = None  # work id of a job given up but not answered
        self._freed: list[tuple[str, int]] = []  # for the next job, since that of a job not sent must not be lost
        self._news: deque[News] = deque()
        self._watch = DrafterWatch(settings, self._start, self._ended)

    @property
    def pid(self) -> int | None:
        """Process id of the drafter, None while there is none."""
        process = self._watch.process
        return None if process is None else process.popen.pid

    def _start(self, wake: Callable[[], None]) -> DrafterProcess:
        """Called from the watch's thread, but for the first time."""
        engine = self._engine
        if self._terms is not None:
            engine = {**engine, "num_gpu_blocks_override": self._terms.num_blocks + 1}  # one is vLLM's null block
        spec = {"engine": engine, "cpus": list(self._settings.cpus), "with_probs": self._with_probs}
        return DrafterProcess(self._settings, json.dumps(spec), self._module, self._deliver, wake)

    def _deliver(self, sender: DrafterProcess, message: Message) -> None:
        """Called from a thread of the process's."""
        if self._status is not None and isinstance(message, Hello | Asleep):
            self._status.tell(is_up=isinstance(message, Hello))
        self._mailbox.put(sender, message)

    def _ended(self, process: DrafterProcess, reason: str) -> None:
        """Called from the watch's thread."""
        if self._status is not None:
            self._status.tell(is_up=False)
        self._mailbox.put_end(process, reason)

    def wait_ready(self) -> Hello:
        """Wait for the first drafter: for what it is like, or would be like if it came up.

        Raises:
            VllmWorldError: the draft model can't be used, or takes too long to load, and `require_drafter` is on.
        """
        while (item := self._mailbox.take()) is None:
            self._mailbox.wait(1.0)
        sender, message = item
        if isinstance(message, Hello) and not (reason := self._misfit(message)):
            self._terms, self._process, self._ready = message, sender, True
            return message
        if not isinstance(message, Hello):
            reason = message.message if isinstance(message, _Ended) else f"it began with {message}"
        if self._settings.require_drafter:
            self.close()
            raise VllmWorldError(f"the drafter can't start ({reason}); its output has the details")
        logger.error("the drafter can't start (%s); serving without drafts while it is tried again", reason)
        if not isinstance(message, _Ended):
            sender.condemn(reason)
        self._news.append(Down(reason))
        self._terms = self._promised()
        return self._terms

    def _promised(self) -> Hello:
        """What the engine arguments make of a drafter."""
        engine = self._engine
        num_blocks = engine["num_gpu_blocks_override"] - 1
        limits = engine["block_size"], engine["max_model_len"], engine["max_num_batched_tokens"]
        return Hello(PROTOCOL_VERSION, num_blocks, num_blocks, *limits, vocab_size=0)

    def _misfit(self, hello: Hello) -> str:
        """Why a drafter that says this can't be used, if so."""
        if hello.version != PROTOCOL_VERSION:
            return f"it speaks version {hello.version} of the protocol, we {PROTOCOL_VERSION}"
        if hello.num_free_blocks != hello.num_blocks:
            return f"{hello.num_blocks - hello.num_free_blocks} blocks of its empty KV pool are lost"
        terms = self._terms
        if terms is None:
            return ""
        for name in ("num_blocks", "max_model_len", "max_num_batched_tokens"):
            if getattr(hello, name) < getattr(terms, name):
                return f"its {name} is {getattr(hello, name)}, but {getattr(terms, name)} is planned with"
        if hello.block_size != terms.block_size:
            return f"its block_size is {hello.block_size}, but {terms.block_size} is planned with"
        return ""

    def submit(self, job: DraftJob) -> None:
        """Send a job; news of it will come. The last one must be answered or given up."""
        assert self._job is None, self._job
        if self._late_id is not None or self._process is None or not self._ready:
            self._freed += job.freed
            self._news.append(Late(job.work_id, "the drafter is behind"))
            return
        self._job = job._replace(freed=[*self._freed, *job.freed]) if self._freed else job
        self._freed = []
        self._sent_s = time.monotonic()
        self._process.send(self._job)

    def drop(self, sessions: list[tuple[str, int]]) -> None:
        """Have these sessions, (request id, incarnation), dropped before the next job."""
        self._freed += sessions

    def sleep(self) -> None:
        """Have the drafter drop all that it keeps and give its device's memory back, until `wake`; it is down then."""
        self._shall_sleep = True
        self._read_mail()
        self._nap_or_wake()

    def wake(self) -> None:
        """End the sleep; does nothing if there was none. That the drafter is up again will be news."""
        self._shall_sleep = False
        self._read_mail()
        self._nap_or_wake()

    def poll(self) -> list[News]:
        """What has happened since the last call."""
        self._read_mail()
        if self._job is not None and time.monotonic() - self._sent_s > self._settings.deadline_s:
            logger.warning("no drafts after %s s; they are dropped if they still come", self._settings.deadline_s)
            self._late_id = self._job.work_id
            self._news.append(Late(self._job.work_id, f"no drafts after {self._settings.deadline_s} s"))
            self._job = None
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
        self._watch.close()
        self._process = None
        self._ready = False

    def _read_mail(self) -> None:
        while (item := self._mailbox.take()) is not None:
            self._hear(*item)

    def _hear(self, sender: DrafterProcess, message: Message | _Ended) -> None:
        if isinstance(message, Hello):
            if reason := self._misfit(message):
                sender.condemn(reason)
            elif sender is not self._process or self._nap is not _Nap.FALLING_ASLEEP:  # else a reset's, of before
                self._greet(sender, message)
        elif sender is not self._process:
            return  # one that was never of use
        elif isinstance(message, Drafted):
            self._drafted(message)
        elif isinstance(message, JobFailed):
            # Its sessions and ours differ: start over with empty ones, as after a death but without reloading.
            logger.warning("drafter: %s; its sessions start over", message.message)
            self._forget(message.message)
            if self._nap is _Nap.AWAKE:  # else they are dropped by then
                sender.send(Reset())
        elif isinstance(message, Asleep):
            self._nap = _Nap.ASLEEP
            self._nap_or_wake()
        elif isinstance(message, _Ended):
            self._forget(message.message)
            self._process = None
            self._nap = _Nap.AWAKE  # what comes next is

    def _greet(self, sender: DrafterProcess, hello: Hello) -> None:
        self._process, self._nap = sender, _Nap.AWAKE
        if self._shall_sleep:
            self._nap_or_wake()
            return
        self._ready = True
        self._news.append(Up(hello))

    def _nap_or_wake(self) -> None:
        """Bring the drafter nearer to what it shall do, unless it has yet to answer the last such order."""
        if self._process is None:
            return
        if self._shall_sleep and self._nap is _Nap.AWAKE:
            self._forget("it sleeps while vLLM does", is_asleep=True)
            self._nap = _Nap.FALLING_ASLEEP
            self._process.send(Sleep())
        elif not self._shall_sleep and self._nap is _Nap.ASLEEP:
            self._nap = _Nap.WAKING
            self._process.send(Wake())

    def _drafted(self, message: Drafted) -> None:
        if message.work_id == self._late_id:
            logger.info("the drafter has caught up")
            self._late_id = None
        elif self._job is not None and message.work_id == self._job.work_id:
            self._job = None
            self._news.append(message)

    def _forget(self, message: str, *, is_asleep: bool = False) -> None:
        if self._ready:
            self._news.append(Down(message, is_asleep))
        self._ready = False
        self._job = None
        self._late_id = None
        self._freed = []

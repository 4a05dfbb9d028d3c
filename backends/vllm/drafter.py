"""The drafter's process: a second vLLM engine that answers one `DraftJob` after the other.

Law of this file: vLLM and torch are imported after the process has pinned itself; the process and its workers end as
soon as the other end of its socket is gone, whatever they are doing. Pings are answered by the reading thread, so they
tell of the process and not of the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, Final

from minedraft.backends.vllm.messages import (
    PROTOCOL_VERSION,
    Asleep,
    Drafted,
    DraftEntry,
    DraftJob,
    Hello,
    JobFailed,
    LoadFailed,
    Ping,
    Pong,
    Reply,
    Reset,
    Sleep,
    Stop,
    Wake,
    pack,
    receive,
)

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""(request id, incarnation)."""

_EXIT_GRACE_S: Final = 5.0  # for a step to finish once the target is gone
_MAX_ORDERS: Final = 8  # one of each kind is more than there can be; see `messages.py`


class OutOfStepError(Exception):
    """A job speaks of tokens that this drafter doesn't have, or can't be finished."""


class Session:
    """What the drafter keeps for one stay of a request.

    Attributes:
        tokens: committed tokens, then drafts. Enough to make the session anew if its KV had to go.
        request_id: of the vLLM request that holds its KV; empty while there is none.
    """

    __slots__ = ("_packed", "request_id", "tokens")

    def __init__(self) -> None:
        from minedraft.backends.vllm.token_array import TokenArray

        self.tokens: list[int] = []
        self.request_id = ""
        self._packed = TokenArray()  # the first of the tokens

    def go_on(self, keep: int, token_ids: list[int]) -> None:
        """Replace what is behind the first `keep` tokens."""
        self.tokens[keep:] = token_ids
        self._packed.cut(keep)

    def pack(self) -> Any:
        """All tokens as an array. What it costs depends on how many are new, not on how many there are."""
        self._packed.extend(self.tokens[len(self._packed) :])
        return self._packed.view


class DraftEngine:
    """Sessions over a vLLM engine core.

    Args:
        core: a vLLM `EngineCore` whose scheduler is a `DraftScheduler`.
    """

    def __init__(self, core: Any) -> None:
        from minedraft.backends.vllm import compat

        self._core = core
        self._sessions: dict[Key, Session] = {}  # least recently used first
        self._num_requests = 0
        self._vocab_size = compat.vocab_size(core.vllm_config)

    def warm_up(self, with_probs: bool) -> None:
        """Draft once: what vLLM compiles at its first use (probabilities, for one) must not make a real job late."""
        self.run(DraftJob.of(-1, [], [DraftEntry("", 0, 0, [0], 2)], with_probs))
        self.reset()

    def reset(self) -> None:
        """Drop all sessions."""
        self._free(list(self._sessions))

    def sleep(self) -> None:
        """Drop all sessions, and let vLLM move the weights to main memory and throw the KV away."""
        self.reset()
        self._core.sleep(1)

    def wake(self) -> None:
        """End the sleep."""
        self._core.wake_up()

    def run(self, job: DraftJob) -> Drafted:
        """Do a job from start to end.

        Raises:
            OutOfStepError: see there.
        """
        started_s = time.monotonic()
        self._free([(request_id, incarnation) for request_id, incarnation in job.freed])
        entries = job.entries
        owners = {self._start(entry, job.with_probs).request_id: i for i, entry in enumerate(entries)}
        drafts: list[list[int]] = [[] for _ in entries]
        probs: list[list[float]] = [[] for _ in entries]
        active = dict(owners)
        while active:
            outputs, executed = self._core.step_fn()
            self._core.post_step(executed)
            for output in [one for each in (outputs or {}).values() for one in each.outputs]:
                index = owners[output.request_id]
                drafts[index] += output.new_token_ids
                if output.new_logprobs is not None:
                    probs[index] += [math.exp(row[0]) for row in output.new_logprobs.logprobs.tolist()]
                if output.finish_reason is not None:
                    del active[output.request_id]
            if active and not executed:
                self._make_room(owners)
        for i, entry in enumerate(entries):
            # An entry that only ingests had to sample one token; it is not wanted.
            del drafts[i][entry.num_draft :], probs[i][entry.num_draft :]
            self._sessions[entry.request_id, entry.incarnation].tokens += drafts[i]
        return Drafted(job.work_id, drafts, probs if job.with_probs else None, started_s, time.monotonic())

    def _start(self, entry: DraftEntry, with_probs: bool) -> Session:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        key = (entry.request_id, entry.incarnation)
        session = self._sessions.pop(key, None) or Session()
        self._sessions[key] = session
        if entry.num_computed > len(session.tokens):
            raise OutOfStepError(
                f"session {key} has {len(session.tokens)} tokens, the job builds on {entry.num_computed}"
            )
        session.go_on(entry.num_computed, self._known(entry.token_ids))
        if not entry.num_computed:
            self._drop_kv([session])  # nothing to keep: vLLM rewinds a session to its first token at most
        goes_on = bool(session.request_id)
        if goes_on:
            self._core.scheduler.rewinds[session.request_id] = entry.num_computed, session.pack()
        else:
            self._num_requests += 1
            session.request_id = f"{entry.request_id}/{entry.incarnation}/{self._num_requests}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max(1, entry.num_draft),
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if with_probs else None,
        )
        self._core.add_request(
            Request(
                session.request_id,
                session.tokens[entry.num_computed :] if goes_on else list(session.tokens),
                params,
                None,
                resumable=True,
                # A session that goes on hashes its own tokens; here it would be its whole context in every round.
                block_hasher=None if goes_on else self._core.request_block_hasher,
            )
        )
        return session

    def _known(self, token_ids: list[int]) -> list[int]:
        """The tokens, those that only the target knows (added ones) replaced: drafts may be wrong, but not fail."""
        if max(token_ids, default=0) < self._vocab_size:
            return token_ids
        return [token if token < self._vocab_size else 0 for token in token_ids]

    def _free(self, keys: list[Key]) -> None:
        sessions = [self._sessions.pop(key) for key in keys if key in self._sessions]
        self._drop_kv(sessions)

    def _drop_kv(self, sessions: list[Session]) -> None:
        request_ids = [session.request_id for session in sessions if session.request_id]
        if request_ids:
            self._core.abort_requests(request_ids)
        for session in sessions:
            self._core.scheduler.rewinds.pop(session.request_id, None)
            session.request_id = ""

    def _make_room(self, owners: dict[str, int]) -> None:
        """Take its KV from the session that was parked for the longest time: vLLM never preempts parked ones."""
        for session in self._sessions.values():
            if session.request_id and session.request_id not in owners:
                self._drop_kv([session])
                return
        raise OutOfStepError("the drafter's KV pool is too small for this job alone")


class Line:
    """The drafter's end of the socket.

    Attributes:
        orders: all that came in but pings.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.orders: queue.Queue[DraftJob | Reset | Sleep | Wake | Stop] = queue.Queue(_MAX_ORDERS)
        self._connection = connection
        self._lock = threading.Lock()  # two threads send
        threading.Thread(target=self._read, name="minedraft-orders", daemon=True).start()

    def send(self, reply: Reply) -> None:
        """Send a reply; without effect once the target is gone, since then the reading thread ends the process."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(pack(reply))

    def _read(self) -> None:
        """Pass orders on; when the target is gone, end the process even in the middle of a step."""
        try:
            while (message := receive(self._connection)) is not None:
                if isinstance(message, Ping):
                    self.send(Pong())
                    continue
                assert isinstance(message, DraftJob | Reset | Sleep | Wake | Stop), message
                self.orders.put_nowait(message)
            with contextlib.suppress(queue.Full):
                self.orders.put_nowait(Stop())
            time.sleep(_EXIT_GRACE_S)
        except Exception:
            logger.exception("the target doesn't keep to the protocol")
        leave(0)


def leave(code: int) -> None:
    """End the process at once, and its workers: a regular exit takes vLLM and torch several seconds."""
    for worker in multiprocessing.active_children():
        worker.kill()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    """Entry point: `python -m minedraft.backends.vllm.drafter FD`, with the specification on stdin."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    spec = json.load(sys.stdin)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the target's to handle; it closes the socket
    if spec["cpus"]:
        os.sched_setaffinity(0, spec["cpus"])
    line = Line(connection)
    try:
        core = _load(spec["engine"])
        engine = DraftEngine(core)
        engine.warm_up(spec["with_probs"])
    except Exception as error:
        logger.exception("the draft model can't be loaded")
        line.send(LoadFailed(f"{type(error).__name__}: {error}"))
        leave(1)
    try:
        _serve(core, engine, line)
        core.shutdown()
    except Exception:
        logger.exception("the draft engine failed")
        leave(1)
    leave(0)


def _load(engine: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    config = EngineArgs(**engine).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    core.model_executor.register_failure_callback(lambda: leave(1))  # a worker died; vLLM has said so
    return core


def _hello(core: Any) -> Hello:
    from minedraft.backends.vllm import compat

    return Hello(
        PROTOCOL_VERSION,
        compat.num_usable_blocks(core.scheduler),
        compat.num_free_blocks(core.scheduler),
        core.scheduler.block_size,
        core.scheduler.max_model_len,
        core.scheduler.max_num_scheduled_tokens,
        compat.vocab_size(core.vllm_config),
    )


def _serve(core: Any, engine: DraftEngine, line: Line) -> None:
    line.send(_hello(core))
    while not isinstance(order := line.orders.get(), Stop):
        line.send(_answer(core, engine, order))


def _answer(core: Any, engine: DraftEngine, order: DraftJob | Reset | Sleep | Wake) -> Reply:
    if isinstance(order, DraftJob):
        try:
            return engine.run(order)
        except OutOfStepError as error:
            engine.reset()
            return JobFailed(order.work_id, str(error))
    if isinstance(order, Sleep):
        engine.sleep()
        return Asleep()
    if isinstance(order, Wake):
        engine.wake()
    else:
        engine.reset()
    return _hello(core)


if __name__ == "__main__":
    main()

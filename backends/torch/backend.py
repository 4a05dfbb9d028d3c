"""`TorchBackend`: the world in which two Hugging Face models run, each in its own process on its own device.

The parent owns all token ids, the workers own KV. A work becomes a job (the same counts, with tokens), goes down one
pipe, and its reply becomes an event. Drafts stay in the parent between the two groups.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from minedraft.backends.torch.errors import TargetLostError, TorchWorldError
from minedraft.backends.torch.messages import (
    Done,
    DraftEntry,
    DraftJob,
    Failed,
    Loaded,
    LoadFailed,
    Reply,
    VerifyEntry,
    VerifyJob,
    WorkerSpec,
)
from minedraft.backends.torch.model_card import ModelCard, common_num_token_ids, read_model_card
from minedraft.backends.torch.process import Worker, launch_process, parse_device
from minedraft.backends.torch.request import TorchRequest
from minedraft.backends.torch.sampling import Acceptance
from minedraft.backends.torch.transcript import PendingDraft, Transcript
from minedraft.request import FinishReason, RequestId
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftResult,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    VerifyResult,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
)

DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "float64")


class TorchBackend:
    """A `Backend` over two worker processes. Use it in a `with` statement, which loads the models and ends the workers.

    Args:
        target: folder or hub name of the target.
        draft: the same for the drafter; None for a world without one.
        requests: all requests of the run; each arrives at its `arrival_s`.
        target_device: `cpu:N` (pinned to core N, one thread), `cpu`, `cuda:N` or `cuda`.
        draft_device: likewise; may be the target's.
        acceptance: how sampled drafts are accepted, see `sampling`.
        dtype: of both models' weights, one of `DTYPES`; auto is float32 on a CPU and the model's own on a GPU.
        max_drafter_restarts: how often a dead drafter is started again.
        launch: starts a worker.

    Raises:
        TorchWorldError: models don't exist or don't fit, a device is unknown, a prompt holds an unknown token. Also
            raised on entering, if a model can't be loaded.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None,
        requests: Iterable[TorchRequest],
        *,
        target_device: str = "cpu:0",
        draft_device: str = "cpu:1",
        acceptance: Acceptance | str = Acceptance.REJECTION,
        dtype: str = "auto",
        max_drafter_restarts: int = 0,
        launch: Callable[[WorkerSpec], Worker] = launch_process,
    ) -> None:
        if dtype not in DTYPES:
            raise TorchWorldError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if acceptance not in list(Acceptance):
            raise TorchWorldError(f"acceptance {acceptance!r} is unknown; use one of {', '.join(Acceptance)}")
        parse_device(target_device)
        self.target_card = read_model_card(str(target))
        self.draft_card: ModelCard | None = None
        num_token_ids = self.target_card.num_token_ids
        self._draft_spec: WorkerSpec | None = None
        if draft is not None:
            parse_device(draft_device)
            self.draft_card = read_model_card(str(draft))
            num_token_ids = common_num_token_ids(self.target_card, self.draft_card)
            self._draft_spec = WorkerSpec("drafter", str(draft), draft_device, dtype, num_token_ids, str(acceptance))
        self._target_spec = WorkerSpec("target", str(target), target_device, dtype, num_token_ids, str(acceptance))
        self._transcripts = _transcripts(requests, num_token_ids)
        arrivals = sorted(self._transcripts.values(), key=lambda transcript: transcript.request.arrival_s)
        self._arrivals = deque(transcript.request for transcript in arrivals)
        self._arrived: dict[RequestId, None] = {}
        self._launch = launch
        self._target: Worker | None = None
        self._drafter: Worker | None = None
        self._drafter_ready = False
        self._restarts_left = max_drafter_restarts
        self._verifying: VerifyWork | None = None
        self._drafting: DraftWork | None = None
        self._ready: deque[Event] = deque()
        # Aborts may come from another thread; the pipe wakes the one that waits.
        self._aborts: deque[RequestId] = deque()
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._origin_s = 0.0
        self._now_s = 0.0

    def __enter__(self) -> Self:
        try:
            self._target = self._launch(self._target_spec)
            if self._draft_spec is not None:
                self._drafter = self._launch(self._draft_spec)
                _await_loaded(self._drafter, self._draft_spec)
                self._drafter_ready = True
            _await_loaded(self._target, self._target_spec)
        except BaseException:
            self.close()
            raise
        self._origin_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a second call does nothing. Outputs stay readable."""
        for worker in (self._target, self._drafter):
            if worker is not None:
                worker.stop()
        self._target = self._drafter = None
        self._wake_reader.close()
        self._wake_writer.close()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The target's EOS ids."""
        return self.target_card.eos_token_ids

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """All requests of the run, as given."""
        return tuple(self._transcripts)

    def output_token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """What a request has so far, up to and with its stop token."""
        return self._transcripts[request_id].output_token_ids

    def finish_reason(self, request_id: RequestId) -> FinishReason | None:
        """Why this world ended a request; None if it did not (a context limit is the scheduler's to see)."""
        return self._transcripts[request_id].finish_reason

    def abort(self, request_id: RequestId) -> None:
        """The client of a request is gone; may be called from any thread.

        A request that has yet to arrive is aborted when it does; a finished or unknown one is ignored.
        """
        self._aborts.append(request_id)
        self._wake_writer.send_bytes(b"a")

    # --- The three verbs of the seam.

    def now(self) -> float:
        """When the last event was returned, in seconds after the models were loaded."""
        return self._now_s

    def submit(self, work: Work) -> None:
        """Send a work to its worker."""
        if isinstance(work, VerifyWork):
            assert self._verifying is None
            assert self._target is not None
            self._verifying = work
            _send(self._target.connection, self._verify_job(work))
            return
        assert self._drafting is None
        if self._drafter is None or not self._drafter_ready:
            self._ready.append(WorkFailed(work.work_id, "the drafter is not running"))
            return
        self._drafting = work
        _send(self._drafter.connection, self._draft_job(work))

    def next_event(self) -> Event | None:
        """Wait for a reply, an arrival, an abort or a worker's death.

        Raises:
            TargetLostError: the target process ended.
        """
        event = self._next_event()
        self._now_s = time.monotonic() - self._origin_s
        return event

    def ready(self) -> bool:
        """Whether an arrival is due, or a reply or an abort has come in meanwhile."""
        if not self._ready:
            self._collect_aborts()
            self._collect_arrival()
        if not self._ready and self._may_happen():
            self._wait(block=False)
        return bool(self._ready)

    # --- Waiting.

    def _next_event(self) -> Event | None:
        while True:
            if self._ready:
                return self._ready.popleft()
            self._collect_aborts()
            self._collect_arrival()
            if self._ready:
                continue
            if not self._may_happen():
                return None
            self._wait()

    def _may_happen(self) -> bool:
        restarting = self._drafter is not None and not self._drafter_ready
        return (
            self._verifying is not None
            or self._drafting is not None
            or bool(self._arrivals)
            or (restarting and any(self._transcripts[key].finish_reason is None for key in self._arrived))
        )

    def _collect_arrival(self) -> None:
        if self._arrivals and self._arrivals[0].arrival_s <= time.monotonic() - self._origin_s:
            request = self._arrivals.popleft()
            self._arrived[request.request_id] = None
            self._ready.append(RequestArrived(request.core_request()))

    def _collect_aborts(self) -> None:
        for _ in range(len(self._aborts)):
            request_id = self._aborts.popleft()
            transcript = self._transcripts.get(request_id)
            if transcript is None or transcript.finish_reason is not None:
                continue
            if request_id not in self._arrived:
                self._aborts.append(request_id)
                continue
            transcript.finish_reason = FinishReason.ABORT
            self._ready.append(RequestAborted(request_id))

    def _wait(self, block: bool = True) -> None:
        assert self._target is not None
        connections: list[Connection] = [self._target.connection, self._wake_reader]
        if self._drafter is not None:
            connections.append(self._drafter.connection)
        timeout_s = None if block else 0.0
        if block and self._arrivals:
            timeout_s = max(0.0, self._origin_s + self._arrivals[0].arrival_s - time.monotonic())
        ready = wait(connections, timeout_s)
        if self._wake_reader in ready:
            self._wake_reader.recv_bytes()
        if self._target.connection in ready:
            self._hear_target(self._target)
        if self._drafter is not None and self._drafter.connection in ready:
            self._hear_drafter(self._drafter)

    def _hear_target(self, worker: Worker) -> None:
        reply = _receive(worker)
        if reply is None:
            raise TargetLostError(
                f"target process ended ({worker.end_reason()}); its requests can't be finished, run again"
            )
        assert self._verifying is not None
        work, self._verifying = self._verifying, None
        if isinstance(reply, Done):
            self._ready.append(self._work_done(reply, self._verify_result(work, reply)))
        elif isinstance(reply, Failed):
            self._ready.append(WorkFailed(work.work_id, reply.message))

    def _hear_drafter(self, worker: Worker) -> None:
        reply = _receive(worker)
        if reply is None or isinstance(reply, LoadFailed):
            self._lose_drafter(worker, "" if reply is None else reply.message)
        elif isinstance(reply, Loaded):
            self._drafter_ready = True
            self._ready.append(DrafterReady())
        else:
            assert self._drafting is not None
            work, self._drafting = self._drafting, None
            if isinstance(reply, Done):
                self._ready.append(self._work_done(reply, self._draft_result(work, reply)))
            else:
                self._ready.append(WorkFailed(work.work_id, reply.message))

    def _lose_drafter(self, worker: Worker, message: str) -> None:
        message = message or f"drafter process ended ({worker.end_reason()})"
        worker.stop()
        if self._drafter_ready:  # one that dies while it restarts was never there
            self._ready.append(DrafterLost(message))
        self._drafter, self._drafter_ready, self._drafting = None, False, None
        if self._restarts_left:
            assert self._draft_spec is not None
            self._restarts_left -= 1
            self._drafter = self._launch(self._draft_spec)

    # --- Works to jobs, replies to results.

    def _draft_job(self, work: DraftWork) -> DraftJob:
        entries = []
        for index, request_id in enumerate(work.request_ids):
            transcript = self._transcripts[request_id]
            start = work.num_computed[index]
            entries.append(
                DraftEntry(
                    (request_id, work.incarnations[index]),
                    start,
                    transcript.tokens(start, work.num_new[index]),
                    work.num_draft[index],
                    transcript.sampling,
                )
            )
        return DraftJob(work.work_id, work.freed, tuple(entries))

    def _draft_result(self, work: DraftWork, reply: Done) -> DraftResult:
        for index, (request_id, drafted) in enumerate(zip(work.request_ids, reply.value, strict=True)):
            if drafted.token_ids:
                self._transcripts[request_id].put_draft(
                    PendingDraft(work.incarnations[index], work.rounds[index], drafted.token_ids, drafted.rows)
                )
        return DraftResult(
            num_drafted=tuple(len(drafted.token_ids) for drafted in reply.value),
            probs=tuple(drafted.probs for drafted in reply.value),
        )

    def _verify_job(self, work: VerifyWork) -> VerifyJob:
        entries = []
        for index, request_id in enumerate(work.request_ids):
            transcript = self._transcripts[request_id]
            start, count = work.num_computed[index], work.num_new[index]
            if work.is_last[index]:
                transcript.rewind(start + count)
            draft = transcript.take_draft(work.incarnations[index], work.rounds[index], work.num_draft[index])
            entries.append(
                VerifyEntry(
                    (request_id, work.incarnations[index]),
                    start,
                    transcript.tokens(start, count),
                    draft.token_ids,
                    draft.rows,
                    work.is_last[index],
                    transcript.sampling,
                )
            )
        return VerifyJob(work.work_id, work.freed, tuple(entries))

    def _verify_result(self, work: VerifyWork, reply: Done) -> VerifyResult:
        accepted, committed = [], []
        reasons: list[FinishReason | None] = []
        for request_id, token_ids in zip(work.request_ids, reply.value, strict=True):
            transcript = self._transcripts[request_id]
            count, reason = len(token_ids), None
            # An aborted request's tokens are reported, since the columns must be whole, but not kept.
            if token_ids and transcript.finish_reason is None:
                count, reason = transcript.commit(token_ids, self.eos_token_ids)
            accepted.append(max(len(token_ids) - 1, 0))
            committed.append(count)
            reasons.append(reason)
        ended = any(reason is not None for reason in reasons)
        return VerifyResult(tuple(accepted), tuple(committed), tuple(reasons) if ended else None)

    def _work_done(self, reply: Done, result: DraftResult | VerifyResult) -> WorkDone:
        return WorkDone(reply.work_id, result, reply.started_s - self._origin_s, reply.ended_s - self._origin_s)


def _transcripts(requests: Iterable[TorchRequest], num_token_ids: int) -> dict[RequestId, Transcript]:
    transcripts: dict[RequestId, Transcript] = {}
    for request in requests:
        if request.request_id in transcripts:
            raise TorchWorldError(f"request {request.request_id!r} is there twice; give each its own request_id")
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < num_token_ids:
            raise TorchWorldError(
                f"request {request.request_id!r}: prompt_token_ids must lie in [0, {num_token_ids}); "
                "encode the prompt with the target's tokenizer"
            )
        transcripts[request.request_id] = Transcript(request)
    return transcripts


def _await_loaded(worker: Worker, spec: WorkerSpec) -> None:
    reply = _receive(worker)
    if reply is None:
        raise TorchWorldError(
            f"{spec.role} {spec.model!r}: its process ended while loading ({worker.end_reason()}); "
            "is there enough memory for the model?"
        )
    if isinstance(reply, LoadFailed):
        raise TorchWorldError(reply.message)


def _receive(worker: Worker) -> Reply | None:
    """The next reply; None if the worker is gone."""
    try:
        reply: Reply = worker.connection.recv()
    except (EOFError, ConnectionError):
        return None
    return reply


def _send(connection: Connection, job: DraftJob | VerifyJob) -> None:
    try:
        connection.send(job)
    except ConnectionError:
        return  # it died; its pipe reads EOF, which `next_event` reports

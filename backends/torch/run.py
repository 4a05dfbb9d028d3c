"""Run a list of requests on two models from start to end (`run_torch`): what the command line and examples use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minedraft.backend import Backend
from minedraft.backends.torch.backend import TorchBackend
from minedraft.backends.torch.model_card import ModelCard
from minedraft.backends.torch.models import resolve_model
from minedraft.backends.torch.request import TorchRequest
from minedraft.backends.torch.sampling import Acceptance
from minedraft.engine import Engine
from minedraft.policy import Policies
from minedraft.request import RequestId, RequestOutput
from minedraft.scheduler import Scheduler, SchedulerConfig
from minedraft.work import Event, Work

OnEvent = Callable[[Event, TorchBackend], None]
"""Told of every event before the scheduler is; may read outputs so far and call `abort`."""


@dataclass(frozen=True, slots=True)
class TorchRunResult:
    """What came out of a run.

    Attributes:
        outputs: per request, in the order in which they ended.
        token_ids: output tokens by request id, in the order of the requests.
        scheduler_config: limits that held, the models' contexts included.
        duration_s: seconds from the models being loaded to the last event.
    """

    outputs: tuple[RequestOutput, ...]
    token_ids: Mapping[RequestId, tuple[int, ...]]
    scheduler_config: SchedulerConfig
    duration_s: float


def run_torch(
    target: str | Path,
    draft: str | Path | None,
    requests: Sequence[TorchRequest],
    scheduler_config: SchedulerConfig,
    policies: Policies,
    *,
    target_device: str = "cpu:0",
    draft_device: str = "cpu:1",
    acceptance: Acceptance | str = Acceptance.REJECTION,
    dtype: str = "auto",
    max_drafter_restarts: int = 0,
    wrap_backend: Callable[[Backend], Backend] | None = None,
    on_event: OnEvent | None = None,
) -> TorchRunResult:
    """Generate text for all requests.

    Worker processes import the caller's main module, so a script must call this under `if __name__ == "__main__":`.

    Args:
        target: embedded name, local folder or hub name, see `resolve_model`.
        draft: likewise; None for a run without a drafter.
        requests: what to generate.
        scheduler_config: limits; context limits that are None become the models' own.
        policies: of the scheduler; the mode policy decides between ar, sd and psd.
        target_device: see `TorchBackend`, as are the next four.
        draft_device: of the drafter.
        acceptance: how sampled drafts are accepted.
        dtype: of both models.
        max_drafter_restarts: how often a dead drafter is started again.
        wrap_backend: puts something between engine and backend, a recorder for example.
        on_event: see `OnEvent`.

    Raises:
        TorchWorldError: a model, device or request can't be served.
        TargetLostError: the target process ended in mid-run.
        ValueError: the limits don't fit together.
        PolicyError: a policy decided something illegal.
    """
    with TorchBackend(
        resolve_model(target),
        None if draft is None else resolve_model(draft),
        requests,
        target_device=target_device,
        draft_device=draft_device,
        acceptance=acceptance,
        dtype=dtype,
        max_drafter_restarts=max_drafter_restarts,
    ) as backend:
        return run_backend(backend, scheduler_config, policies, wrap_backend=wrap_backend, on_event=on_event)


def run_backend(
    backend: TorchBackend,
    scheduler_config: SchedulerConfig,
    policies: Policies,
    *,
    wrap_backend: Callable[[Backend], Backend] | None = None,
    on_event: OnEvent | None = None,
) -> TorchRunResult:
    """Run a backend that has been entered to its end; see `run_torch`."""
    config = limit_to_models(scheduler_config, backend.target_card, backend.draft_card)
    seam: Backend = backend if on_event is None else _Tap(backend, on_event)
    if wrap_backend is not None:
        seam = wrap_backend(seam)
    outputs = Engine(Scheduler(config, policies), seam).run()
    return TorchRunResult(
        outputs=tuple(outputs),
        token_ids={request_id: backend.output_token_ids(request_id) for request_id in backend.request_ids},
        scheduler_config=config,
        duration_s=backend.now(),
    )


def limit_to_models(config: SchedulerConfig, target: ModelCard, draft: ModelCard | None) -> SchedulerConfig:
    """Fill context limits that were left open with what the models, and the target's pool, can hold."""
    max_model_len = config.max_model_len
    if max_model_len is None and target.max_model_len is not None:
        max_model_len = min(target.max_model_len, config.num_target_blocks * config.block_size)
    draft_max_model_len = config.draft_max_model_len
    if draft_max_model_len is None and draft is not None:
        draft_max_model_len = draft.max_model_len
    return dataclasses.replace(
        config,
        max_model_len=max_model_len,
        draft_max_model_len=draft_max_model_len,
        num_draft_blocks=0 if draft is None else config.num_draft_blocks,
    )


class _Tap:
    """A backend that shows every event to a function."""

    def __init__(self, backend: TorchBackend, on_event: OnEvent) -> None:
        self._backend = backend
        self._on_event = on_event

    def now(self) -> float:
        """See `Backend`."""
        return self._backend.now()

    def submit(self, work: Work) -> None:
        """See `Backend`."""
        self._backend.submit(work)

    def next_event(self) -> Event | None:
        """See `Backend`."""
        event = self._backend.next_event()
        if event is not None:
            self._on_event(event, self._backend)
        return event

    def ready(self) -> bool:
        """See `Backend`."""
        return self._backend.ready()

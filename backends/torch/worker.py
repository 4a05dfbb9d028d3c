"""A worker's life: load the model, then answer one job after the other until the pipe closes."""

from __future__ import annotations

import logging
import time
from multiprocessing.connection import Connection

import torch
from transformers.utils import logging as transformers_logging

from minedraft.backends.torch.errors import TorchWorldError
from minedraft.backends.torch.jobs import draft, verify
from minedraft.backends.torch.language_model import LanguageModel
from minedraft.backends.torch.messages import Done, DraftJob, Failed, Job, Loaded, LoadFailed, WorkerSpec
from minedraft.backends.torch.sampling import Acceptance

_log = logging.getLogger(__name__)


def serve(spec: WorkerSpec, connection: Connection) -> None:
    """Run until the other end of the pipe closes, which is also how a parent's death is noticed."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        try:
            device = _device(spec.device)
            model = LanguageModel.load(spec.model, device, spec.dtype, spec.num_token_ids)
        except Exception as error:
            _log.debug("loading failed", exc_info=True)
            connection.send(LoadFailed(_one_line(spec, error)))
            return
        connection.send(Loaded())
        while True:
            job: Job = connection.recv()
            connection.send(_answer(model, job, Acceptance(spec.acceptance), device))
    except (EOFError, ConnectionError):
        return
    finally:
        connection.close()


def _device(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TorchWorldError(f"device {name!r}: no CUDA device is visible; use cpu:0 and cpu:1")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise TorchWorldError(f"device {name!r}: only {torch.cuda.device_count()} CUDA devices are visible")
    # The core number of cpu:N was used to pin the process; to torch all cores are one device.
    return torch.device(name if kind == "cuda" else "cpu")


def _answer(model: LanguageModel, job: Job, acceptance: Acceptance, device: torch.device) -> Done | Failed:
    started_s = time.monotonic()
    try:
        value = draft(model, job, acceptance) if isinstance(job, DraftJob) else verify(model, job, acceptance)
    except Exception as error:  # whatever it is, the parent must hear of it, and the next job may do better
        _log.debug("work %d failed", job.work_id, exc_info=True)
        return Failed(job.work_id, f"{type(error).__name__}: {error}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Done(job.work_id, value, started_s, time.monotonic())


def _one_line(spec: WorkerSpec, error: Exception) -> str:
    if isinstance(error, TorchWorldError):
        return str(error)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{spec.role} {spec.model!r}: cannot be loaded: {first}"

"""The torch world for tests: workers as threads (no start-up of seconds), tiny float64 models, texts by plain HF."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from minedraft.backends.torch.backend import TorchBackend
from minedraft.backends.torch.messages import WorkerSpec
from minedraft.backends.torch.request import TorchRequest
from minedraft.backends.torch.run import OnEvent, TorchRunResult, run_backend
from minedraft.backends.torch.worker import serve
from minedraft.policy import load_policies
from minedraft.scheduler import SchedulerConfig

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)

VOCAB = 64


class ThreadWorker:
    """A `Worker` in a thread of this process; the same pipe, the same loop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._connection, theirs = Pipe()
        self._thread = threading.Thread(target=serve, args=(spec, theirs), daemon=True)
        self._thread.start()
        # Loading sets torch's default dtype for the whole process, so one worker loads at a time.
        self._connection.poll(None)

    @property
    def connection(self) -> Connection:
        return self._connection

    def end_reason(self) -> str:
        return "its thread ended"

    def stop(self) -> None:
        self._connection.close()
        self._thread.join()


def make_requests(lengths: Sequence[int], max_tokens: int = 24, **fields: Any) -> list[TorchRequest]:
    """One request per prompt length, with prompts that differ."""
    prompts = [[(5 + 7 * i + 11 * j) % (VOCAB - 3) + 3 for j in range(n)] for i, n in enumerate(lengths)]
    return [TorchRequest(f"r{i}", tuple(prompt), max_tokens, **fields) for i, prompt in enumerate(prompts)]


def config(**fields: Any) -> SchedulerConfig:
    defaults = {
        "num_batches": 2,
        "max_batch_size": 4,
        "num_speculative_tokens": 3,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_target_blocks": 256,
        "num_draft_blocks": 256,
    }
    return SchedulerConfig(**(defaults | fields))


def run(
    target: Path,
    draft: Path | None,
    requests: Sequence[TorchRequest],
    mode: str,
    *,
    limits: dict[str, Any] | None = None,
    policies: dict[str, str] | None = None,
    on_event: OnEvent | None = None,
    launch: Any = ThreadWorker,
    **fields: Any,
) -> TorchRunResult:
    """Run on thread workers in float64."""
    fields = {"target_device": "cpu", "draft_device": "cpu", "dtype": "float64"} | fields
    with TorchBackend(target, None if mode == "ar" else draft, requests, launch=launch, **fields) as backend:
        specs = {"mode": f"fixed,mode={mode}", **(policies or {})}
        return run_backend(backend, config(**(limits or {})), load_policies(specs), on_event=on_event)


def reference(target: Path, request: TorchRequest) -> tuple[int, ...]:
    """The greedy text by transformers' own `generate`."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    prompt = torch.tensor([request.prompt_token_ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_tokens, do_sample=False
    )
    return tuple(output[0, prompt.shape[1] :].tolist())


def set_eos(model: Path, eos_token_id: int | list[int]) -> None:
    """Change a saved model's EOS."""
    from transformers import GenerationConfig

    GenerationConfig(eos_token_id=eos_token_id, pad_token_id=0).save_pretrained(model)

"""A correction of vLLM's sampling with speculation on a CPU, where up to 0.33 it reads memory that was never written.

vLLM expands temperature, top_k and top_p to one value per drafted token with a kernel. Its stand-in for CPUs converts
the output tensor first and fills the converted copy, which is dropped: for every type but int64 the result is garbage,
and sampled text follows no distribution at all. Greedy decoding isn't concerned. And a step that carries no draft
hands `top_k` an empty tensor, of which vLLM takes the maximum, which raises.

And a request with a seed whose prompt comes in chunks ends the engine: after a chunk vLLM winds the request's generator
back, which a CPU's can't do.

Each correction asks the installed vLLM and torch whether it is needed, and so goes away by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def correct() -> None:
    """Put right what is wrong on a CPU; does nothing anywhere else, or where vLLM is right by itself."""
    if not current_platform.is_cpu():
        return
    if is_needed():
        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    if crashes_on_no_drafts():
        original = rejection_sampler.apply_top_k_top_p
        rejection_sampler.apply_top_k_top_p = functools.partial(_apply_top_k_top_p, original)
    original = CPUModelRunner.sample_tokens
    if generators_cannot_go_back() and original.__module__ != __name__:  # else it is ours already
        CPUModelRunner.sample_tokens = _without_generators_of_chunks(original)


def is_needed() -> bool:
    """Whether vLLM's expansion, as it is now in this process, gets a float32 wrong."""
    values, ends = torch.tensor([0.5, 0.25]), torch.tensor([1, 3], dtype=torch.int32)
    # Freed memory often still holds what is looked for, so it is written over first.
    torch.full((3,), -1.0)
    return bool(rejection_sampler.expand_batch_to_tokens(values, ends, 3).tolist() != [0.5, 0.25, 0.25])


def crashes_on_no_drafts() -> bool:
    """Whether vLLM, as it is now in this process, can't apply top_k to no rows."""
    try:
        rejection_sampler.apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError):
        return True
    return False


def generators_cannot_go_back() -> bool:
    """Whether torch's generator for a CPU lacks the offset that vLLM sets back."""
    try:
        torch.Generator(device="cpu").get_offset()
    except RuntimeError:
        return True
    return False


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def _apply_top_k_top_p(
    original: Callable[..., torch.Tensor], logits: torch.Tensor, k: Any, p: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return original(logits, k, p, *args, **kwargs) if len(logits) else logits


def _without_generators_of_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sample the rows of prompt chunks, which are thrown away, without their requests' generators."""

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        is_chunk = self.discard_request_mask.np[: self.input_batch.num_reqs]
        held = {row: generators.pop(row) for row in tuple(generators) if row < len(is_chunk) and is_chunk[row]}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(held)

    return sample_tokens

"""The vLLM world: batch-parallel speculative decoding on a stock vLLM V1 engine.

vLLM owns the loop, so there is no `Backend` here. A subclass of vLLM's scheduler, named by `--scheduler-cls`, calls the
core's two verbs; the drafter is a second vLLM engine in a process of its own. Nothing of vLLM is patched. By hand:

    vllm serve TARGET --scheduler-cls minedraft.backends.vllm.PSDScheduler --speculative-config
    '{"method": "custom_class", "model": "minedraft.backends.vllm.NullProposer", "num_speculative_tokens": 4}'
    --additional-config '{"minedraft": {"drafter": {"engine": {"model": "DRAFT"}}}}'

`settings.py` lists what may stand under `minedraft`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The two classes that vLLM's options name, under short paths; loaded only when asked for."""
    if name == "PSDScheduler":
        from minedraft.backends.vllm.scheduler import PSDScheduler

        return PSDScheduler
    if name == "NullProposer":
        from minedraft.backends.vllm.null_proposer import NullProposer

        return NullProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

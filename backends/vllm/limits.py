"""The core's limits and the drafter's engine arguments, both read off the target's engine."""

from __future__ import annotations

import dataclasses
from typing import Any

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.messages import Hello
from minedraft.backends.vllm.settings import KEY, DrafterSettings, Settings
from minedraft.policy import Mode
from minedraft.scheduler_config import SchedulerConfig


def scheduler_config(scheduler: Any, settings: Settings, hello: Hello | None) -> SchedulerConfig:
    """Limits that both engines can keep.

    Args:
        scheduler: the target's vLLM scheduler.
        settings: see there.
        hello: what the drafter said of itself; None without one.

    Raises:
        VllmWorldError: target and drafter differ where they must not.
        ValueError: the limits don't fit together.
    """
    max_num_seqs = compat.max_num_active(scheduler)
    num_active = settings.num_batches if settings.mode == Mode.PSD else 1
    if hello is not None and hello.block_size != scheduler.block_size:
        raise VllmWorldError(
            f"the drafter's block_size is {hello.block_size}, the target's {scheduler.block_size}; "
            f"set {KEY}.drafter.engine.block_size"
        )
    return SchedulerConfig(
        num_batches=settings.num_batches,
        max_batch_size=-(-max_num_seqs // num_active) if settings.max_batch_size is None else settings.max_batch_size,
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=scheduler.num_spec_tokens,
        max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
        max_num_draft_batched_tokens=None if hello is None else hello.max_num_batched_tokens,
        draft_capacity=settings.draft_capacity,
        draft_ingests_beside=settings.draft_ingests_beside,
        max_model_len=scheduler.max_model_len,
        draft_max_model_len=None if hello is None else hello.max_model_len,
        block_size=scheduler.block_size,
        num_target_blocks=compat.num_usable_blocks(scheduler),
        num_draft_blocks=0 if hello is None else hello.num_blocks,
        kv_watermark=compat.watermark(scheduler),
    )


def follow_engine(scheduler: Any, settings: Settings) -> Settings:
    """Settings with the defaults that follow from the engine's own: who is urgent is vLLM's `--scheduling-policy`."""
    if compat.is_by_priority(scheduler):
        urgent = {"admission": "priority", "preemption": "least-urgent"}
        return dataclasses.replace(settings, policies={**urgent, **settings.policies})
    return settings


def drafter_engine(scheduler: Any, settings: DrafterSettings) -> dict[str, Any]:
    """VLLM engine arguments of the drafter: those given, over what follows from the target.

    Raises:
        VllmWorldError: it would have fewer sessions than the target has running requests.
    """
    config = scheduler.vllm_config
    follow = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_running_reqs,  # one session per running request
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "block_size": scheduler.block_size,
        "enforce_eager": config.model_config.enforce_eager,
        "enable_sleep_mode": config.model_config.enable_sleep_mode,
        "skip_tokenizer_init": True,
    }
    fixed = {
        "scheduler_cls": "minedraft.backends.vllm.draft_scheduler.DraftScheduler",
        "async_scheduling": False,
    }
    engine = {**follow, **settings.engine, **fixed}
    if engine["max_num_seqs"] < follow["max_num_seqs"]:
        raise VllmWorldError(
            f"{KEY}.drafter.engine.max_num_seqs is {engine['max_num_seqs']}, but the target runs up to "
            f"{follow['max_num_seqs']} requests, each with a session in the drafter; remove it"
        )
    return engine

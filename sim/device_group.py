"""One model on one group of GPUs: how it is cut, whether it fits, and how much KV room is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minedraft.sim.gpus import Gpu
from minedraft.sim.models import ModelShape

LEAST_KV_TOKENS: Final = 2048
"""Tokens that must find room beside the weights; with less, not even one request of usual length can run."""

KV_DTYPE_BYTES: Final = {"bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A model with tensor parallelism `tp` over as many equal GPUs.

    Attributes:
        shape: the model.
        gpu: each of the devices.
        tp: how many; divides the heads. KV heads are replicated where there are fewer of them than devices.
        kv_cache_dtype: a key of `KV_DTYPE_BYTES`.
        gpu_memory_utilization: share of the memory that may be used, as in vLLM.
        reserved_bytes: per device, for activations, CUDA graphs and communication buffers.

    Raises:
        ValueError: the model can't be cut like this, or doesn't fit; the message says what would do.
    """

    shape: ModelShape
    gpu: Gpu
    tp: int = 1
    kv_cache_dtype: str = "bf16"
    gpu_memory_utilization: float = 0.9
    reserved_bytes: float = 2.0 * 2**30

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_DTYPE_BYTES:
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype!r}, must be {' or '.join(KV_DTYPE_BYTES)}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, must be in (0, 1]")
        _check_cut(self.shape, self.tp)
        if self.kv_tokens < LEAST_KV_TOKENS:
            raise ValueError(
                f"tp is {self.tp}, but {self.shape.name} takes {self.shape.weight_bytes / self.tp / 1e9:.1f} GB of "
                f"weights per device, and of the {self.gpu.memory_bytes / 1e9:.1f} GB of {self.gpu.name} only "
                f"{max(0.0, self.kv_bytes) / 1e9:.1f} GB are left for KV (least is {self.least_kv_bytes / 1e9:.1f}); "
                f"raise tp, quantise, or raise gpu_memory_utilization {self.gpu_memory_utilization:g}"
            )

    @property
    def kv_heads_per_device(self) -> int:
        """Key-value heads that each device holds."""
        return max(1, self.shape.num_kv_heads // self.tp)

    @property
    def kv_bytes_per_token(self) -> float:
        """Per device and token, over all layers."""
        heads = self.kv_heads_per_device / self.shape.num_kv_heads
        return self.shape.kv_bytes_per_token(KV_DTYPE_BYTES[self.kv_cache_dtype]) * heads

    @property
    def kv_bytes(self) -> float:
        """Per device, what is left for KV; may be negative."""
        usable = self.gpu.memory_bytes * self.gpu_memory_utilization - self.reserved_bytes
        return usable - self.shape.weight_bytes / self.tp

    @property
    def least_kv_bytes(self) -> float:
        """Per device, what `LEAST_KV_TOKENS` take."""
        return LEAST_KV_TOKENS * self.kv_bytes_per_token

    @property
    def kv_tokens(self) -> int:
        """Tokens that find room."""
        return max(0, int(self.kv_bytes / self.kv_bytes_per_token))

    def kv_blocks(self, block_size: int) -> int:
        """Size of the KV pool in blocks: what `scheduler.num_target_blocks` or `num_draft_blocks` should be."""
        return self.kv_tokens // block_size

    def with_guest(self, guest: DeviceGroup) -> tuple[int, int]:
        """KV tokens of this group and of a drafter's that lives on the same devices, as in colocated sd.

        The drafter's weights lie on the first `guest.tp` of the devices, so those decide. Both pools get as many
        tokens, since the drafter follows every sequence.

        Raises:
            ValueError: the guest isn't on these devices, or they don't fit together.
        """
        # Else its passes would be priced on devices that nobody counts.
        if guest.gpu != self.gpu:
            raise ValueError(
                f"gpu is {guest.gpu.name}, but the drafter shares the target's devices, which are {self.gpu.name}; "
                "give it theirs, or devices of its own"
            )
        if guest.tp > self.tp:
            raise ValueError(
                f"tp is {guest.tp}, but the drafter shares the target's devices, of which there are {self.tp}; "
                "lower it, or give the drafter devices of its own"
            )
        per_token = self.kv_bytes_per_token + guest.kv_bytes_per_token
        left = self.kv_bytes - guest.shape.weight_bytes / guest.tp
        tokens = int(left / per_token)
        if tokens < LEAST_KV_TOKENS:
            raise ValueError(
                f"{self.shape.name} on {self.tp} {self.gpu.name} leaves {max(0.0, self.kv_bytes) / 1e9:.1f} GB per "
                f"device, too little for {guest.shape.name} ({guest.shape.weight_bytes / guest.tp / 1e9:.1f} GB) and "
                "KV for both; give the drafter a device of its own, or take a smaller one"
            )
        return tokens, tokens


def _check_cut(shape: ModelShape, tp: int) -> None:
    if tp < 1:
        raise ValueError(f"tp is {tp}, must be >= 1")
    fitting = [n for n in range(1, shape.num_heads + 1) if _divides(shape, n)]
    if not _divides(shape, tp):
        raise ValueError(
            f"tp is {tp}, which doesn't divide {shape.name}'s {shape.num_heads} heads ({shape.num_kv_heads} KV heads, "
            f"inner width {shape.intermediate_size}); use {', '.join(map(str, fitting[:8]))}"
        )


def _divides(shape: ModelShape, tp: int) -> bool:
    kv_fits = shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0
    return shape.num_heads % tp == 0 and kv_fits and shape.intermediate_size % tp == 0

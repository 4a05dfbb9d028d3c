"""GPUs as a cost model sees them: peaks, bandwidths, memory, and how much of the peaks kernels reach.

To add one, add a table to `data/gpus.toml` with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minedraft.sim.presets import find_preset


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device.

    Attributes:
        name: what the vendor calls it.
        source: where the figures come from.
        bf16_flops: dense peak, FLOP/s.
        fp8_flops: the same in fp8; 0 if it has none.
        memory_bytes: total, as its driver reports it.
        memory_bytes_per_s: peak of the memory's bandwidth.
        link: what joins the devices of a group.
        link_bytes_per_s: peak per device and direction.
        bandwidth_efficiency: share of the memory bandwidth that kernels reach.
        bf16_efficiency: share of the dense peak that large GEMMs reach.
        fp8_efficiency: the same in fp8.
        compute_exposed: share of the shorter of memory and compute time that the longer doesn't hide.
        link_efficiency: share of the link's bandwidth that an all-reduce reaches.
        all_reduce_latency_s: time of an all-reduce of next to nothing.

    Raises:
        ValueError: a figure is out of range; the message names it.
    """

    name: str
    source: str
    bf16_flops: float
    fp8_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    link: Literal["nvlink", "pcie"]
    link_bytes_per_s: float
    bandwidth_efficiency: float
    bf16_efficiency: float
    fp8_efficiency: float
    compute_exposed: float
    link_efficiency: float
    all_reduce_latency_s: float

    def __post_init__(self) -> None:
        for field in ("bf16_flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"Gpu.{field} is {getattr(self, field)}, must be > 0")
        for field in ("bandwidth_efficiency", "bf16_efficiency", "fp8_efficiency", "link_efficiency"):
            if not 0.0 < getattr(self, field) <= 1.0:
                raise ValueError(f"Gpu.{field} is {getattr(self, field)}, must be in (0, 1]")
        if not 0.0 <= self.compute_exposed <= 1.0:
            raise ValueError(f"Gpu.compute_exposed is {self.compute_exposed}, must be in [0, 1]")
        if not self.fp8_flops >= 0.0 or not self.all_reduce_latency_s >= 0.0:
            raise ValueError("Gpu.fp8_flops and Gpu.all_reduce_latency_s must be >= 0")


def load_gpu(name: str) -> Gpu:
    """The GPU of that name in `data/gpus.toml`.

    Raises:
        ValueError: there is none; the message offers near matches.
    """
    return Gpu(**find_preset("gpus.toml", "GPU", name))

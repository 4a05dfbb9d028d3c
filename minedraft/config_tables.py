"""The smaller tables of a configuration: `[scheduler]`, `[policies]`, `[devices]`, `[faults]` and `[slo]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from minedraft.config_base import Seconds, StepSeconds, Table

# --- [scheduler]


class SchedulerTable(Table):
    """The fields of `SchedulerConfig`, which see.

    `num_batches` counts in psd mode only (default 2); ar and sd have one batch, and ar has no draft pool.
    `draft_ingests_beside` is False by default for a drafter on the target's devices, and for PEARL's.
    """

    num_batches: int | None = None
    max_batch_size: int = 16
    max_num_seqs: int | None = None
    num_speculative_tokens: int = 3
    max_num_batched_tokens: int = 8192
    max_num_draft_batched_tokens: int | None = None
    draft_capacity: int | None = None
    max_model_len: int | None = None
    draft_max_model_len: int | None = None
    block_size: int = 16
    num_target_blocks: int = 65536
    num_draft_blocks: int = 65536
    draft_keeps_kv: bool = True
    draft_follows_target: bool = False
    draft_ingests_beside: bool = True
    kv_watermark: float = 0.01
    max_verify_failures: int = 3


# --- [policies]


class PoliciesTable(Table):
    """A policy per slot: a spec (`name`, `package.module:Class`, either with `,key=value`), or a table."""

    admission: str | dict[str, Any] | None = None
    assignment: str | dict[str, Any] | None = None
    rebalance: str | dict[str, Any] | None = None
    draft_length: str | dict[str, Any] | None = None
    selection: str | dict[str, Any] | None = None
    preemption: str | dict[str, Any] | None = None
    mode: str | dict[str, Any] | None = None


# --- [devices], [faults], [slo]


class DevicesTable(Table):
    """Who computes, and what the host adds.

    Attributes:
        num_target_devices: devices of the target's group, for per-device figures.
        num_draft_devices: the same of the drafter's own group; counts only where the drafter has one.
        colocated: the drafter shares the target's devices; by default it does in sd mode.
        round_overhead_s: host time per verification.
        num_replicas: targets, each with devices, a host and a core of its own, that share the drafter's devices and the
            arrivals; see `minedraft.sim.star`. Without devices of the drafter's own they share the arrivals only.
            `num_target_devices` and the whole of `[scheduler]` are those of one replica.
        router: who gives each request to a replica.
    """

    num_target_devices: int = Field(default=4, ge=1)
    num_draft_devices: int = Field(default=1, ge=1)
    colocated: bool | None = None
    round_overhead_s: StepSeconds = 0.0
    num_replicas: int = Field(default=1, ge=1, le=1024)
    router: Literal["round-robin", "least-requests"] = "round-robin"


class OutageTable(Table):
    """The drafter is lost at a time, and back after `duration_s` (never, if left out)."""

    at_s: Seconds
    duration_s: Seconds | None = None


class PauseTable(Table):
    """A device is busy with something else for a while."""

    device: Literal["target", "drafter"]
    at_s: Seconds
    duration_s: Seconds


class FaultsTable(Table):
    """See `minedraft.sim.faults.Faults`."""

    outages: Annotated[tuple[OutageTable, ...], Field(strict=False)] = ()
    pauses: Annotated[tuple[PauseTable, ...], Field(strict=False)] = ()
    draft_failure_rate: float = 0.0
    verify_failure_rate: float = 0.0

    def build(self, seed: int) -> Any:
        """The faults."""
        from minedraft.sim.faults import DevicePause, DrafterOutage, Faults

        outages = [
            DrafterOutage(outage.at_s) if outage.duration_s is None else DrafterOutage(outage.at_s, outage.duration_s)
            for outage in self.outages
        ]
        pauses = [DevicePause(pause.device, pause.at_s, pause.duration_s) for pause in self.pauses]
        return Faults(tuple(outages), tuple(pauses), self.draft_failure_rate, self.verify_failure_rate, seed)


class SloTable(Table):
    """Limits in milliseconds that a good request keeps; turns on `request_goodput`."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

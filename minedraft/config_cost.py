"""`[cost]`: how long works take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field

from minedraft.config_base import StepSeconds, Table, building, with_kind
from minedraft.config_messages import FieldError


class ConstantCostTable(Table):
    """See `minedraft.sim.cost.ConstantCost`."""

    kind: Literal["constant"]
    verify_base_s: StepSeconds
    verify_per_token_s: StepSeconds = 0.0
    draft_base_s: StepSeconds = 0.0
    draft_per_token_s: StepSeconds = 0.0
    prefill_s: StepSeconds = 0.0
    draft_ingest_s: StepSeconds = 0.0

    def build(self) -> Any:
        """The cost model."""
        from minedraft.sim.cost import ConstantCost

        return ConstantCost(**self.arguments())


class LinearCostTable(Table):
    """See `minedraft.sim.cost.LinearCost`."""

    kind: Literal["linear"]
    verify_base_s: StepSeconds = 0.0
    verify_per_seq_s: StepSeconds = 0.0
    verify_per_token_s: StepSeconds = 0.0
    verify_per_context_token_s: StepSeconds = 0.0
    prefill_base_s: StepSeconds = 0.0
    prefill_per_seq_s: StepSeconds = 0.0
    prefill_per_token_s: StepSeconds = 0.0
    prefill_per_context_token_s: StepSeconds = 0.0
    draft_base_s: StepSeconds = 0.0
    draft_per_seq_s: StepSeconds = 0.0
    draft_per_token_s: StepSeconds = 0.0
    draft_per_context_token_s: StepSeconds = 0.0
    draft_prefill_base_s: StepSeconds = 0.0
    draft_prefill_per_seq_s: StepSeconds = 0.0
    draft_prefill_per_token_s: StepSeconds = 0.0
    draft_prefill_per_context_token_s: StepSeconds = 0.0

    def build(self) -> Any:
        """The cost model."""
        from minedraft.sim.cost import LinearCost

        return LinearCost(**self.arguments())


class PaperCostTable(Table):
    """Published stage times, see `minedraft.sim.cost.paper_cost`."""

    kind: Literal["paper"] = "paper"
    drafter: str = "qwen3-1.7b"

    def build(self) -> Any:
        """The cost model."""
        from minedraft.sim.cost import paper_cost

        return paper_cost(self.drafter)


class StepsTable(Table):
    """A source of step times for one device group."""

    def build_steps(self, section: str) -> Any:
        """The `minedraft.sim.steps.StepModel`; `section` is the table's dotted name, for messages."""
        raise NotImplementedError


class GpuGroupTable(StepsTable):
    """A model on a group of GPUs, see `minedraft.sim.device_group.DeviceGroup`.

    Attributes:
        model: a preset of `sim/data/models.toml`, or the path of a Hugging Face `config.json`.
        path: the latter, relative to the configuration's file; instead of `model`.
        gpu: a preset of `sim/data/gpus.toml`.
        tp: devices of the group.
        quantization: instead of the model's own.
        num_fused_inputs: likewise; 2 makes an EAGLE or MTP head of a model of one layer, as its `config.json` looks.
    """

    model: str | None = None
    path: str | None = None
    gpu: str
    tp: int = 1
    quantization: str | None = None
    num_fused_inputs: int | None = None
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"
    gpu_memory_utilization: float = 0.9

    def build_shape(self, section: str) -> Any:
        """The `ModelShape`."""
        from minedraft.sim.models import load_model

        if (self.model is None) == (self.path is None):
            raise FieldError(f"{section}.model", 'give exactly one of model and path, such as model = "qwen3-32b"')
        with building(f"{section}.model" if self.path is None else f"{section}.path"):
            shape = load_model(self.model or f"{Path(self.path or '')}")
        changes = {name: getattr(self, name) for name in ("quantization", "num_fused_inputs")}
        with building(section):
            return replace(shape, **{name: value for name, value in changes.items() if value is not None})

    def build_group(self, section: str) -> Any:
        """The `DeviceGroup`."""
        from minedraft.sim.device_group import DeviceGroup
        from minedraft.sim.gpus import load_gpu

        shape = self.build_shape(section)
        with building(f"{section}.gpu"):
            gpu = load_gpu(self.gpu)
        limits = {name: getattr(self, name) for name in ("tp", "kv_cache_dtype", "gpu_memory_utilization")}
        with building(section):
            return DeviceGroup(shape, gpu, **limits)


class RooflineGroupTable(GpuGroupTable):
    """See `minedraft.sim.roofline.RooflineSettings`; what is left out keeps its default there."""

    cuda_graph: bool = True
    kernel_gap_s: StepSeconds | None = None
    launch_s: StepSeconds | None = None
    attention_efficiency: float | None = None
    expert_efficiency: float | None = None
    weight_only_efficiency: float | None = None
    overhead_s: StepSeconds | None = None
    overhead_per_seq_s: StepSeconds | None = None
    overhead_max_seqs: int | None = None

    def build_steps(self, section: str) -> Any:
        """The step model."""
        from minedraft.sim.roofline import Roofline, RooflineSettings

        group = self.build_group(section)
        with building(section):
            return Roofline(group, RooflineSettings(**_given(self, GpuGroupTable)))


class MeasuredGroupTable(GpuGroupTable):
    """See `minedraft.sim.measured.MeasuredSettings`; what is left out keeps its default there."""

    cuda_graph: bool = True
    kernel_gap_s: StepSeconds | None = None
    overhead_s: StepSeconds | None = None
    overhead_per_seq_s: StepSeconds | None = None
    overhead_max_seqs: int | None = None
    outside: Literal["refuse", "flag"] = "refuse"

    def build_steps(self, section: str) -> Any:
        """The step model."""
        from minedraft.sim.measured import Measured, MeasuredSettings

        group = self.build_group(section)
        with building(section):
            return Measured(group, self.gpu.lower(), MeasuredSettings(**_given(self, GpuGroupTable)))


class ProfileGroupTable(StepsTable):
    """A file of measured step times, see `minedraft.sim.profile`.

    Attributes:
        path: of the file, relative to the configuration's.
        outside: what to do with steps beyond the file's grid.
    """

    path: str
    outside: Literal["refuse", "flag"] = "refuse"

    def build_steps(self, section: str) -> Any:
        """The step model."""
        from minedraft.sim.profile import Profile, ProfileTable

        with building(f"{section}.path"):
            return Profile(ProfileTable.load(self.path), self.outside)


def _given(table: Table, base: type[Table]) -> dict[str, Any]:
    """The fields of a table that its base doesn't have and that were given."""
    names = [name for name in type(table).model_fields if name not in base.model_fields]
    return {name: value for name in names if (value := getattr(table, name)) is not None}


AnySteps = TypeVar("AnySteps", bound=StepsTable)
AnyGroup = TypeVar("AnyGroup", bound=GpuGroupTable)


class StepCostTable(Table, Generic[AnySteps]):
    """What the cost tables share that price forward passes, see `minedraft.sim.steps.StepCost`."""

    target: AnySteps
    draft: AnySteps | None = None

    def build(self) -> Any:
        """The cost model."""
        from minedraft.sim.steps import StepCost

        drafter = None if self.draft is None else self.draft.build_steps("cost.draft")
        return StepCost(self.target.build_steps("cost.target"), drafter)


class GpuCostTable(StepCostTable[AnyGroup], Generic[AnyGroup]):
    """What those share that know the GPUs, and so how much KV there is room for."""

    def build(self, *, fuses_once: bool = False) -> Any:
        """The cost model.

        Args:
            fuses_once: the drafter is a head that joins the target's hidden states in its first pass only (EAGLE-3).
        """
        cost = super().build()
        if self.draft is None or not fuses_once:
            return cost
        later = self.draft.model_copy(update={"num_fused_inputs": 0})
        return replace(cost, later=later.build_steps("cost.draft"))

    def kv_blocks(self, block_size: int, *, colocated: bool = False) -> tuple[int, int]:
        """Blocks of the target's and the drafter's pool; 0 for the latter if there is no drafter.

        Args:
            block_size: tokens per block.
            colocated: the drafter lives on the target's devices.

        Raises:
            FieldError: a model doesn't fit.
        """
        group = self.target.build_group("cost.target")
        if self.draft is None:
            return group.kv_blocks(block_size), 0
        guest = self.draft.build_group("cost.draft")
        if not colocated:
            return group.kv_blocks(block_size), guest.kv_blocks(block_size)
        with building("cost.draft"):
            num_target, num_draft = group.with_guest(guest)
        return num_target // block_size, num_draft // block_size

    @property
    def num_target_devices(self) -> int:
        """Devices of the target's group."""
        return self.target.tp

    @property
    def num_draft_devices(self) -> int:
        """Devices of the drafter's group; 0 without one."""
        return 0 if self.draft is None else self.draft.tp


class RooflineCostTable(GpuCostTable[RooflineGroupTable]):
    """See `minedraft.sim.roofline`. Without `draft` only mode ar can run."""

    kind: Literal["roofline"]


class MeasuredCostTable(GpuCostTable[MeasuredGroupTable]):
    """See `minedraft.sim.measured`. Without `draft` only mode ar can run."""

    kind: Literal["measured"]


class ProfileCostTable(StepCostTable[ProfileGroupTable]):
    """See `minedraft.sim.profile`. Without `draft` only mode ar can run."""

    kind: Literal["profile"]


Cost = Annotated[
    ConstantCostTable | LinearCostTable | PaperCostTable | RooflineCostTable | MeasuredCostTable | ProfileCostTable,
    Field(discriminator="kind"),
    BeforeValidator(lambda value: value or {"kind": "paper"}),
    with_kind(None, drafter="paper"),
]

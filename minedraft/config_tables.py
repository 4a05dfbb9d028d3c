"""The tables of a configuration, and what each builds.

Law of this file: names and defaults only where the part's own class has them too; ranges are checked by that class.
Parts of the simulated world are imported inside `build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from minedraft.config_messages import FieldError, built_fault

# A step of a target takes milliseconds; a larger figure is one that was meant in milliseconds.
LONGEST_STEP_S: Final = 10.0

Seconds = Annotated[float, Field(ge=0.0)]
StepSeconds = Annotated[float, Field(ge=0.0, le=LONGEST_STEP_S)]


class Table(BaseModel):
    """A table of a configuration: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def arguments(self) -> dict[str, Any]:
        """The fields as keyword arguments, without the `kind`."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}


def _with_kind(default: str | None, **by_key: str) -> BeforeValidator:
    """Fill in a `kind` that was left out where the other keys, or their absence, tell it."""

    def fill(value: Any) -> Any:
        if not isinstance(value, Mapping) or "kind" in value:
            return value
        kinds = [kind for key, kind in by_key.items() if key in value]
        kind = kinds[0] if kinds else default
        return dict(value) if kind is None else {"kind": kind, **value}

    return BeforeValidator(fill)


def _shorthand(key: str, types: tuple[type, ...], **rest: Any) -> BeforeValidator:
    """Take a bare value for a table: `output_lens = 256`."""

    def expand(value: Any) -> Any:
        plain = isinstance(value, types) and not isinstance(value, bool)
        return {**rest, key: value} if plain else value

    return BeforeValidator(expand)


# --- [scheduler]


class SchedulerTable(Table):
    """The fields of `SchedulerConfig`, which see.

    `num_batches` counts in psd mode only (default 2); ar and sd have one batch, and ar has no draft pool.
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


# --- [cost]


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
    """

    model: str | None = None
    path: str | None = None
    gpu: str
    tp: int = 1
    quantization: str | None = None
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"
    gpu_memory_utilization: float = 0.9

    def build_group(self, section: str) -> Any:
        """The `DeviceGroup`."""
        from minedraft.sim.device_group import DeviceGroup
        from minedraft.sim.gpus import load_gpu
        from minedraft.sim.models import load_model

        if (self.model is None) == (self.path is None):
            raise FieldError(f"{section}.model", 'give exactly one of model and path, such as model = "qwen3-32b"')
        with building(f"{section}.model" if self.path is None else f"{section}.path"):
            shape = load_model(self.model or f"{Path(self.path or '')}")
        with building(f"{section}.gpu"):
            gpu = load_gpu(self.gpu)
        limits = {name: getattr(self, name) for name in ("tp", "kv_cache_dtype", "gpu_memory_utilization")}
        with building(section):
            if self.quantization is not None:
                shape = replace(shape, quantization=self.quantization)
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
    _with_kind(None, drafter="paper"),
]


# --- [acceptance]


class AcceptanceTable(Table):
    """What all acceptance models share: `draft_probs` reports their rates to selection policies."""

    draft_probs: bool = False

    def arguments(self) -> dict[str, Any]:
        """See `Table`; `draft_probs` is the world's."""
        return {name: value for name, value in super().arguments().items() if name != "draft_probs"}


class SyntheticAcceptanceTable(AcceptanceTable):
    """vLLM's two settings, of which exactly one is given."""

    kind: Literal["synthetic"]
    synthetic_acceptance_rates: Annotated[tuple[float, ...] | None, Field(strict=False)] = None
    synthetic_acceptance_length: float | None = None

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import SyntheticLength, SyntheticRates

        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if (rates is None) == (length is None):
            raise ValueError("give exactly one of synthetic_acceptance_rates and synthetic_acceptance_length")
        if length is not None:
            return SyntheticLength(length, max(1, num_speculative_tokens), seed=seed)
        assert rates is not None
        if len(rates) < num_speculative_tokens:
            raise ValueError(
                f"synthetic_acceptance_rates is a list of {len(rates)} for scheduler.num_speculative_tokens = "
                f"{num_speculative_tokens}; give one rate per speculative token"
            )
        return SyntheticRates(rates, seed=seed)


class ConstantAcceptanceTable(AcceptanceTable):
    """See `minedraft.sim.acceptance.ConstantRate`."""

    kind: Literal["constant"] = "constant"
    alpha: float = 0.7

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import ConstantRate

        return ConstantRate(self.alpha, seed=seed)


class BetaAcceptanceTable(AcceptanceTable):
    """See `minedraft.sim.acceptance.BetaRate`."""

    kind: Literal["beta"]
    mean: float
    concentration: float

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import BetaRate

        return BetaRate(self.mean, self.concentration, seed=seed)


class RisingAcceptanceTable(AcceptanceTable):
    """See `minedraft.sim.acceptance.RisingRate`."""

    kind: Literal["rising"]
    first: float
    limit: float
    rise: float = 0.5

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance import RisingRate

        return RisingRate(self.first, self.limit, self.rise, seed=seed)


class PresetAcceptanceTable(AcceptanceTable):
    """Published figures of a real drafter, see `minedraft.sim.acceptance_presets`."""

    kind: Literal["preset"]
    name: str

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance_presets import load_acceptance

        return load_acceptance(self.name).build(num_speculative_tokens, seed=seed)


class LogAcceptanceTable(AcceptanceTable):
    """A recorded log or journal, see `minedraft.sim.acceptance_log` and `minedraft.sim.acceptance_replay`.

    Attributes:
        path: of the file, relative to the configuration's.
        by_id: each request replays the recorded one of its own id, instead of one drawn by lot.
    """

    kind: Literal["log"]
    path: str
    by_id: bool = False

    def build(self, seed: int, num_speculative_tokens: int) -> Any:
        """The acceptance model."""
        from minedraft.sim.acceptance_log import read_acceptance_log
        from minedraft.sim.acceptance_replay import LoggedAcceptance

        with building("acceptance.path"):
            requests = read_acceptance_log(self.path)
        return LoggedAcceptance(requests, by_id=self.by_id, seed=seed)


Acceptance = Annotated[
    SyntheticAcceptanceTable
    | ConstantAcceptanceTable
    | BetaAcceptanceTable
    | RisingAcceptanceTable
    | PresetAcceptanceTable
    | LogAcceptanceTable,
    Field(discriminator="kind"),
    _with_kind(
        "constant",
        synthetic_acceptance_rates="synthetic",
        synthetic_acceptance_length="synthetic",
        mean="beta",
        concentration="beta",
        first="rising",
        limit="rising",
        name="preset",
        path="log",
    ),
]


# --- [workload]


class AtOnceTable(Table):
    """All requests arrive at one moment."""

    kind: Literal["at-once"] = "at-once"
    at_s: Seconds = 0.0
    max_concurrency: ClassVar[int | None] = None

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import AtOnce

        return AtOnce(self.at_s)


class PoissonTable(Table):
    """Memoryless arrivals, `rate` requests per second."""

    kind: Literal["poisson"]
    rate: float
    max_concurrency: ClassVar[int | None] = None

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import Poisson

        return Poisson(self.rate)


class GammaTable(Table):
    """Bursty (cv > 1) or regular (cv < 1) arrivals, `rate` requests per second."""

    kind: Literal["gamma"]
    rate: float
    cv: float
    max_concurrency: ClassVar[int | None] = None

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import Gamma

        return Gamma(self.rate, self.cv)


class ClosedLoopTable(Table):
    """`concurrency` clients, each of which sends its next request when its last one has ended."""

    kind: Literal["closed-loop"]
    concurrency: int = Field(ge=1)

    @property
    def max_concurrency(self) -> int:
        """For `SimBackend`."""
        return self.concurrency

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import AtOnce

        return AtOnce()


Arrivals = Annotated[
    AtOnceTable | PoissonTable | GammaTable | ClosedLoopTable,
    Field(discriminator="kind"),
    _shorthand("kind", (str,)),
]


class FixedLengthTable(Table):
    """Always the same length."""

    kind: Literal["fixed"] = "fixed"
    tokens: int

    def build(self) -> Any:
        """The length distribution."""
        from minedraft.sim.workload import FixedLength

        return FixedLength(self.tokens)


class LognormalLengthTable(Table):
    """See `minedraft.sim.workload.LognormalLength`."""

    kind: Literal["lognormal"]
    mean: float
    p50: float | None = None
    sigma: float | None = None
    min_tokens: int = 1
    max_tokens: int | None = None

    def build(self) -> Any:
        """The length distribution."""
        from minedraft.sim.workload import LognormalLength

        return LognormalLength(**self.arguments())


class EmpiricalLengthTable(Table):
    """Lengths observed in a column of a CSV file."""

    kind: Literal["empirical"]
    path: str
    column: str

    def build(self) -> Any:
        """The length distribution."""
        from minedraft.sim.workload import EmpiricalLength

        return EmpiricalLength.from_csv(self.path, self.column)


Length = Annotated[
    FixedLengthTable | LognormalLengthTable | EmpiricalLengthTable,
    Field(discriminator="kind"),
    _shorthand("tokens", (int,), kind="fixed"),
    _with_kind(None, tokens="fixed", mean="lognormal", column="empirical"),
]


class AbortsTable(Table):
    """Clients that leave early, see `minedraft.sim.workload.Aborts`."""

    probability: float
    mean_patience_s: Seconds


class SyntheticWorkloadTable(Table):
    """See `minedraft.sim.workload.SyntheticWorkload`."""

    kind: Literal["synthetic"] = "synthetic"
    num_requests: int = Field(default=200, ge=1)
    arrivals: Arrivals = AtOnceTable()
    prompt_lens: Length = FixedLengthTable(tokens=64)
    output_lens: Length = FixedLengthTable(tokens=256)
    max_tokens: int | None = None
    max_draft_tokens: int | None = None
    aborts: AbortsTable | None = None

    @property
    def max_concurrency(self) -> int | None:
        """For `SimBackend`."""
        return self.arrivals.max_concurrency

    @property
    def longest_request(self) -> int | None:
        """Tokens of every request, if all are alike."""
        if not isinstance(self.prompt_lens, FixedLengthTable) or not isinstance(self.output_lens, FixedLengthTable):
            return None
        return self.prompt_lens.tokens + min(self.output_lens.tokens, self.max_tokens or self.output_lens.tokens)

    def build(self, seed: int) -> Any:
        """The workload."""
        from minedraft.sim.workload import Aborts, SyntheticWorkload

        with building("workload.arrivals"):
            arrivals = self.arrivals.build()
        with building("workload.prompt_lens"):
            prompt_lens = self.prompt_lens.build()
        with building("workload.output_lens"):
            output_lens = self.output_lens.build()
        with building("workload.aborts"):
            aborts = None if self.aborts is None else Aborts(**self.aborts.arguments())
        return SyntheticWorkload(
            arrivals,
            prompt_lens,
            output_lens,
            self.num_requests,
            seed=seed,
            max_tokens=self.max_tokens,
            max_draft_tokens=self.max_draft_tokens,
            aborts=aborts,
        )


class NamedWorkloadTable(Table):
    """Traffic with published statistics, see `minedraft.sim.workload.NAMED_WORKLOADS`."""

    kind: Literal["azure-conv-like", "azure-code-like"]
    num_requests: int = Field(default=1000, ge=1)
    rate: float | None = None
    max_tokens: int | None = None
    max_concurrency: ClassVar[int | None] = None
    longest_request: ClassVar[int | None] = None

    def build(self, seed: int) -> Any:
        """The workload."""
        from minedraft.sim.workload import NAMED_WORKLOADS

        given = {name: getattr(self, name) for name in ("rate", "max_tokens") if getattr(self, name) is not None}
        return NAMED_WORKLOADS[self.kind](self.num_requests, seed=seed, **given)


class TraceWorkloadTable(Table):
    """A recorded trace, see `minedraft.sim.traces`. Without a `format` it is told from the file."""

    kind: Literal["trace"] = "trace"
    path: str
    format: Literal["azure", "mooncake", "sharegpt", "jsonl"] | None = None
    num_requests: int | None = Field(default=None, ge=1)
    time_scale: float = 1.0
    max_prompt_len: int | None = None
    max_output_len: int | None = None
    max_tokens: int | None = None
    arrivals: Arrivals | None = None
    longest_request: ClassVar[int | None] = None

    @property
    def max_concurrency(self) -> int | None:
        """For `SimBackend`."""
        return None if self.arrivals is None else self.arrivals.max_concurrency

    def build(self, seed: int) -> Any:
        """The workload."""
        from minedraft.sim.traces import Trace, TraceOptions

        if not Path(self.path).is_file():
            raise FieldError("workload.path", f"no file {self.path!r}; check the path")
        with building("workload.arrivals"):
            arrivals = None if self.arrivals is None else self.arrivals.build()
        options = TraceOptions(
            max_requests=self.num_requests,
            time_scale=self.time_scale,
            max_prompt_len=self.max_prompt_len,
            max_output_len=self.max_output_len,
            max_tokens=self.max_tokens,
            arrivals=arrivals,
            seed=seed,
        )
        return Trace(self.path, self.format or guess_trace_format(Path(self.path)), options)


def guess_trace_format(path: Path) -> str:
    """The trace format that a file seems to have, by its ending and, for JSON lines, its first line."""
    if path.suffix == ".csv":
        return "azure"
    if path.suffix == ".json":
        return "sharegpt"
    with path.open("rb") as file:
        return "mooncake" if b'"input_length"' in file.readline() else "jsonl"


Workload = Annotated[
    SyntheticWorkloadTable | NamedWorkloadTable | TraceWorkloadTable,
    Field(discriminator="kind"),
    _with_kind("synthetic", path="trace"),
]

NAMED_WORKLOAD_KINDS: Final = ("synthetic", "azure-conv-like", "azure-code-like")


# --- [devices], [faults], [slo]


class DevicesTable(Table):
    """Who computes, and what the host adds.

    Attributes:
        num_target_devices: devices of the target's group, for per-device figures.
        num_draft_devices: the same of the drafter's own group; counts only where the drafter has one.
        colocated: the drafter shares the target's devices; by default it does in sd mode.
        round_overhead_s: host time per verification.
    """

    num_target_devices: int = Field(default=4, ge=1)
    num_draft_devices: int = Field(default=1, ge=1)
    colocated: bool | None = None
    round_overhead_s: StepSeconds = 0.0


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


# --- faults of fields


@contextmanager
def building(section: str) -> Iterator[None]:
    """Turn a part's complaint about its arguments into a fault of a dotted field."""
    try:
        yield
    except FieldError:
        raise
    except (ValueError, OSError) as error:
        raise built_fault(section, error) from error

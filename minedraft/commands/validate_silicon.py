"""Measured serving runs of real vLLM (the "silicon sample" of aiconfigurator-core), and the simulator's answer to each.

The sample says per row: model, GPU, tensor parallelism, prompt and answer length, number of clients, and the means of
TTFT and TPOT. It doesn't say how the load was made. Assumed for all rows is what the public InferenceMAX benchmark
does, from which its Llama-3.1-70B rows seem to be: each client sends its next request when the last has ended, all
start at once, ten requests per client, lengths uniform between 80 % and 100 % of the nominal ones. Rows of other
sources may have been made otherwise, and are reported under their own names.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from minedraft.commands.errors import CommandError

if TYPE_CHECKING:
    import numpy as np

SAMPLE: Final = "silicon_sample.csv"
MODELS: Final = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
}
"""Rows of the sample that can be simulated, and the preset of each."""

FITTED_MODEL: Final = "llama-3.1-70b-fp8"
FITTED_GPU: Final = "h100"
REQUESTS_PER_CLIENT: Final = 10
SHORTEST_SHARE: Final = 0.8
BLOCK_SIZE: Final = 16
MAX_NUM_BATCHED_TOKENS: Final = 8192  # vLLM's default for its server on these GPUs
MEMORY_UTILIZATION: Final = 0.9  # vLLM's default


@dataclass(frozen=True, slots=True)
class SiliconRow:
    """One measured run.

    Attributes:
        model: preset.
        gpu: preset.
        tp: devices.
        kv_cache_dtype: the checkpoints of Llama in fp8 ask for an fp8 cache.
        prompt_len: nominal tokens.
        output_len: nominal tokens.
        num_clients: requests in flight.
        ttft_ms: measured mean.
        tpot_ms: measured mean.
    """

    model: str
    gpu: str
    tp: int
    kv_cache_dtype: str
    prompt_len: int
    output_len: int
    num_clients: int
    ttft_ms: float
    tpot_ms: float

    @property
    def is_fitted(self) -> bool:
        """Whether the overheads may be fitted to it; all others are held out."""
        return self.model == FITTED_MODEL and self.gpu == FITTED_GPU


@dataclass(frozen=True, slots=True)
class Overheads:
    """What no operator table holds, fitted to the rows that aren't held out.

    Attributes:
        step_s: per pass.
        step_per_seq_s: per pass and sequence, up to the most clients of a fitted row.
        max_seqs: that number.
        request_s: per request before its first token: HTTP, tokenising, detokenising.
    """

    step_s: float = 0.0
    step_per_seq_s: float = 0.0
    max_seqs: int = 64
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the simulator says to a row.

    Attributes:
        row: the measured run.
        ttft_ms: simulated mean, with the overhead per request.
        tpot_ms: simulated mean.
        num_extrapolated: passes that lay outside the tables.
    """

    row: SiliconRow
    ttft_ms: float
    tpot_ms: float
    num_extrapolated: int = 0

    @property
    def ttft_error(self) -> float:
        """Relative, signed."""
        return self.ttft_ms / self.row.ttft_ms - 1.0

    @property
    def tpot_error(self) -> float:
        """Relative, signed."""
        return self.tpot_ms / self.row.tpot_ms - 1.0


def read_rows() -> tuple[list[SiliconRow], int]:
    """The rows that can be simulated, and how many others vLLM has on these GPUs.

    Raises:
        CommandError: the package isn't installed.
    """
    from minedraft.sim.operator_tables import SYSTEMS, systems_folder

    try:
        path = systems_folder() / SAMPLE
    except ValueError as error:
        raise CommandError(str(error)) from error
    gpus = {system: gpu for gpu, system in SYSTEMS.items()}
    rows, num_others = [], 0
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["backend"] != "vllm" or line["mode"] != "agg" or line["system"] not in gpus:
                continue
            if line["model_path"] in MODELS:
                rows.append(_row(line, gpus[line["system"]]))
            else:
                num_others += 1
    return rows, num_others


def _row(line: dict[str, str], gpu: str) -> SiliconRow:
    model = MODELS[line["model_path"]]
    quantized = line["precision"] == "fp8"
    return SiliconRow(
        model=f"{model}-fp8" if quantized else model,
        gpu=gpu,
        tp=int(float(line["tp_size"])),
        kv_cache_dtype="fp8" if quantized and model.startswith("llama") else "bf16",
        prompt_len=int(line["isl"]),
        output_len=int(line["osl"]),
        num_clients=int(float(line["batch_size"])),
        ttft_ms=float(line["silicon_ttft_ms"]),
        tpot_ms=float(line["silicon_tpot_ms"]),
    )


@dataclass(frozen=True, slots=True)
class _UniformLength:
    """A `minedraft.sim.workload.Lengths`."""

    least: int
    most: int

    @classmethod
    def up_to(cls, most: int) -> _UniformLength:
        return cls(int(SHORTEST_SHARE * most), most)

    def values(self, rng: np.random.Generator) -> Iterator[int]:
        while True:
            yield from rng.integers(self.least, self.most + 1, 1024).tolist()


def answer(row: SiliconRow, kind: str, overheads: Overheads, requests_per_client: int = REQUESTS_PER_CLIENT) -> Answer:
    """Simulate a row.

    Args:
        row: what was measured.
        kind: of the cost model, measured or roofline.
        overheads: what to add.
        requests_per_client: how long the run is.

    Raises:
        ValueError: the model doesn't fit, or the tables don't cover it.
        CostError: a pass can't be priced.
    """
    from minedraft import Engine, Scheduler, SchedulerConfig, load_policies
    from minedraft.journal import Recorder
    from minedraft.metrics import MetricsCollector
    from minedraft.sim.acceptance import ConstantRate
    from minedraft.sim.backend import SimBackend
    from minedraft.sim.steps import StepCost
    from minedraft.sim.workload import AtOnce, SyntheticWorkload

    steps = _steps(row, kind, overheads)
    config = SchedulerConfig(
        num_batches=1,
        max_batch_size=row.num_clients,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        block_size=BLOCK_SIZE,
        num_target_blocks=steps.group.kv_blocks(BLOCK_SIZE),
        num_draft_blocks=0,
    )
    prompts, outputs = _UniformLength.up_to(row.prompt_len), _UniformLength.up_to(row.output_len)
    num_requests = row.num_clients * requests_per_client
    workload = SyntheticWorkload(AtOnce(), prompts, outputs, num_requests=num_requests, seed=0)
    world = SimBackend(workload, StepCost(steps), ConstantRate(0.0), max_concurrency=row.num_clients)
    collector = MetricsCollector()
    engine = Engine(Scheduler(config, load_policies({"mode": "fixed,mode=ar"})), Recorder(world, collector))
    for _ in engine.outputs():
        pass
    summary = collector.summarize().to_dict()
    ttft_ms = summary["mean_ttft_ms"] + 1e3 * overheads.request_s
    fence = getattr(steps, "fence", None)
    return Answer(row, ttft_ms, summary["mean_tpot_ms"], 0 if fence is None else fence.num_crossed)


def _steps(row: SiliconRow, kind: str, overheads: Overheads) -> Any:
    from minedraft.sim.device_group import DeviceGroup
    from minedraft.sim.gpus import load_gpu
    from minedraft.sim.measured import Measured, MeasuredSettings
    from minedraft.sim.models import load_model
    from minedraft.sim.roofline import Roofline, RooflineSettings

    shape, gpu = load_model(row.model), load_gpu(row.gpu)
    group = DeviceGroup(shape, gpu, row.tp, row.kv_cache_dtype, MEMORY_UTILIZATION)
    added: dict[str, Any] = {
        "overhead_s": overheads.step_s,
        "overhead_per_seq_s": overheads.step_per_seq_s,
        "overhead_max_seqs": overheads.max_seqs,
    }
    if kind == "roofline":
        return Roofline(group, RooflineSettings(**added))
    return Measured(group, row.gpu, MeasuredSettings(**added, outside="flag"))


def fit(answers: Sequence[Answer]) -> Overheads:
    """Overheads that explain what is missing in answers given without any; none of them is negative.

    TPOT: least squares of the relative error in (1, clients). TTFT: the median of what is missing, since rows in
    which requests wait for memory miss by seconds.
    """
    import numpy as np

    clients = np.array([answer.row.num_clients for answer in answers], float)
    real = np.array([answer.row.tpot_ms for answer in answers])
    missing = real - np.array([answer.tpot_ms for answer in answers])
    columns = np.stack([np.ones_like(clients), clients], axis=1)
    step, per_seq = np.linalg.lstsq(columns / real[:, None], missing / real, rcond=None)[0]
    if per_seq < 0.0:
        step, per_seq = float(np.sum(missing / real**2) / np.sum(1.0 / real**2)), 0.0
    elif step < 0.0:
        step, per_seq = 0.0, float(np.sum(clients * missing / real**2) / np.sum((clients / real) ** 2))
    return Overheads(
        step_s=max(0.0, float(step)) / 1e3,
        step_per_seq_s=max(0.0, float(per_seq)) / 1e3,
        max_seqs=int(clients.max()),
        request_s=max(0.0, float(np.median([answer.row.ttft_ms - answer.ttft_ms for answer in answers]))) / 1e3,
    )

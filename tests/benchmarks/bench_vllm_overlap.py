"""Batch-parallel speculation inside vLLM against stock vLLM, on two CPU cores, one for each group.

Run: .venv-vllm/bin/python tests/benchmarks/bench_vllm_overlap.py [--running 16] [--best-of 3] [--quick] [--json FILE]

Target and draft are one tiny random Llama, made deep with layers that pass their input on: the draft always agrees
(or, with `--noise`, now and then doesn't), and depth sets how long each takes, so that verification and drafting of a
round can be made near each other. What is compared is scheduling; the models are worth nothing.

Every row is a fresh engine in a process of its own, pinned to its cores, and serves the same requests: 2m of them, all
at once, as long as each other, after a shorter warm-up. Rows with m running requests do that in two waves. The best of
several rounds over all rows is shown, since whatever else runs on the machine only ever adds. Stock vLLM gets one core
as well as both: on both it runs as it does by default, with its engine core and its worker in processes of their own.

A second table is about feedback: how long the accepted tokens of 64 requests take from the model's output in the
scheduler's hands to the drafter that has them.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from overlap import Overlap, read_overlap
from rich.console import Console
from rich.table import Table
from vllm_row import MEASURED_PREFIX, Load, Row

BLOCK_SIZE = 32
VOCAB_SIZE = 128
TABLE_WIDTH = 150
ONE_PROCESS = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
WANTED = {"hidden": 0.95, "busy": 0.97, "step_ratio": 1.05, "feedback_ms": 2.0}


@dataclass(frozen=True, slots=True)
class Result:
    """The best run of a row.

    Attributes:
        row: what was run.
        tokens_per_s: output tokens per second of wall time.
        texts: by request id.
        overlap: figures of the recorded run; None for stock vLLM.
    """

    row: Row
    tokens_per_s: float
    texts: Mapping[str, list[int]]
    overlap: Overlap | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the groups run, and what every engine there is told.

    Attributes:
        target: the folder of the target model.
        draft: that of the draft model.
        num_speculative_tokens: k, the same in all rows.
        engine: arguments for every engine, the drafter's included.
        target_only: arguments for every engine that holds the target.
        drafter: settings of minedraft's drafter beside its engine.
        cpus: cores of the target, then of the drafter; empty where cores don't matter.
        num_draft_devices: devices of the drafter's own; 0 where it shares the target's.
        env: environment variables of every process with the target.
    """

    target: Path
    draft: Path
    num_speculative_tokens: int
    engine: Mapping[str, Any]
    target_only: Mapping[str, Any]
    drafter: Mapping[str, Any]
    cpus: tuple[int, ...] = ()
    num_draft_devices: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    def stock(self, name: str, kind: str, running: int, load: Load, *, both: bool = False) -> Row:
        """Stock vLLM, plain or with its own `draft_model` speculation, on one device or on both."""
        engine = {**self._limits(running, load), **self.target_only, "model": str(self.target)}
        if kind == "draft_model":
            engine["speculative_config"] = {
                "method": "draft_model",
                "model": str(self.draft),
                "num_speculative_tokens": self.num_speculative_tokens,
            }
        cpus, env = self.cpus[:1], {**self.env, **ONE_PROCESS}
        if both:
            # With more than one thread an engine in the calling process is several times slower.
            cpus = self.cpus
            env = {
                **self.env,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            }
        return Row(name, kind, running, 1 + both, engine, load, cpus, env)

    def minedraft(self, name: str, kind: str, running: int, load: Load, journal: Path) -> Row:
        """The core inside vLLM; in `psd` half of the running requests are in each sub-batch."""
        settings: dict[str, Any] = {"mode": kind, "journal": str(journal)}
        if kind != "ar":
            engine = {**self.engine, "model": str(self.draft)}
            drafter = {**self.drafter, "cpus": list(self.cpus[1:2]), "deadline_s": 60.0}
            settings["drafter"] = {**drafter, "engine": {**engine, **self.drafter.get("engine", {})}}
        engine = {
            **self._limits(running, load),
            **self.target_only,
            "model": str(self.target),
            "scheduler_cls": "minedraft.backends.vllm.scheduler.PSDScheduler",
            "speculative_config": {
                "method": "custom_class",
                "model": "minedraft.backends.vllm.null_proposer.NullProposer",
                "num_speculative_tokens": self.num_speculative_tokens,
            },
            "additional_config": {"minedraft": settings},
        }
        env = {**self.env, **ONE_PROCESS}
        num_devices = 1 + (self.num_draft_devices if kind != "ar" else 0)
        return Row(name, kind, running, num_devices, engine, load, self.cpus[:1], env, str(journal))

    def _limits(self, running: int, load: Load) -> dict[str, Any]:
        k = self.num_speculative_tokens
        blocks = -(-(load.prompt_len + load.max_tokens + k + 1) // BLOCK_SIZE)
        return {
            **self.engine,
            "max_model_len": blocks * BLOCK_SIZE,
            "max_num_seqs": running,
            "max_num_batched_tokens": max(1024, 2 * running * (k + 1)),
            "num_gpu_blocks_override": running * (blocks + 1) + 2,
        }


def overlap_rows(place: Place, running: int, load: Load, folder: Path, *, both: bool) -> list[Row]:
    """Everything at m and at 2m running requests."""
    rows = []
    for count in (running, 2 * running):
        rows.append(place.stock(f"plain({count})", "plain", count, load))
        rows.append(place.stock(f"draft_model({count})", "draft_model", count, load))
        if both:
            rows.append(place.stock(f"plain({count}), both", "plain", count, load, both=True))
            rows.append(place.stock(f"draft_model({count}), both", "draft_model", count, load, both=True))
        rows.append(place.minedraft(f"ar({count})", "ar", count, load, folder / "journal"))
        rows.append(place.minedraft(f"sd({count})", "sd", count, load, folder / "journal"))
        half = count // 2
        rows.append(place.minedraft(f"psd({half}+{half})", "psd", count, load, folder / "journal"))
    return rows


def feedback_rows(place: Place, batch: int, tokens: int, folder: Path) -> list[Row]:
    """Verifications of `batch` requests, with the drafter idle at their end (sd) and beside it (psd)."""
    rows = []
    for kind, running, name in (("sd", batch, f"sd({batch})"), ("psd", 2 * batch, f"psd({batch}+{batch})")):
        load = Load(running, 8, tokens, VOCAB_SIZE)
        rows.append(place.minedraft(name, kind, running, load, folder / "journal"))
    return rows


def run_best(rows: list[Row], best_of: int, folder: Path, console: Console) -> list[Result]:
    """Rounds over all rows; of each row the run with the most tokens per second."""
    best: dict[str, Result] = {}
    for number in range(best_of):
        for row in rows:
            result = run_once(row, folder)
            console.print(f"round {number + 1} of {best_of}: {row.name}: {result.tokens_per_s:,.1f} tok/s")
            known = best.get(row.name)
            if known is not None and known.texts != result.texts:
                console.print(f"[red]{row.name} wrote another text than in its last run[/red]")
            if known is None or result.tokens_per_s > known.tokens_per_s:
                best[row.name] = result
    return list(best.values())


def run_once(row: Row, folder: Path) -> Result:
    """One run of a row, with its journal read."""
    found = row.run(folder)
    num_tokens = sum(len(text) for text in found["texts"].values())
    assert num_tokens == row.load.num_requests * row.load.max_tokens, row.name
    overlap = read_overlap(Path(row.journal), MEASURED_PREFIX) if row.journal else None
    return Result(row, num_tokens / found["wall_s"], found["texts"], overlap)


def throughput_table(results: list[Result], running: int) -> Table:
    """Tokens per second, and against what."""
    by_name = {result.row.name: result for result in results}
    references = [f"{kind}({count})" for count in (running, 2 * running) for kind in ("plain", "sd")]
    references = [name for name in references if name in by_name]
    table = Table(title="Output tokens per second; same requests, same k")
    for heading in ("row", "running", "devices", "tok/s", *[f"/ {name}" for name in references], "per device", "text"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    reference = next(result for result in results if result.row.kind == "plain")
    for result in results:
        ratios = [f"{result.tokens_per_s / by_name[name].tokens_per_s:.2f}" for name in references]
        devices = result.row.num_devices
        table.add_row(
            result.row.name,
            str(result.row.running),
            str(devices),
            f"{result.tokens_per_s:,.1f}",
            *ratios,
            f"{result.tokens_per_s / devices:,.1f}",
            same(result.texts, reference.texts),
        )
    return table


def same(texts: Mapping[str, list[int]], reference: Mapping[str, list[int]]) -> str:
    """`SAME`, or how many of the texts are."""
    equal = sum(text == reference.get(request_id) for request_id, text in texts.items())
    return "SAME" if equal == len(texts) == len(reference) else f"{equal}/{len(reference)} same"


def overlap_table(results: list[Result], title: str) -> Table:
    """How the two groups share the time."""
    table = Table(
        title=title,
        caption="wanted of psd: drafting hidden >= 95 %, verifier busy >= 97 %, step <= 1.05 x the longer stage; "
        "feedback < 2 ms",
    )
    headings = ("row", "verify ms", "draft ms", "step ms", "step / longer", "drafting hidden", "verifier busy")
    for heading in (*headings, "accepted length", "batch", "feedback ms, median", "p99", "n (late)"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for result in results:
        one = result.overlap
        if one is None or result.row.kind == "ar":
            continue
        median, p99 = (f"{np.percentile(one.feedback_ms, p):.2f}" if one.feedback_ms else "-" for p in (50, 99))
        table.add_row(
            result.row.name,
            f"{one.verify_ms:.1f}",
            f"{one.draft_ms:.1f}",
            f"{one.step_ms:.1f}",
            f"{one.step_ratio:.3f}" if result.row.kind == "psd" else "-",
            f"{100 * one.hidden:.1f} %",
            f"{100 * one.busy:.1f} %",
            f"{one.acceptance_length:.2f}",
            f"{one.batch:.1f}",
            median,
            p99,
            f"{len(one.feedback_ms)} ({one.num_late})",
        )
    return table


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    try:
        vllm = version("vllm-cpu")
    except ModuleNotFoundError:
        vllm = version("vllm")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": vllm,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }


def describe(result: Result) -> dict[str, Any]:
    """A result as JSON."""
    row = result.row
    overlap = None if result.overlap is None else asdict(result.overlap)
    head = {"name": row.name, "kind": row.kind, "running": row.running, "num_devices": row.num_devices}
    return {**head, "tokens_per_s": result.tokens_per_s, "overlap": overlap}


def report(
    console: Console,
    results: list[Result],
    fed_back: list[Result],
    running: int,
    pair: str,
    facts: Mapping[str, Any],
    json_file: Path | None,
) -> None:
    """Print all tables, and write all figures if there is a file for them."""
    console.print(throughput_table(results, running))
    console.print(overlap_table(results, f"Overlap, {pair}"))
    if fed_back:
        console.print(overlap_table(fed_back, "Feedback with many requests per verification"))
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), soft_wrap=True)
    if json_file is not None:
        figures = {"rows": [describe(result) for result in results], "feedback": [describe(one) for one in fed_back]}
        json_file.write_text(json.dumps({"machine": facts, "wanted": WANTED, **figures}, indent=1) + "\n")


def make_pair(folder: Path, target_layers: int, draft_layers: int, noise: float) -> tuple[Path, Path]:
    """A target and a draft that write the same tokens at different cost; with noise the draft errs now and then."""
    import torch

    from minedraft.backends.torch.surgery import add_identity_layers, make_noisy_copy, make_tiny_llama

    base, noisy = folder / "base", folder / "noisy"
    make_tiny_llama(
        base,
        seed=1,
        vocab_size=VOCAB_SIZE,
        num_layers=2,
        hidden_size=128,
        num_heads=2,
        num_kv_heads=1,
        max_model_len=2048,
        dtype=torch.float32,
    )
    if noise:
        make_noisy_copy(base, noisy, noise)
    add_identity_layers(base, folder / "target", target_layers - 2)
    add_identity_layers(noisy if noise else base, folder / "draft", draft_layers - 2)
    return folder / "target", folder / "draft"


def cpu_place(pair: tuple[Path, Path], num_speculative_tokens: int) -> Place:
    """One core for each group.

    Raises:
        typer.BadParameter: there is only one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise typer.BadParameter("this needs two CPU cores, one for each group; only one may be used here")
    engine = {"dtype": "float32", "block_size": BLOCK_SIZE, "enforce_eager": True, "skip_tokenizer_init": True}
    return Place(*pair, num_speculative_tokens, engine, {}, {}, tuple(cores[:2]))


def main(
    running: Annotated[int, typer.Option(help="m: running requests; an even number.")] = 16,
    num_speculative_tokens: Annotated[int, typer.Option("--k", help="Drafts per round.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens that each request writes.")] = 80,
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 16,
    target_layers: Annotated[int, typer.Option(help="Depth of the target.")] = 62,
    draft_layers: Annotated[int, typer.Option(help="Depth of the draft.")] = 14,
    noise: Annotated[float, typer.Option(help="Noise on the draft's weights; 0: it always agrees.")] = 0.0,
    feedback: Annotated[int, typer.Option(help="Requests per verification for the feedback table; 0: none.")] = 64,
    best_of: Annotated[int, typer.Option(help="Rounds over all rows.")] = 3,
    only: Annotated[str, typer.Option(help="Rows of these kinds only, as plain,sd,psd.")] = "",
    both: Annotated[bool, typer.Option(help="Stock vLLM on both cores, too.")] = True,
    quick: Annotated[bool, typer.Option(help="Shallow models and little work: does it run?")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measure and print."""
    if running < 2 or running % 2:
        raise typer.BadParameter(f"--running is {running}; two sub-batches need an even number from 2 on")
    feedback_tokens = 50 * (num_speculative_tokens + 1)
    if quick:
        best_of, running, tokens, target_layers, draft_layers = 1, 4, 24, 10, 4
        feedback, feedback_tokens = min(feedback, 8), 24
    console = Console(width=max(Console().width, TABLE_WIDTH))
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = cpu_place(make_pair(folder, target_layers, draft_layers, noise), num_speculative_tokens)
        load = Load(2 * running, prompt_len, tokens, VOCAB_SIZE)
        rows = overlap_rows(place, running, load, folder, both=both)
        rows = [row for row in rows if not kinds or row.kind in kinds or row.name == f"plain({running})"]
        results = run_best(rows, best_of, folder, console)
        late = feedback_rows(place, feedback, feedback_tokens, folder) if feedback else []
        fed_back = run_best(late, 1, folder, console)
    pair = f"target of {target_layers} layers, draft of {draft_layers}, k = {num_speculative_tokens}"
    report(console, results, fed_back, running, pair, machine(), json_file)


if __name__ == "__main__":
    typer.run(main)

"""minedraft inside vLLM on GPUs: is the greedy text that of stock vLLM, and what does batch-parallel speculation give?

Run with vLLM and at least one CUDA GPU: python tests/gpu/check_vllm.py [--quick] [--target DIR --draft DIR]

First three engines with `VLLM_BATCH_INVARIANT=1` (stock, sd, psd) write the same greedy texts, and it says how many are
equal; then the tables of `tests/benchmarks/bench_vllm_overlap.py`. With two GPUs the drafter has the second one; with
one it shares it, which shows that it works and nothing of what overlap gains. Without `--target` and `--draft` the
models are random, shaped like Qwen3 and made on the spot: no downloads. The exit code is 1 if a text differs.

**No GPU has ever run this.** What it shares with the CPU benchmark is tried out there, and so are the random models;
the engine arguments for GPUs in `gpu_place` are not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from bench_vllm_overlap import (
    BLOCK_SIZE,
    TABLE_WIDTH,
    Place,
    machine,
    overlap_rows,
    report,
    run_best,
    same,
)
from vllm_row import Load

VOCAB_SIZE = 32_000


def gpu_names() -> list[str]:
    """Of the GPUs that may be used here, in order."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if visible is None else listed[: len([one for one in visible.split(",") if one])]


def gpu_ids(count: int) -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` calls them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if visible is None else visible.split(",")


def make_pair(folder: Path, target_layers: int, draft_layers: int, noise: float) -> tuple[Path, Path]:
    """A random target and a draft that agrees with it mostly; depth alone sets what they cost."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from minedraft.backends.torch.surgery import add_identity_layers, make_noisy_copy

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    make_noisy_copy(folder / "base", folder / "noisy", noise)
    add_identity_layers(folder / "base", folder / "target", target_layers - 2)
    add_identity_layers(folder / "noisy", folder / "draft", draft_layers - 2)
    return folder / "target", folder / "draft"


def gpu_place(pair: tuple[Path, Path], num_speculative_tokens: int, gpus: list[str], *, eager: bool) -> Place:
    """The target on the first GPU; the drafter on the second, or on the same one with a share of its memory."""
    shares = len(gpus) < 2
    engine = {"dtype": "bfloat16", "block_size": BLOCK_SIZE, "enforce_eager": eager, "skip_tokenizer_init": True}
    memory = (0.45, 0.35) if shares else (0.85, 0.85)
    return Place(
        *pair,
        num_speculative_tokens,
        engine,
        target_only={"gpu_memory_utilization": memory[0]},
        drafter={
            "engine": {"gpu_memory_utilization": memory[1]},
            "env": {"CUDA_VISIBLE_DEVICES": gpus[0 if shares else 1]},
        },
        num_draft_devices=0 if shares else 1,
        env={"CUDA_VISIBLE_DEVICES": gpus[0]},
    )


def check_texts(place: Place, load: Load, folder: Path, console: Console) -> bool:
    """Whether sd and psd write what stock vLLM writes, kernels giving the same numbers in batches of any shape."""
    # One model runner for all: of two tokens with equal logits, which are common in bfloat16, the V1 and V2 runners
    # needn't take the same one.
    place = replace(place, env={**place.env, "VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"})
    running = load.num_requests // 2
    rows = [row for row in overlap_rows(place, running, load, folder, both=False) if row.running == running]
    results = run_best([row for row in rows if row.kind in ("plain", "sd", "psd")], 1, folder, console)
    for result in results[1:]:
        console.print(f"{result.row.name}: greedy texts, batch-invariant: {same(result.texts, results[0].texts)}")
    return all(result.texts == results[0].texts for result in results)


def main(
    target: Annotated[Path | None, typer.Option(help="A target instead of the random one.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft.")] = None,
    running: Annotated[int, typer.Option(help="m: running requests; an even number.")] = 32,
    num_speculative_tokens: Annotated[int, typer.Option("--k", help="Drafts per round.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens that each request writes.")] = 256,
    target_layers: Annotated[int, typer.Option(help="Depth of the random target.")] = 64,
    draft_layers: Annotated[int, typer.Option(help="Depth of the random draft.")] = 16,
    noise: Annotated[float, typer.Option(help="Noise on the random draft's weights.")] = 0.01,
    eager: Annotated[bool, typer.Option(help="Without CUDA graphs, which take a minute per engine to make.")] = True,
    quick: Annotated[bool, typer.Option(help="Only the comparison of texts, over few tokens.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Compare texts, then measure."""
    names = gpu_names()
    if not names:
        raise typer.BadParameter("this needs a CUDA GPU; nvidia-smi lists none that may be used")
    if (target is None) != (draft is None):
        raise typer.BadParameter("--target and --draft go together")
    console = Console(width=max(Console().width, TABLE_WIDTH))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if target is None or draft is None:
            pair = make_pair(folder, target_layers, draft_layers, noise)
            title = f"random target of {target_layers} layers, draft of {draft_layers}"
        else:
            pair, title = (target, draft), f"target {target.name}, draft {draft.name}"
        place = gpu_place(pair, num_speculative_tokens, gpu_ids(len(names)), eager=eager)
        # Any model has a token for each of the first thousand ids.
        equal = check_texts(place, Load(2 * running, 32, 64 if quick else tokens, 1000), folder, console)
        if not quick:
            load = Load(2 * running, 32, tokens, 1000)
            results = run_best(overlap_rows(place, running, load, folder, both=False), 1, folder, console)
            facts = {**machine(), "gpus": ", ".join(names)}
            report(console, results, [], running, f"{title}, k = {num_speculative_tokens}", facts, json_file)
    if not equal:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

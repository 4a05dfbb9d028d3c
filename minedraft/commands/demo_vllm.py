"""`minedraft demo --backend vllm`: the demo's prompts through stock vLLM with the core in it, with equal texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from minedraft.commands.demo import heading, name_files, paragraph
from minedraft.commands.demo_models import DRAFT, MODES, PROMPTS, TARGET, show_texts
from minedraft.commands.drive import Recordings
from minedraft.commands.errors import FAILED_CHECK, CommandError, unusable_file
from minedraft.commands.report import as_json, console, rows_named, table_of, write_json
from minedraft.commands.torch_run import Prompt, TorchOutcome
from minedraft.commands.vllm_run import VllmOptions, run_models
from minedraft.config import parse_config

MAX_TOKENS: Final = 24
K: Final = 2
MAX_MODEL_LEN: Final = 512
ENGINE: Final[dict[str, Any]] = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
"""Small, and without compiling: the start is most of the time that this takes."""

ROWS: Final = (
    "Total generated tokens",
    "Output token throughput (tok/s)",
    "Mean verify step (ms)",
    "Mean draft step (ms)",
    "Acceptance length",
    "Drafting overlapped with verification (%)",
    "Target utilisation (%)",
    "Drafter utilisation (%)",
)


def demo_vllm(folder: Path) -> None:
    """Run the prompts in all modes, show texts and figures, and name the files that were written.

    Raises:
        CommandError: vLLM or a model can't be used, a run failed, or texts that must be equal differ.
    """
    core = _first_core()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_file(error) from error
    heading("Stock vLLM with minedraft's scheduler")
    paragraph(
        f"Target: {TARGET} (SmolLM2-135M-Instruct). Drafter: {DRAFT}, a second vLLM engine on a device of its own (the "
        f"last core, on a CPU). {len(PROMPTS)} prompts, up to {MAX_TOKENS} tokens each, greedy, float32, k = {K}; "
        f"{', '.join(MODES)} one after the other. Starting the engines takes most of the time.\n"
    )
    written: list[Path] = []
    results = []
    for mode in MODES:
        console().print(f"running {mode} ...", style="dim")
        results.append(_run(mode, core, folder, written))
    equal = all(result.token_ids == results[0].token_ids for result in results)
    show_texts(results)
    verdict = "All three modes wrote the same tokens." if equal else "THE MODES WROTE DIFFERENT TOKENS."
    console().print(verdict, style="bold green" if equal else "bold red")
    console().print(table_of([result.column for result in results], rows_named(ROWS), "Measured"))
    paragraph(
        "What this shows: that speculation in vLLM's own engine changes no token, and how much of the drafting lies "
        "behind verification. What it does not show: speed. This drafter has 0.84 of its target's weights, and on one "
        "core verification costs in proportion to its tokens."
    )
    name_files(written)
    if not equal:
        raise CommandError("the three modes wrote different texts; speculation must never change them", FAILED_CHECK)


def _run(mode: str, core: str | None, folder: Path, written: list[Path]) -> TorchOutcome:
    """One mode; the target has the same device in all of them."""
    batch = len(PROMPTS) // 2 if mode == "psd" else len(PROMPTS)
    limits = {
        "max_batch_size": batch,
        "num_speculative_tokens": K,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "block_size": 32,
    }
    config = parse_config({"mode": mode, "scheduler": limits}, source="demo", world=False)
    options = VllmOptions(
        TARGET,
        DRAFT,
        target_device=core,
        sampling={"max_tokens": MAX_TOKENS, "temperature": 0.0},
        dtype="float32",
        engine_args=ENGINE,
        draft_args={"kv_cache_memory_bytes": ENGINE["kv_cache_memory_bytes"]},
    )
    recordings = Recordings()
    if mode == "psd":
        recordings = Recordings(str(folder / "vllm-psd.journal.jsonl"), str(folder / "vllm-psd.trace.json"))
    result = run_models(config, options, [Prompt(text) for text in PROMPTS], recordings, name=mode)
    path = folder / f"vllm-{mode}.json"
    outputs = [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, result.texts, strict=True)]
    write_json(str(path), {**as_json(result.column, "demo", 0), "outputs": outputs})
    written += [path, *(Path(name) for name in recordings if name is not None)]
    error = result.column.outcome.error
    if error is not None:
        raise CommandError(f"mode {mode}: {error}", error.exit_code)
    return result


def _first_core() -> str | None:
    """On a CPU the first core; elsewhere the default."""
    import os

    from minedraft.backends.vllm.device_facts import is_cpu_build
    from minedraft.commands.vllm_extra import vllm_extra

    with vllm_extra():
        return f"cpu:{min(os.sched_getaffinity(0))}" if is_cpu_build(os.environ) else None

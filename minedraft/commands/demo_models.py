"""The demo's first half: a real target and drafter on the CPU, in three modes, with equal texts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from minedraft.commands.demo import heading, paragraph
from minedraft.commands.drive import Recordings
from minedraft.commands.errors import CommandError
from minedraft.commands.report import Column, as_json, console, rows_named, table_of, write_json
from minedraft.commands.torch_run import Prompt, TorchOptions, TorchOutcome, run_models
from minedraft.config import RunConfig, parse_config

TARGET: Final = "smollm2"
DRAFT: Final = "smollm2-drop6"
MODES: Final = ("ar", "sd", "psd")
MAX_TOKENS: Final = 32
K: Final = 2
PROMPTS: Final = (
    "What is the capital of Portugal, and which river does it lie on?",
    "Write a Python function that returns the largest of three numbers.",
    "List five things to pack for a day at the beach.",
    "Explain in two sentences why the sky looks blue.",
    "Go on with this story: The lighthouse keeper heard a knock at the door.",
    "Translate into French: The train leaves at nine o'clock in the morning.",
    "A baker sells 12 rolls in the morning and 9 in the afternoon. How many is that in all?",
    "Write a short, polite reply to an invitation that I cannot accept.",
)
ROWS: Final = (
    "Total generated tokens",
    "Benchmark duration (s)",
    "Output token throughput (tok/s)",
    "Mean verify step (ms)",
    "Mean draft step (ms)",
    "Mean requests per verify step",
    "Acceptance length",
    "Drafting overlapped with verification (%)",
    "Target utilisation (%)",
    "Drafter utilisation (%)",
)
SHOWN_CHARACTERS: Final = 110


def demo_models(folder: Path, written: list[Path]) -> bool:
    """Run the prompts in all modes, and show texts and figures.

    Args:
        folder: where to write.
        written: files are added to it.

    Returns:
        Whether all modes wrote the same tokens.

    Raises:
        CommandError: a model can't be used, or a run failed.
    """
    options = TorchOptions(TARGET, DRAFT, sampling={"max_tokens": MAX_TOKENS})
    target_device, draft_device = options.devices()
    heading("1. Real models")
    paragraph(
        f"Target: {TARGET} (SmolLM2-135M-Instruct) on {target_device}. Drafter: {DRAFT}, the same model without six "
        f"of its thirty layers, on {draft_device}. Each in a process of its own. {len(PROMPTS)} prompts, up to "
        f"{MAX_TOKENS} tokens each, greedy, k = {K}, all {len(PROMPTS)} requests in flight in every mode: ar and sd "
        "as one batch, psd as two half batches. Loading the models takes a while each time.\n"
    )
    prompts = [Prompt(text) for text in PROMPTS]
    results = []
    for mode in MODES:
        console().print(f"running {mode} ...", style="dim")
        results.append(_run(mode, prompts, options, folder, written))
    equal = all(result.token_ids == results[0].token_ids for result in results)
    show_texts(results)
    verdict = "All three modes wrote the same tokens." if equal else "THE MODES WROTE DIFFERENT TOKENS."
    console().print(verdict, style="bold green" if equal else "bold red")
    console().print(table_of([result.column for result in results], rows_named(ROWS), "Measured"))
    _explain(results)
    return equal


def _config(mode: str) -> RunConfig:
    batches = 2 if mode == "psd" else 1
    limits = {"max_batch_size": len(PROMPTS) // batches, "num_speculative_tokens": K}
    return parse_config({"mode": mode, "scheduler": limits}, source="demo", world=False)


def _run(mode: str, prompts: list[Prompt], options: TorchOptions, folder: Path, written: list[Path]) -> TorchOutcome:
    recordings = Recordings()
    if mode == "psd":
        recordings = Recordings(str(folder / "real-psd.journal.jsonl"), str(folder / "real-psd.trace.json"))
    result = run_models(_config(mode), options, prompts, recordings, name=mode)
    path = folder / f"real-{mode}.json"
    outputs = [{"prompt": prompt.text, "text": text} for prompt, text in zip(prompts, result.texts, strict=True)]
    write_json(str(path), {**as_json(result.column, "demo", 0), "outputs": outputs})
    written += [path, *(Path(name) for name in recordings if name is not None)]
    error = result.column.outcome.error
    if error is not None:
        raise CommandError(f"mode {mode}: {error}", error.exit_code)
    return result


def show_texts(results: list[TorchOutcome]) -> None:
    """Print the prompts, each with what the modes wrote: once, if they agree."""
    out = console()
    for i, prompt in enumerate(PROMPTS):
        out.print(f"> {prompt}", style="bold", markup=False)
        for text in dict.fromkeys(" ".join(result.texts[i].split()) for result in results):
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            out.print(f"  {shown}", markup=False)
    out.print()


def _explain(results: list[TorchOutcome]) -> None:
    columns: dict[str, Column] = {result.column.mode: result.column for result in results}
    sd, psd = columns["sd"].summary, columns["psd"].summary
    one_pass_ms = sd.mean_draft_ms / K
    ar_ms = columns["ar"].summary.mean_verify_ms
    ratio = f", {one_pass_ms / ar_ms:.2f} of a plain target step" if ar_ms else ""
    paragraph(
        f"What this shows: speculation changed no token, and in psd {100 * psd.overlapped_draft_share:.0f} % of the "
        f"drafting time lay behind verification ({100 * sd.overlapped_draft_share:.0f} % in sd). What it does not "
        f"show: speed. A drafter with 24 of 30 layers costs nearly as much as its target (one drafting pass took "
        f"{one_pass_ms:.0f} ms{ratio}; it has 0.84 of the weights), and on a CPU core verifying {K + 1} tokens per "
        f"request costs far more than computing one ({sd.mean_verify_ms:.0f} ms instead of {ar_ms:.0f} ms per step). "
        "On GPUs with a small drafter both are otherwise; the second half is about those. All times are this machine's "
        "at this moment: anything else that runs on either core shows in them, in psd most of all, which needs both."
    )

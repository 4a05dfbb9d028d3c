"""`minedraft run`: real models on real devices, through the same core."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from minedraft.commands.drive import NO_RECORDINGS, Recordings, drive
from minedraft.commands.errors import CommandError, unusable_file
from minedraft.commands.report import Column, as_json, check_writable, console, print_report, write_json
from minedraft.commands.torch_extra import torch_extra
from minedraft.config import RunConfig, load_config
from minedraft.config_tree import Override
from minedraft.journal import JournalHeader
from minedraft.json_text import parse_json
from minedraft.metrics import MetricsCollector
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue.

    Attributes:
        text: the prompt.
        options: fields of `TorchRequest` that hold for this one only.
    """

    text: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """What the torch world needs besides the scheduler's configuration.

    Attributes:
        target: name, folder or hub name of the target.
        draft: the same for the drafter; None for a run without one.
        target_device: None for the first core that this process may use.
        draft_device: None for the second one.
        sampling: fields of `TorchRequest` that hold for all prompts.
        chat: wrap prompts in the model's chat template.
        dtype: of both models.
        acceptance: how sampled drafts are accepted.
    """

    target: str
    draft: str | None
    target_device: str | None = None
    draft_device: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True
    dtype: str = "auto"
    acceptance: str = "rejection"

    def devices(self) -> tuple[str, str]:
        """Target's and drafter's device, defaults filled in."""
        cores = sorted(os.sched_getaffinity(0))
        first, second = f"cpu:{cores[0]}", f"cpu:{cores[min(1, len(cores) - 1)]}"
        return self.target_device or first, self.draft_device or second


@dataclass(frozen=True, slots=True)
class TorchOutcome:
    """What came of a run on models.

    Attributes:
        column: for the report.
        texts: by request, in the order of the prompts; what there was if the run failed.
        token_ids: likewise.
    """

    column: Column
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]


def run_command(
    path: str | None,
    overrides: Sequence[Override],
    options: TorchOptions,
    prompts: Sequence[Prompt],
    json_path: str | None,
    recordings: Recordings,
) -> None:
    """Generate, print texts and figures, write the files.

    Raises:
        ConfigError: the configuration can't be used.
        CommandError: models, devices or prompts can't be used, or the run failed.
    """
    check_writable(json_path)
    config = load_config(path, overrides, world=False)
    result = run_models(config, options, prompts, recordings, name=config.mode)
    report_outcome(result, config, options.target, options.draft, prompts, json_path)


def report_outcome(
    result: TorchOutcome,
    config: RunConfig,
    target: str,
    draft: str | None,
    prompts: Sequence[Prompt],
    json_path: str | None,
) -> None:
    """Print texts and figures, and write the JSON.

    Raises:
        CommandError: the JSON can't be written, or the run had failed.
    """
    if json_path is not None:
        texts = [
            {"prompt": prompt.text, "text": text, "num_tokens": len(token_ids)}
            for prompt, text, token_ids in zip(prompts, result.texts, result.token_ids, strict=True)
        ]
        models = {"target": target, "draft": draft if config.mode != "ar" else None}
        write_json(json_path, {**as_json(result.column, "run", config.seed), **models, "outputs": texts})
    if json_path != "-":
        print_texts(prompts, result.texts)
        print_report([result.column], title=f"{target} with drafter {draft}, mode {config.mode}")
    error = result.column.outcome.error
    if error is not None:
        raise error


def run_models(
    config: RunConfig,
    options: TorchOptions,
    prompts: Sequence[Prompt],
    recordings: Recordings = NO_RECORDINGS,
    *,
    name: str = "",
) -> TorchOutcome:
    """One run on models.

    Raises:
        CommandError: models, devices or prompts can't be used; nothing has run.
    """
    from minedraft.backends.torch.errors import TorchWorldError

    with torch_extra():
        try:
            return _run_models(config, options, prompts, recordings, name or config.mode)
        except TorchWorldError as error:
            raise CommandError(str(error)) from error


def _run_models(
    config: RunConfig, options: TorchOptions, prompts: Sequence[Prompt], recordings: Recordings, name: str
) -> TorchOutcome:
    from minedraft.backends.torch.models import resolve_model

    target_device, draft_device = options.devices()
    # Before the slow imports: a name that is wrong should be known at once.
    target = resolve_model(options.target, progress=_tell)
    draft = None if config.mode == "ar" or not options.draft else resolve_model(options.draft, progress=_tell)
    if draft is None and config.mode != "ar":
        raise CommandError(f"mode {config.mode} needs a drafter; name one with --draft, or use --mode ar")
    with console_status("loading models"):
        from minedraft.backends.torch.backend import TorchBackend
        from minedraft.backends.torch.errors import TorchWorldError
        from minedraft.backends.torch.run import limit_to_models
        from minedraft.backends.torch.text import TextCodec

        codec = TextCodec(target)
        requests = _requests(codec, prompts, options)
        backend = TorchBackend(
            target,
            draft,
            requests,
            target_device=target_device,
            draft_device=draft_device,
            acceptance=options.acceptance,
            dtype=options.dtype,
        )
        backend.__enter__()
    try:
        limits = limit_to_models(config.scheduler_config(), backend.target_card, backend.draft_card)
        collector = MetricsCollector(
            num_target_devices=1,
            num_draft_devices=int(draft is not None and draft_device != target_device),
            max_model_len=limits.model_len,
        )
        outcome = drive(
            Scheduler(limits, config.build_policies()),
            backend,
            collector,
            header=_header(config, limits, options, draft),
            recordings=recordings,
            label=f"generating ({name})",
            total=len(requests),
            world_errors=(TorchWorldError,),
        )
    finally:
        backend.close()
    token_ids = tuple([backend.output_token_ids(request.request_id) for request in requests])
    texts = tuple([codec.decode(ids) for ids in token_ids])
    return TorchOutcome(Column(name, config.mode, limits, outcome), texts, token_ids)


def _tell(text: str) -> None:
    """What goes on while a model is made, which may be a download."""
    typer.echo(text, err=True)


def _requests(codec: Any, prompts: Sequence[Prompt], options: TorchOptions) -> list[Any]:
    from minedraft.backends.torch.request import TorchRequest

    requests = []
    for i, prompt in enumerate(prompts):
        fields = {"request_id": f"p{i}", **options.sampling}
        if fields.get("seed") is not None:
            fields["seed"] += i  # else equal prompts would get equal texts
        fields.update(prompt.options)
        try:
            requests.append(TorchRequest(prompt_token_ids=codec.encode(prompt.text, chat=options.chat), **fields))
        except (TypeError, ValueError) as error:
            raise CommandError(f"prompt {i + 1}: {error}") from error
    return requests


def _header(config: RunConfig, limits: SchedulerConfig, options: TorchOptions, draft: str | None) -> JournalHeader:
    import minedraft

    return JournalHeader(
        minedraft=minedraft.__version__,
        scheduler=limits.given(),
        policies=config.policy_specs(),
        seed=config.seed,
        extra={"world": "torch", "target": options.target, "draft": options.draft if draft is not None else None},
    )


def console_status(text: str) -> Any:
    """A spinner on stderr while something takes its time; nothing if stderr is not a terminal."""
    from contextlib import nullcontext

    from rich.console import Console

    err = Console(stderr=True)
    return err.status(text) if err.is_terminal else nullcontext()


def print_texts(prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
    """Print each prompt with what the model wrote."""
    out = console()
    for prompt, text in zip(prompts, texts, strict=True):
        out.print(f"> {prompt.text}", style="bold", markup=False)
        out.print(text.strip() or "(nothing)", markup=False)
        out.print()


PROMPT_COUNTS: Final = ("max_tokens", "top_k", "seed", "priority", "max_draft_tokens")
PROMPT_FIELDS: Final = (*PROMPT_COUNTS, "temperature", "top_p", "arrival_s")
MAY_BE_NULL: Final = ("seed", "max_draft_tokens")


def read_prompts(path: str) -> list[Prompt]:
    """Prompts from a file: one per line, or in a `.jsonl` file objects with `prompt` and fields of `TorchRequest`.

    Raises:
        CommandError: the file can't be read, a line can't be used, or there is no prompt.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise unusable_file(error) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{path}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.endswith(".jsonl"):
        prompts = [_json_prompt(path, number, line) for number, line in numbered]
    else:
        prompts = [Prompt(line.strip()) for _, line in numbered]
    if not prompts:
        raise CommandError(f"{path}: holds no prompt; write one per line")
    return prompts


def _json_prompt(path: str, number: int, line: str) -> Prompt:
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        raise CommandError(
            f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); put one JSON object on each line"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise CommandError(f'{path}:{number}: no text "prompt"; write {{"prompt": "..."}}')
    options = {key: value for key, value in row.items() if key != "prompt"}
    unknown = [key for key in options if key not in PROMPT_FIELDS]
    if unknown:
        raise CommandError(f"{path}:{number}: unknown field {unknown[0]!r}; known are {', '.join(PROMPT_FIELDS)}")
    for name, value in options.items():
        whole = name in PROMPT_COUNTS
        known = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not known and not (value is None and name in MAY_BE_NULL):
            wanted = "a whole number" if whole else "a number"
            raise CommandError(f"{path}:{number}: {name} is {value!r}, must be {wanted}; correct the line")
    return Prompt(row["prompt"], options)

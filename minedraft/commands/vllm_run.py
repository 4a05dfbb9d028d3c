"""`minedraft run --backend vllm`: a batch of prompts through `vllm.LLM`, with the core in its engine.

Figures come from the journal that the engine writes, through the same code as in the other worlds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minedraft.commands.drive import NO_RECORDINGS, Outcome, Recordings
from minedraft.commands.errors import CommandError, InterruptedRunError, unusable_file
from minedraft.commands.report import Column, check_writable
from minedraft.commands.torch_run import Prompt, TorchOutcome, console_status, report_outcome
from minedraft.commands.vllm_extra import find_model, vllm_extra
from minedraft.config import RunConfig, load_config
from minedraft.config_tree import Override, merged
from minedraft.journal import JournalError, feed, read_journal
from minedraft.metrics import MetricsCollector, metrics_from_journal
from minedraft.policy import PolicyError
from minedraft.scheduler_config import SchedulerConfig
from minedraft.trace import TraceWriter

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
QUIET: Final = {"use_tqdm_on_load": False}
SHUTDOWN_S: Final = 60.0  # for the engine to end its journal and its drafter; vLLM kills what takes longer
"""Engine arguments of both engines, so that a run's stderr holds what matters."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What this world needs besides the scheduler's configuration.

    Attributes:
        target: name, folder or hub name of the target.
        draft: the same for the drafter.
        target_device: `cpu:0`, `cuda:0,1` or the like; None for the default.
        draft_device: likewise.
        sampling: max_tokens, temperature, top_k, top_p and seed for all prompts.
        chat: wrap prompts in the model's chat template.
        dtype: of both models; auto is vLLM's.
        engine_args: any engine arguments of the target, as vLLM calls them.
        draft_args: any engine arguments of the drafter.
    """

    target: str
    draft: str | None
    target_device: str | None = None
    draft_device: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True
    dtype: str = "auto"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    draft_args: Mapping[str, Any] = field(default_factory=dict)


def run_command(
    path: str | None,
    overrides: Sequence[Override],
    options: VllmOptions,
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
    for file in recordings:
        check_writable(file)
    config = load_config(path, overrides, world=False)
    result = run_models(config, options, prompts, recordings)
    report_outcome(result, config, options.target, options.draft, prompts, json_path)


def run_models(
    config: RunConfig,
    options: VllmOptions,
    prompts: Sequence[Prompt],
    recordings: Recordings = NO_RECORDINGS,
    *,
    name: str = "",
) -> TorchOutcome:
    """One run on models.

    Raises:
        CommandError: models, devices or prompts can't be used; nothing has run.
    """
    if options.dtype not in DTYPES:
        raise CommandError(f"--dtype {options.dtype}: vLLM has no such type; use one of {', '.join(DTYPES)}")
    with vllm_extra(), tempfile.TemporaryDirectory(prefix="minedraft-") as folder:
        journal = Path(folder) / "journal" if recordings.journal is None else Path(recordings.journal).absolute()
        launch, arguments = _plan(config, options, prompts, journal)
        with _environment(launch):
            from minedraft.backends.torch.text import TextCodec

            codec = TextCodec(arguments["model"])
            requests = _requests(codec, prompts, options)
            with _engine(arguments) as llm:  # its end ends the journal
                _check_lengths(llm, requests)
                failure, token_ids = _generate(llm, requests)
        limits, outcome = _figures(journal, launch.placement, recordings.trace)
    outcome.failure = failure or outcome.failure
    texts = tuple([codec.decode(ids) for ids in token_ids])
    return TorchOutcome(Column(name or config.mode, config.mode, limits, outcome), texts, token_ids)


# --- what the engine is to be


def _plan(
    config: RunConfig, options: VllmOptions, prompts: Sequence[Prompt], journal: Path
) -> tuple[Any, dict[str, Any]]:
    """How to start the engine, and all its arguments."""
    from minedraft.backends.vllm.device_facts import facts_here
    from minedraft.backends.vllm.launch import LaunchOptions, plan_launch

    facts = facts_here(os.environ)
    engine, settings = translate(config)
    engine = {**QUIET, **engine, **options.engine_args, "model": find_model(options.target), "dtype": options.dtype}
    if any("priority" in prompt.options for prompt in prompts):
        engine["scheduling_policy"] = "priority"
    draft = None if config.mode == "ar" or not options.draft else find_model(options.draft)
    asked = LaunchOptions(
        draft=draft,
        k=config.scheduler.num_speculative_tokens,
        mode=config.mode,
        policies={slot: spec_text(spec) for slot, spec in config.policies.arguments().items() if spec is not None},
        settings=merged(settings, {"journal": str(journal), "on_policy_error": "raise"}),
        draft_args={**QUIET, **options.draft_args} if draft is not None else {},
        target_devices=device_names(options.target_device, facts.kind, "--target-device"),
        draft_devices=None if draft is None else device_names(options.draft_device, facts.kind, "--draft-device"),
    )
    launch = plan_launch(asked, engine, facts, os.environ)
    for note in launch.notes:
        _warn(note)
    return launch, {**engine, **launch.engine, "disable_log_stats": True}


def _warn(note: str) -> None:
    import typer

    typer.echo(f"minedraft: warning: {note}", err=True)


ENGINE_FIELDS: Final = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
}
DRAFT_FIELDS: Final = {
    "max_num_draft_batched_tokens": "max_num_batched_tokens",
    "draft_max_model_len": "max_model_len",
}
POOLS: Final = {"num_target_blocks": "target", "num_draft_blocks": "drafter"}
SETTINGS: Final = ("num_batches", "max_batch_size", "draft_capacity")


def translate(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine arguments for vLLM and settings for minedraft, for what the configuration sets of `[scheduler]`.

    What it leaves open is vLLM's to decide.

    Raises:
        CommandError: a field has no meaning in vLLM.
    """
    table = config.scheduler
    given = {name: getattr(table, name) for name in table.model_fields_set if getattr(table, name) is not None}
    engine = {ours: given[name] for name, ours in ENGINE_FIELDS.items() if name in given}
    drafter = {ours: given[name] for name, ours in DRAFT_FIELDS.items() if name in given}
    for name, who in POOLS.items():
        if name in given:  # vLLM keeps one block for itself
            (engine if who == "target" else drafter)["num_gpu_blocks_override"] = given[name] + 1
    settings: dict[str, Any] = {name: given[name] for name in SETTINGS if name in given}
    if "max_batch_size" in given and "max_num_seqs" not in given:
        engine["max_num_seqs"] = config.scheduler_config().running_limit
    known = {*ENGINE_FIELDS, *DRAFT_FIELDS, *POOLS, *SETTINGS, "num_speculative_tokens"}
    for name in given:
        if name not in known:
            raise CommandError(f"scheduler.{name}: has no meaning with --backend vllm; remove it")
    if drafter and config.mode != "ar":
        settings["drafter"] = {"engine": drafter}
    return engine, settings


def spec_text(spec: str | Mapping[str, Any]) -> str:
    """A policy's spec as one text, `name,key=value`."""
    if isinstance(spec, str):
        return spec
    options = [f"{key}={value}" for key, value in spec.items() if key != "name"]
    return ",".join([str(spec.get("name", "")), *options])


def device_names(text: str | None, kind: str, option: str) -> str | None:
    """The devices of `cpu:0` or `cuda:0,1`."""
    if text is None or text == kind:
        return None
    found, colon, names = text.partition(":")
    if not colon or found != kind:
        raise CommandError(f"{option} {text}: vLLM runs on {kind} here; write {kind}:0 or {kind}:0,1")
    return names


@contextmanager
def _environment(launch: Any) -> Iterator[None]:
    """Environment variables and cores of this process while the engine is in it; put back at the end.

    On a CPU a target on one core runs in this process, with one thread: vLLM pins threads only in workers of their own,
    which take half a minute longer to start. Messages go to stderr, since stdout may be asked to carry JSON.
    """
    wanted = {**launch.env}
    usual = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
    }
    cores = None
    if launch.placement.is_one_core:
        usual |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") == "0":
            cores = os.sched_getaffinity(0)
    wanted |= {name: value for name, value in usual.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    if cores is not None:
        os.sched_setaffinity(0, [int(name) for name in launch.placement.target])
    try:
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


@contextmanager
def _engine(arguments: Mapping[str, Any]) -> Iterator[Any]:
    """A `vllm.LLM`, shut down at the end.

    Raises:
        CommandError: an argument is unknown, or the engine can't start.
    """
    import dataclasses
    from difflib import get_close_matches

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    known = [item.name for item in dataclasses.fields(EngineArgs)]
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CommandError(f"--engine-arg {name}: vLLM has no such engine argument{hint}")
    try:
        with console_status("loading models"):
            llm = LLM(**arguments)
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        raise CommandError(f"vLLM's engine can't start: {error}") from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)


# --- the run


@dataclass(frozen=True, slots=True)
class _Request:
    token_ids: tuple[int, ...]
    params: Any
    priority: int


def _requests(codec: Any, prompts: Sequence[Prompt], options: VllmOptions) -> list[_Request]:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    found = []
    for i, prompt in enumerate(prompts):
        fields = {name: value for name, value in options.sampling.items() if value is not None}
        if "seed" in fields:
            fields["seed"] += i  # else equal prompts would get equal texts
        fields.update(prompt.options)
        if fields.pop("arrival_s", 0):
            raise CommandError(
                f"prompt {i + 1}: arrival_s has no meaning with --backend vllm: all prompts come at once"
            )
        priority = fields.pop("priority", 0)
        if "max_draft_tokens" in fields:
            fields["extra_args"] = {"max_draft_tokens": fields.pop("max_draft_tokens")}
        token_ids = codec.encode(prompt.text, chat=options.chat)
        try:
            found.append(_Request(token_ids, SamplingParams(detokenize=False, **fields), priority))
        except (TypeError, ValueError, VLLMValidationError) as error:
            raise CommandError(f"prompt {i + 1}: {error}") from error
    return found


def _check_lengths(llm: Any, requests: Sequence[_Request]) -> None:
    limit = llm.llm_engine.vllm_config.model_config.max_model_len
    for number, request in enumerate(requests, start=1):
        if len(request.token_ids) >= limit:
            raise CommandError(
                f"prompt {number}: has {len(request.token_ids)} tokens, but max_model_len is {limit}; shorten it"
            )


def _generate(llm: Any, requests: Sequence[_Request]) -> tuple[CommandError | None, tuple[tuple[int, ...], ...]]:
    """Token ids by request, and why the run stopped early if it did."""
    from vllm.v1.engine.exceptions import EngineDeadError

    priorities = [request.priority for request in requests]
    nothing: tuple[tuple[int, ...], ...] = ((),) * len(requests)
    try:
        with console_status("generating"):
            outputs = llm.generate(
                [{"prompt_token_ids": list(request.token_ids)} for request in requests],
                [request.params for request in requests],
                use_tqdm=False,
                priority=priorities if any(priorities) else None,
            )
    except KeyboardInterrupt:
        return InterruptedRunError(), nothing
    except PolicyError as error:
        return CommandError(str(error)), nothing
    except EngineDeadError:
        return CommandError("vLLM's engine died; what it printed above says why"), nothing
    return None, tuple([tuple(output.outputs[0].token_ids) for output in outputs])


def _figures(path: Path, placement: Any, trace: str | None) -> tuple[SchedulerConfig, Outcome]:
    """Limits that held, and figures from the journal; writes the timeline. A journal without an end is a failure."""
    try:
        journal = read_journal(path)
        limits = SchedulerConfig(**journal.header.scheduler)
        collector = MetricsCollector(
            num_target_devices=placement.num_target_devices,
            num_draft_devices=placement.num_draft_devices,
            max_model_len=limits.model_len,
        )
        outcome = Outcome(metrics_from_journal(journal, collector))
        if not journal.complete:
            outcome.failure = CommandError(f"{path}: the journal ends early (a full disk?), and the figures with it")
        if trace is not None:
            writer = TraceWriter(trace)
            feed(journal, writer)
            writer.close()
    except OSError as error:
        raise unusable_file(error) from error
    except JournalError as error:
        raise CommandError(f"the engine's journal can't be read: {error}") from error
    return limits, outcome

"""Turns minedraft's options and the user's vLLM arguments into the arguments of a vLLM engine with the core in it.

Both front doors use it: `minedraft serve` (arguments of `vllm serve`) and `minedraft run --backend vllm` (arguments of
`vllm.LLM`); the names are those of vLLM's `EngineArgs` in either case.

Law of this file: values in, values out. It loads no vLLM, reads no environment but the one that it is given, and
touches no device; files are read for the models' sizes only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from minedraft.backends.vllm.device_facts import CPU, DeviceFacts
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.memory_fit import (
    DEFAULT_UTILIZATION,
    GIB,
    EngineNeed,
    check_fit,
    default_cpu_kv_bytes,
    read_model_size,
)
from minedraft.backends.vllm.placement import OMP_BIND, Placement, place
from minedraft.backends.vllm.settings import FIXED_ENGINE_ARGS, KEY, Settings, check_types, parse_settings
from minedraft.config_tree import merged
from minedraft.policy import Mode, load_policies

SCHEDULER_CLS: Final = "minedraft.backends.vllm.scheduler.PSDScheduler"
NULL_PROPOSER: Final = "minedraft.backends.vllm.null_proposer.NullProposer"
KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's own variable: GiB of KV for each rank on a CPU; it wins over kv_cache_memory_bytes."""

DEFAULT_K: Final = 4
_CONFLICTS: Final = {
    "speculative_config": "drafts come from minedraft's own drafter; use --draft and -k instead",
    "spec_method": "drafts come from minedraft's own drafter; remove it",
    "spec_model": "use --draft instead",
    "spec_tokens": "use -k instead",
    "async_scheduling": "drafts must follow the step before; remove it",
    "headless": "minedraft serves from one machine; remove it",
}
_SINGLE: Final = {
    "pipeline_parallel_size": "use --tensor-parallel-size",
    "data_parallel_size": "run one server for each replica",
}
_FIXED_DRAFT_ARGS: Final = ("model", *FIXED_ENGINE_ARGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the user asked of minedraft; None and empty mean that nothing was said.

    Attributes:
        draft: the draft model's folder or hub name.
        k: drafts per round.
        mode: ar, sd or psd.
        policies: policy spec by slot.
        settings: any settings of `Settings`, nested as in JSON.
        draft_args: vLLM engine arguments of the drafter.
        target_devices: see `place`.
        draft_devices: likewise.
    """

    draft: str | None = None
    k: int | None = None
    mode: str | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    draft_args: Mapping[str, Any] = field(default_factory=dict)
    target_devices: str | None = None
    draft_devices: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the engine.

    Attributes:
        engine: vLLM arguments to set, over those that the user gave.
        env: environment variables to set in this process before vLLM starts anything.
        settings: what the engine will read from `additional_config`, checked.
        placement: who gets which devices.
        notes: what the user should be told, a sentence each.
    """

    engine: Mapping[str, Any]
    env: Mapping[str, str]
    settings: Settings
    placement: Placement
    notes: tuple[str, ...]


def plan_launch(
    options: LaunchOptions, given: Mapping[str, Any], facts: DeviceFacts, environ: Mapping[str, str]
) -> Launch:
    """Work out how to start the engine.

    Args:
        options: what the user asked of minedraft.
        given: the user's vLLM arguments by name, `model` among them; unset ones may be missing or have vLLM's defaults.
        facts: what there is.
        environ: environment variables of this process.

    Raises:
        VllmWorldError: arguments conflict, or the engines can't be placed or don't fit; the message says what to do.
    """
    _refuse_conflicts(given)
    _refuse_fixed(options.draft_args)
    tree = check_types(_settings_tree(options, given))
    mode = tree.get("mode", Mode.PSD)
    with_drafter = mode != Mode.AR or "mode" in tree.get("policies", {})
    notes = []
    if not with_drafter and "drafter" in tree:
        notes.append("mode ar: the drafter is not started")
        tree = {key: value for key, value in tree.items() if key != "drafter"}
    drafter = tree.get("drafter") or {}
    if with_drafter and "model" not in drafter.get("engine", {}):
        raise VllmWorldError(f"mode {mode} needs a drafter; name one with --draft, or use --mode ar")
    placement = _place(options, given, drafter, facts, environ, with_drafter)
    engine: dict[str, Any] = {
        "scheduler_cls": SCHEDULER_CLS,
        "async_scheduling": False,
        "tensor_parallel_size": placement.target_ranks,
    }
    space = environ.get(KV_SPACE) if facts.kind == CPU else None
    needs = [_need("target", given, placement.target, placement.target_ranks, space)]
    if with_drafter:
        engine["speculative_config"] = _speculative_config(DEFAULT_K if options.k is None else options.k)
        followed = {key: given.get(key) for key in ("dtype", "max_model_len")}  # see `drafter_engine`
        arguments = {**followed, **drafter["engine"]}
        needs.append(_need("drafter", arguments, placement.draft, placement.draft_ranks, space))
        tree = merged(tree, {"drafter": _placed(placement)})
    if facts.kind == CPU and not space:
        needs = _share_main_memory(facts, needs)
        engine["kv_cache_memory_bytes"] = needs[0].kv_bytes
        if with_drafter:
            tree = merged(tree, {"drafter": {"engine": {"kv_cache_memory_bytes": needs[1].kv_bytes}}})
    notes += check_fit(facts, needs)
    additional = given.get("additional_config") or {}
    engine["additional_config"] = {**additional, KEY: tree}
    settings = parse_settings(engine["additional_config"])
    _check_policies(settings)
    return Launch(engine, placement.target_env, settings, placement, tuple(notes))


# --- what can't be


def _refuse_conflicts(given: Mapping[str, Any]) -> None:
    """Say at once what contradicts minedraft's own arguments; what the engine can't serve at all, it says itself."""
    for name, why in _CONFLICTS.items():
        if given.get(name) not in (None, False):
            raise VllmWorldError(f"{_flag(name)} can't be given: {why}")
    if given.get("scheduler_cls") not in (None, SCHEDULER_CLS):
        raise VllmWorldError("--scheduler-cls can't be given: minedraft brings its own scheduler; remove it")
    for name, remedy in _SINGLE.items():
        if (given.get(name) or 1) > 1:
            raise VllmWorldError(f"{_flag(name)} is {given[name]}, can't be over 1 with minedraft; {remedy}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_fixed(draft_args: Mapping[str, Any]) -> None:
    for name in _FIXED_DRAFT_ARGS:
        if name in draft_args:
            remedy = "use --draft" if name == "model" else "remove it"
            raise VllmWorldError(f"--draft-arg {name} can't be given: minedraft sets it; {remedy}")


def _check_policies(settings: Settings) -> None:
    try:
        policies = load_policies(settings.policy_specs)
    except ValueError as error:
        raise VllmWorldError(f"policies: {error}") from error
    is_bounded = settings.mode == Mode.AR or settings.draft_capacity is not None
    if not is_bounded and policies.needs_capacity:
        raise VllmWorldError(
            f"{KEY}.draft_capacity is missing, without which selection {settings.policies['selection']!r} keeps every "
            "draft; give it fewer than are drafted in a round, or use --policy selection=all"
        )


# --- settings


def _settings_tree(options: LaunchOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """What stands under `minedraft` in additional_config: the user's own, then the options, the most specific last."""
    own = check_types((given.get("additional_config") or {}).get(KEY))
    asked: dict[str, Any] = {}
    if options.mode is not None:
        asked["mode"] = options.mode
    if options.policies:
        asked["policies"] = dict(options.policies)
    engine: dict[str, Any] = dict(options.draft_args)
    if options.draft is not None:
        engine["model"] = options.draft
    if engine:
        asked["drafter"] = {"engine": engine}
    return merged(merged(own, asked), options.settings)


def _speculative_config(k: int) -> dict[str, Any]:
    if k < 1:
        raise VllmWorldError(f"-k {k}: must be at least 1; use --mode ar to run without drafts")
    return {"method": "custom_class", "model": NULL_PROPOSER, "num_speculative_tokens": k}


# --- devices and memory


def _place(
    options: LaunchOptions,
    given: Mapping[str, Any],
    drafter: Mapping[str, Any],
    facts: DeviceFacts,
    environ: Mapping[str, str],
    with_drafter: bool,
) -> Placement:
    own_draft = _own_gpus(drafter, facts) or ",".join(map(str, drafter.get("cpus", ()))) or None
    if own_draft is not None and options.draft_devices is not None:
        raise VllmWorldError("--draft-devices and the drafter's own settings (env, cpus) both name devices; keep one")
    return place(
        facts,
        target=options.target_devices,
        draft=options.draft_devices or own_draft,
        target_ranks=given.get("tensor_parallel_size") or 1,
        draft_ranks=_draft_ranks(drafter),
        with_drafter=with_drafter,
        environ=environ,
    )


def _draft_ranks(drafter: Mapping[str, Any]) -> int:
    ranks = drafter.get("engine", {}).get("tensor_parallel_size") or 1
    if type(ranks) is not int or ranks < 1:
        name = f"{KEY}.drafter.engine.tensor_parallel_size"
        raise VllmWorldError(f"{name} is {ranks!r}, must be a whole number of at least 1")
    return ranks


def _own_gpus(drafter: Mapping[str, Any], facts: DeviceFacts) -> str:
    """Devices that the drafter's own environment names, as `place` takes them: there a number is a position."""
    found = []
    for name in filter(None, drafter.get("env", {}).get(facts.variable, "").split(",")):
        if name.strip().isdigit():
            if name.strip() not in facts.names:
                raise VllmWorldError(
                    f"{KEY}.drafter.env: {facts.variable} names device {name.strip()}, which is not visible here "
                    f"({','.join(facts.names) or 'none'} is)"
                )
            name = str(facts.names.index(name.strip()))
        found.append(name)
    return ",".join(found)


def _placed(placement: Placement) -> dict[str, Any]:
    """Settings of the drafter's process that follow from its devices."""
    found: dict[str, Any] = {"env": dict(placement.draft_env)}
    if placement.draft_cpus:
        found["cpus"] = list(placement.draft_cpus)
        found["env"][OMP_BIND] = "nobind"  # it pins itself; the target's cores are not for it
    if placement.draft_ranks > 1:
        found["engine"] = {"tensor_parallel_size": placement.draft_ranks}
    return found


def _need(
    role: str, arguments: Mapping[str, Any], devices: tuple[str, ...], ranks: int, space: str | None
) -> EngineNeed:
    model = str(arguments["model"])
    return EngineNeed(
        role=role,
        model=model,
        size=read_model_size(model, arguments.get("dtype") or "auto", arguments.get("kv_cache_dtype") or "auto"),
        ranks=ranks,
        devices=devices,
        max_model_len=arguments.get("max_model_len"),
        utilization=arguments.get("gpu_memory_utilization") or DEFAULT_UTILIZATION,
        kv_bytes=_space_bytes(space) if space else arguments.get("kv_cache_memory_bytes"),
    )


def _space_bytes(space: str) -> int:
    if not space.isdigit() or not int(space):
        raise VllmWorldError(f"{KV_SPACE} is {space!r}, must be a whole number of GiB over 0")
    return int(space) * GIB


def _share_main_memory(facts: DeviceFacts, needs: list[EngineNeed]) -> list[EngineNeed]:
    """Give a pool to each engine for which the user named none: left alone, each would take nearly all memory."""
    pool = default_cpu_kv_bytes(facts, needs)
    return [need if need.kv_bytes else dataclasses.replace(need, kv_bytes=pool) for need in needs]

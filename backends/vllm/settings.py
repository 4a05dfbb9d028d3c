"""Settings under the key `minedraft` of vLLM's `additional_config`: plain JSON, checked once.

Law of this file: imports nothing of vLLM, so that a launcher may check settings before anything heavy is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.policy import Mode

KEY: Final = "minedraft"

FIXED_ENGINE_ARGS: Final = ("scheduler_cls", "async_scheduling", "speculative_config", "pipeline_parallel_size")
"""Engine arguments of the drafter that are not the user's to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSettings:
    """The drafter's process.

    Attributes:
        engine: vLLM engine arguments, `model` among them; what is left out follows the target (see `drafter_engine`).
            Secrets are better left to the environment (HF_TOKEN): they don't show among the drafter's arguments, but
            vLLM logs all of `additional_config` when the target starts.
        env: environment variables of the process, `CUDA_VISIBLE_DEVICES` for example; `VLLM_CPU_OMP_THREADS_BIND` for a
            tensor-parallel drafter on a CPU, where vLLM by itself wants a NUMA node for each rank. The V1 model runner
            is used unless `VLLM_USE_V2_MODEL_RUNNER` is set, here or for the target.
        cpus: cores to pin the process to; empty means wherever the target may run.
        log: file for its output; empty means that of the target.
        require_drafter: whether the engine refuses to start with a drafter that can't. Otherwise it serves without
            drafts, and the drafter is tried again without end; the core then needs `num_gpu_blocks_override` in
            `engine`, since it plans with a pool that nobody has seen yet.
        start_timeout_s: how long a drafter may take to load.
        deadline_s: a draft that takes longer counts as late: its requests go on with k = 0, and the drafter gets no
            new work until it has answered.
        hang_timeout_s: a drafter that owes an answer, or doesn't answer pings, for so long is killed, busy or idle.
        max_restarts: how often a lost drafter is started again; without end where `require_drafter` is off.
        restart_backoff_s: wait before the first restart; doubles with each one that follows.
        max_restart_backoff_s: but no longer than this.
        healthy_s: a drafter that was up for so long makes the restarts before it forgotten, so that they don't add up
            over weeks.
    """

    engine: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    log: str = ""
    require_drafter: bool = True
    start_timeout_s: float = 600.0
    deadline_s: float = 2.0
    hang_timeout_s: float = 30.0
    max_restarts: int = 3
    restart_backoff_s: float = 1.0
    max_restart_backoff_s: float = 60.0
    healthy_s: float = 600.0

    def __post_init__(self) -> None:
        if not isinstance(self.engine, Mapping) or "model" not in self.engine:
            raise VllmWorldError(f"{KEY}.drafter.engine lacks 'model': give it the draft model's folder or name")
        for name in FIXED_ENGINE_ARGS:
            if name in self.engine:
                raise VllmWorldError(f"{KEY}.drafter.engine.{name} can't be given: minedraft sets it; remove it")
        for name in ("start_timeout_s", "deadline_s", "hang_timeout_s"):
            if not getattr(self, name) > 0:
                raise VllmWorldError(f"{KEY}.drafter.{name} is {getattr(self, name)!r}, must be > 0")
        for name in ("max_restarts", "restart_backoff_s", "max_restart_backoff_s", "healthy_s"):
            if not getattr(self, name) >= 0:
                raise VllmWorldError(f"{KEY}.drafter.{name} is {getattr(self, name)!r}, must be >= 0")
        if not all(type(core) is int and core >= 0 for core in self.cpus):
            raise VllmWorldError(f"{KEY}.drafter.cpus is {list(self.cpus)}, must be a list of core numbers, as [2, 3]")
        if not self.require_drafter and "num_gpu_blocks_override" not in self.engine:
            raise VllmWorldError(
                f"{KEY}.drafter.require_drafter is off, which needs {KEY}.drafter.engine.num_gpu_blocks_override: "
                "the core plans with the drafter's KV pool before there is one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What minedraft does in a vLLM engine.

    Attributes:
        mode: `psd`, `sd` or `ar`; a `mode` entry of `policies` wins over it.
        num_batches: sub-batches in `psd` mode.
        max_batch_size: requests per sub-batch; None means `max_num_seqs` shared out in psd, whole otherwise.
        policies: policy spec by slot, as `load_policies` takes them.
        drafter: None for a run without one (mode ar only).
        max_wait_s: longest stay of one `schedule()` call with nothing to verify: new requests and aborts wait so long.
        draft_capacity: drafts that one verification may carry, for selection policies; None means no bound.
        draft_ingests_beside: the drafter takes prompts in while the target works; false where they share a device.
        journal: file to record the run in; empty means none. If its disk is full it ends there, and the engine goes on.
        on_policy_error: what becomes of a policy that raises, or decides something illegal. `replace`: it is logged,
            the default policy of its slot takes its place, and no request is lost; a journal ends there. `raise`: the
            engine ends, for who tries a policy out.
        force_version: run on a vLLM that this package was not tested with.
    """

    mode: str = "psd"
    num_batches: int = 2
    max_batch_size: int | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    drafter: DrafterSettings | None = None
    max_wait_s: float = 0.02
    draft_capacity: int | None = None
    draft_ingests_beside: bool = True
    journal: str = ""
    on_policy_error: str = "replace"
    force_version: bool = False

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise VllmWorldError(f"{KEY}.mode is {self.mode!r}; use one of {', '.join(Mode)}")
        if self.mode != Mode.AR and self.drafter is None:
            raise VllmWorldError(f"{KEY}.mode is {self.mode!r}, which needs {KEY}.drafter; or set mode to 'ar'")
        if self.on_policy_error not in ("replace", "raise"):
            raise VllmWorldError(f"{KEY}.on_policy_error is {self.on_policy_error!r}; use 'replace' or 'raise'")
        if not self.max_wait_s > 0:
            raise VllmWorldError(f"{KEY}.max_wait_s is {self.max_wait_s!r}, must be > 0")
        if self.mode == Mode.PSD and self.num_batches < 2:
            raise VllmWorldError(f"{KEY}.num_batches is {self.num_batches}; psd needs at least 2, or use mode 'sd'")

    @property
    def policy_specs(self) -> dict[str, str]:
        """Specs by slot, the mode's among them."""
        return {"mode": f"fixed,mode={self.mode}", **self.policies}


def parse_settings(additional_config: Mapping[str, Any]) -> Settings:
    """Read the settings out of vLLM's `additional_config`.

    Raises:
        VllmWorldError: an unknown key (near matches are offered), or a value of the wrong type or out of range.
    """
    values = check_types(additional_config.get(KEY))
    if (drafter := values.get("drafter")) is not None:
        cpus = tuple(drafter.get("cpus", ()))
        values["drafter"] = DrafterSettings(**{"engine": {}, **drafter, "cpus": cpus})
    return Settings(**values)


def check_types(given: Any) -> dict[str, Any]:
    """What stands under `minedraft`, as it was given but for numbers in the drafter's `env`, which become text.

    Raises:
        VllmWorldError: a key is unknown (near matches are offered), or a value is of the wrong type.
    """
    values = _check(Settings, {} if given is None else given, KEY)
    if values.get("drafter") is not None:
        values["drafter"] = drafter = _check(DrafterSettings, values["drafter"], f"{KEY}.drafter")
        for name, value in drafter.get("env", {}).items():
            if type(value) is not str:
                raise VllmWorldError(f"{KEY}.drafter.env.{name} is {value!r}, must be a string")
    for slot, spec in values.get("policies", {}).items():
        if type(spec) is not str:
            raise VllmWorldError(f"{KEY}.policies.{slot} is {spec!r}, must be a string, as in 'fixed,k=2'")
    return values


def _check(kind: type[Any], given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise VllmWorldError(f"{where} is {given!r}, must be an object of settings")
    hints = {name: hint for name, hint in get_type_hints(kind).items() if not name.startswith("_")}
    values = dict(given)
    for name, value in given.items():
        if name not in hints:
            near = get_close_matches(str(name), list(hints), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(hints)}"
            raise VllmWorldError(f"{where} has no setting {name!r}: {hint}")
        if name == "env" and isinstance(value, Mapping):  # CUDA_VISIBLE_DEVICES=1 is read as a number
            values[name] = {key: str(one) if type(one) is int else one for key, one in value.items()}
        if not _fits(value, hints[name]):
            wanted = " or ".join(
                [_NAMES.get(get_origin(one) or one, "an object") for one in _alternatives(hints[name])]
            )
            raise VllmWorldError(f"{where}.{name} is {value!r}, must be {wanted}")
    return values


_NAMES: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list",
    NoneType: "null",
}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return (hint,) if get_origin(hint) in (None, tuple, Mapping) else get_args(hint)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value out of JSON is what an annotation says, as far as its outermost type goes."""
    for one in _alternatives(hint):
        origin = get_origin(one) or one
        if origin is tuple:
            origin = list | tuple
        elif origin is float:
            origin = int | float
        elif dataclasses.is_dataclass(origin):
            origin = Mapping
        if isinstance(value, origin) and (origin is bool or not isinstance(value, bool)):
            return True
    return False

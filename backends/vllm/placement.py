"""Which devices the target gets and which the drafter, from what the user named and what there is (`place`).

On a GPU platform devices are what the platform's variable (`CUDA_VISIBLE_DEVICES`) shows of them; on a CPU they are
cores. Target and drafter share a device only where the user named it for both: on a shared device nothing overlaps.

Law of this file: pure. What there is comes in as `DeviceFacts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from minedraft.backends.vllm.device_facts import CPU, DeviceFacts
from minedraft.backends.vllm.errors import VllmWorldError

OMP_BIND: Final = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's own variable: cores of each rank, as in `0-3|4-7`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who gets what.

    Attributes:
        kind: see `DeviceFacts`.
        target: names of the target's devices; empty if that is left to vLLM.
        draft: names of the drafter's; empty without a drafter.
        target_ranks: tensor-parallel size of the target.
        draft_ranks: of the drafter.
        target_env: environment of the target's processes.
        draft_env: environment of the drafter, on top of the target's.
        draft_cpus: cores of the drafter, on a CPU.
    """

    kind: str = CPU
    target: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    target_ranks: int = 1
    draft_ranks: int = 1
    target_env: Mapping[str, str] = field(default_factory=dict)
    draft_env: Mapping[str, str] = field(default_factory=dict)
    draft_cpus: tuple[int, ...] = ()

    @property
    def shared(self) -> tuple[str, ...]:
        """Devices that both were given."""
        return tuple([name for name in self.target if name in self.draft])

    @property
    def is_one_core(self) -> bool:
        """Whether the target has a single core."""
        return self.kind == CPU and len(self.target) == 1

    @property
    def num_target_devices(self) -> int:
        """For per-device figures: a rank's cores count as one device."""
        return self.target_ranks

    @property
    def num_draft_devices(self) -> int:
        """Devices that only the drafter uses, counted likewise."""
        return self.draft_ranks if set(self.draft) - set(self.target) else 0


def place(
    facts: DeviceFacts,
    *,
    target: str | None = None,
    draft: str | None = None,
    target_ranks: int = 1,
    draft_ranks: int = 1,
    with_drafter: bool = True,
    environ: Mapping[str, str],
) -> Placement:
    """Decide who gets what.

    By default the last devices draft, as many as the drafter has ranks, and the first ones serve the target; on a CPU
    the last core drafts and all others serve the target.

    Args:
        facts: what there is.
        target: the target's devices as the user named them, separated by commas: positions among the visible ones, or
            UUIDs; core numbers, or ranges of them, on a CPU. None for the default.
        draft: the drafter's, likewise.
        target_ranks: tensor-parallel size that the user gave, 1 if none: then it follows from `target`.
        draft_ranks: the drafter's, likewise.
        with_drafter: False for a run without one.
        environ: environment variables of this process.

    Raises:
        VllmWorldError: there are too few devices, or a name is none of them; the message says what to do.
    """
    if draft is not None and not with_drafter:
        raise VllmWorldError("--draft-devices is given, but this run has no drafter; remove it, or name a --draft")
    if facts.kind == CPU:
        return _place_on_cores(facts, target, draft, target_ranks, draft_ranks, with_drafter, environ)
    return _place_on_gpus(facts, target, draft, target_ranks, draft_ranks, with_drafter)


# --- GPUs


def _place_on_gpus(
    facts: DeviceFacts, target: str | None, draft: str | None, target_ranks: int, draft_ranks: int, with_drafter: bool
) -> Placement:
    named_target = None if target is None else _gpus(facts, target, "--target-devices")
    named_draft = None if draft is None else _gpus(facts, draft, "--draft-devices")
    target_ranks = _ranks(named_target, target_ranks, "--target-devices", "--tensor-parallel-size")
    draft_ranks = _ranks(named_draft, draft_ranks, "--draft-devices", "--draft-arg tensor_parallel_size")
    drafting: tuple[str, ...] = ()
    if with_drafter:
        free = [name for name in facts.names if name not in (named_target or ())]
        kept = 0 if named_target else target_ranks
        if named_draft is None and len(free) < draft_ranks + kept:
            raise _too_few(facts, target_ranks, draft_ranks)
        drafting = named_draft or tuple(free[len(free) - draft_ranks :])
    serving = named_target
    if serving is None:
        serving = tuple([name for name in facts.names if name not in drafting][:target_ranks])
        if len(serving) < target_ranks:
            raise _too_few(facts, target_ranks, draft_ranks if with_drafter else 0)
    return Placement(
        kind=facts.kind,
        target=serving,
        draft=drafting,
        target_ranks=target_ranks,
        draft_ranks=draft_ranks,
        target_env={facts.variable: ",".join(serving)},
        draft_env={facts.variable: ",".join(drafting)} if drafting else {},
    )


def _gpus(facts: DeviceFacts, text: str, option: str) -> tuple[str, ...]:
    """Names of the devices that the user means by positions or UUIDs."""
    found = []
    for part in _parts(text, option):
        if part.isdigit():
            if int(part) >= len(facts.names):
                raise VllmWorldError(
                    f"{option} {text}: there is no device {part}; visible are {_listing(facts)}, counted from 0"
                )
            found.append(facts.names[int(part)])
        elif part in facts.names:
            found.append(part)
        elif len(near := [name for name in facts.names if name.startswith(part)]) == 1 and not near[0].isdigit():
            found.append(near[0])  # CUDA takes the beginning of a UUID too
        elif part.startswith(("GPU-", "MIG-")) and all(name.isdigit() for name in facts.names):
            found.append(part)  # nothing is hidden, so any device may be named as the driver names it
        else:
            raise VllmWorldError(f"{option} {text}: {part!r} is none of the visible devices, {_listing(facts)}")
    return _distinct(tuple(found), text, option)


def _too_few(facts: DeviceFacts, target_ranks: int, draft_ranks: int) -> VllmWorldError:
    wanted = f"the target needs {target_ranks}" + (f" and the drafter {draft_ranks}" if draft_ranks else "")
    return VllmWorldError(
        f"{wanted}, but {len(facts.names)} devices are visible ({_listing(facts)}): make more visible with "
        f"{facts.variable}, lower --tensor-parallel-size, or name both --target-devices and --draft-devices to let "
        "them share"
    )


def _ranks(named: Sequence[str] | None, given: int, option: str, size_option: str) -> int:
    if named is None or len(named) == given:
        return given
    if given == 1:
        return len(named)
    raise VllmWorldError(f"{option} names {len(named)} devices, but {size_option} is {given}; make them agree")


# --- cores


def _place_on_cores(
    facts: DeviceFacts,
    target: str | None,
    draft: str | None,
    target_ranks: int,
    draft_ranks: int,
    with_drafter: bool,
    environ: Mapping[str, str],
) -> Placement:
    bound = environ.get(OMP_BIND, "auto")
    if target is not None and bound != "auto":
        raise VllmWorldError(f"both --target-devices and {OMP_BIND} name the target's cores; keep one of them")
    if draft_ranks != 1:
        raise VllmWorldError("the drafter's tensor_parallel_size must be 1 on a CPU: its cores work as one device")
    serving = None if target is None else _cores(facts, target, "--target-devices")
    if bound not in ("auto", "nobind"):
        serving = tuple([name for part in bound.split("|") for name in _cores(facts, part, OMP_BIND)])
    drafting: tuple[str, ...] = ()
    if with_drafter:
        free = [name for name in facts.names if name not in (serving or ())]
        if draft is None and len(free) < 1 + (0 if serving else target_ranks):
            raise VllmWorldError(
                f"the target needs {target_ranks} of the cores {_listing(facts)} and the drafter one more: give this "
                "process more cores, or name both --target-devices and --draft-devices to let them share"
            )
        drafting = (free[-1],) if draft is None else _cores(facts, draft, "--draft-devices")
    if serving is None:
        serving = tuple([name for name in facts.names if name not in drafting])
        if not serving:
            raise VllmWorldError(
                "--draft-devices names every core that this process has; leave some to the target, or name "
                "--target-devices too to let them share"
            )
    env = {} if bound != "auto" else {OMP_BIND: _bind(serving, target_ranks)}
    return Placement(
        kind=facts.kind,
        target=() if bound == "nobind" else serving,
        draft=drafting,
        target_ranks=target_ranks,
        target_env=env,
        # The drafter's engine is in one process: its threads are those of the cores to which that is pinned.
        draft_env={"OMP_NUM_THREADS": str(len(drafting))} if drafting else {},
        draft_cpus=tuple([int(name) for name in drafting]),
    )


def _bind(cores: Sequence[str], num_ranks: int) -> str:
    """Cores shared out among the ranks in vLLM's notation, neighbours together; what is left over goes unused."""
    each = len(cores) // num_ranks
    if not each:
        raise VllmWorldError(
            f"--tensor-parallel-size is {num_ranks}, but the target has the cores {','.join(cores)} only; "
            "lower it, or name more --target-devices"
        )
    return "|".join([",".join(cores[rank * each : (rank + 1) * each]) for rank in range(num_ranks)])


def _cores(facts: DeviceFacts, text: str, option: str) -> tuple[str, ...]:
    """Cores of a list such as `0,2-5`."""
    found: list[str] = []
    for part in _parts(text, option):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise VllmWorldError(f"{option} {text}: {part!r} is no core; write numbers or ranges, as in 0,2-5")
        found += [str(core) for core in range(int(first), int(last if dash else first) + 1)]
    for name in found:
        if name not in facts.names:
            raise VllmWorldError(f"{option} {text}: this process may not use core {name}; it has {_listing(facts)}")
    return _distinct(tuple(found), text, option)


# --- both


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise VllmWorldError(f"{option} {text!r}: write device names separated by commas, as in 0,1")
    return parts


def _distinct(names: tuple[str, ...], text: str, option: str) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise VllmWorldError(f"{option} {text}: names a device twice; name each once")
    return names


def _listing(facts: DeviceFacts) -> str:
    return ",".join(facts.names) or "none"

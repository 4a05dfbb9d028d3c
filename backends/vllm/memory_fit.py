"""Whether two models fit where they are to go, found out before anything heavy is loaded (`check_fit`).

What an engine needs at the least is its weights and the KV of one sequence of `max_model_len`. That is a lower bound:
activations, CUDA graphs and the framework come on top, so passing this check promises nothing, and failing it means
that the start would fail later. What can't be known (a hub name that isn't on this disk) is said, never guessed.

Law of this file: reads files and facts, decides and changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minedraft.backends.vllm.device_facts import CPU, DeviceFacts
from minedraft.backends.vllm.errors import VllmWorldError

GIB: Final = 1 << 30
DEFAULT_UTILIZATION: Final = 0.92
"""vLLM's default of gpu_memory_utilization, used where nobody says."""

DEFAULT_CPU_KV_BYTES: Final = 4 * GIB
_DTYPE_BYTES: Final = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1
}  # fmt: skip
_SAFETENSORS_FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SAFETENSORS_OTHERS: Final = {"F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model's folder says of its size.

    Attributes:
        weight_bytes: of the weights once they are loaded; None if the folder doesn't tell.
        num_layers: layers with KV.
        num_kv_heads: KV heads per layer; 1 where attention is latent, which is not shared out among ranks.
        kv_values_per_head: numbers kept per token, layer and head.
        kv_value_bytes: bytes of each.
        max_model_len: the context that it was made for; None if it doesn't say.
    """

    weight_bytes: int | None
    num_layers: int
    num_kv_heads: int
    kv_values_per_head: int
    kv_value_bytes: int
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """An engine that is to be started.

    Attributes:
        role: target or drafter, for messages.
        model: its name, for messages.
        size: None if nothing is known of it.
        ranks: its tensor-parallel size.
        devices: names of those that it gets.
        max_model_len: the context that it will serve; None for the model's own, -1 for what fits.
        utilization: share of a device's memory that it may use.
        kv_bytes: KV pool of each rank, if that was said; then `utilization` doesn't count.
    """

    role: str
    model: str
    size: ModelSize | None
    ranks: int = 1
    devices: tuple[str, ...] = ()
    max_model_len: int | None = None
    utilization: float = DEFAULT_UTILIZATION
    kv_bytes: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence; 0 if nobody knows."""
        known = None if self.size is None else self.size.max_model_len
        return max(0, self.max_model_len or known or 0)

    @property
    def weights(self) -> int:
        """Bytes of weights on each rank; 0 if nobody knows."""
        return 0 if self.size is None else math.ceil((self.size.weight_bytes or 0) / self.ranks)

    @property
    def least_kv(self) -> int:
        """Bytes of KV on each rank for one sequence."""
        if self.size is None:
            return 0
        heads = max(1, math.ceil(self.size.num_kv_heads / self.ranks))
        return self.num_tokens * self.size.num_layers * heads * self.size.kv_values_per_head * self.size.kv_value_bytes

    @property
    def least(self) -> int:
        """Bytes on each rank without which it can't start."""
        return self.weights + max(self.kv_bytes or 0, self.least_kv)


def check_fit(facts: DeviceFacts, needs: Sequence[EngineNeed]) -> list[str]:
    """Compare what the engines need with what there is.

    Args:
        facts: what there is.
        needs: the target's engine, then the drafter's if there is one.

    Returns:
        What couldn't be checked, a sentence each.

    Raises:
        VllmWorldError: it can't fit; the message names the model, the bytes needed, those there, and remedies.
    """
    for need in needs:
        _check_kv(need)
    warnings = [
        f"{need.role} {need.model}: its size is not known before it is loaded, so whether it fits was not checked"
        for need in needs
        if need.size is None or need.size.weight_bytes is None
    ]
    if facts.kind == CPU:
        _check_main_memory(facts, needs)
        return warnings
    for device in facts.devices:
        on_it = [need for need in needs if device.name in need.devices]
        if on_it and (device.total_bytes is None or device.free_bytes is None):
            warnings.append(f"device {device.name}: its free memory is not known, so what fits there was not checked")
        elif on_it:
            _check_device(device.name, device.total_bytes or 0, device.free_bytes or 0, on_it)
    return warnings


def _check_kv(need: EngineNeed) -> None:
    if need.kv_bytes is not None and need.kv_bytes < need.least_kv:
        raise VllmWorldError(
            f"{need.role} {need.model}: one sequence of max_model_len {need.num_tokens} needs {_gib(need.least_kv)} of "
            f"KV, but its KV pool has {_gib(need.kv_bytes)}; lower --max-model-len, or raise --kv-cache-memory-bytes "
            "or VLLM_CPU_KVCACHE_SPACE"
        )


def _check_device(name: str, total: int, free: int, on_it: Sequence[EngineNeed]) -> None:
    for need in on_it:
        allowed = free if need.kv_bytes is not None else min(free, int(total * need.utilization))
        if need.least > allowed:
            raise VllmWorldError(
                f"{_needs(need)}, but of device {name} it may use {_gib(allowed)} ({_gib(free)} free, "
                f"gpu_memory_utilization {need.utilization:g}); {_remedies(need)}"
            )
    if sum(need.least for need in on_it) > free:
        listed = " and ".join(map(_needs, on_it))
        raise VllmWorldError(f"device {name} has {_gib(free)} free, but {listed}; give the drafter a device of its own")
    shares = sum(need.utilization for need in on_it if need.kv_bytes is None)
    if len(on_it) > 1 and shares > 1.0:
        raise VllmWorldError(
            f"target and drafter share device {name}, but together they may use {100 * shares:.0f} % of it; give "
            "shares that sum up to less than 1: --gpu-memory-utilization, --draft-arg gpu_memory_utilization=..."
        )


def _check_main_memory(facts: DeviceFacts, needs: Sequence[EngineNeed]) -> None:
    if facts.free_bytes is not None and sum(need.ranks * need.least for need in needs) > facts.free_bytes:
        raise VllmWorldError(
            f"{_gib(facts.free_bytes)} of main memory are available, but {' and '.join(map(_needs, needs))}; lower "
            f"VLLM_CPU_KVCACHE_SPACE or --kv-cache-memory-bytes, or {_remedies(needs[-1])}"
        )


def _needs(need: EngineNeed) -> str:
    each = " on each rank" if need.ranks > 1 else ""
    return (
        f"{need.role} {need.model} needs at least {_gib(need.least)}{each} ({_gib(need.weights)} of weights and "
        f"{_gib(need.least - need.weights)} of KV)"
    )


def _remedies(need: EngineNeed) -> str:
    fewer = "use a smaller drafter" if need.role == "drafter" else "raise --tensor-parallel-size"
    return f"lower --max-model-len, {fewer}, or free memory"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 100 else f"{num_bytes / (1 << 20):.2f} MiB"


def default_cpu_kv_bytes(facts: DeviceFacts, needs: Sequence[EngineNeed]) -> int:
    """A KV pool for each rank on a CPU where the user names none, since vLLM would give nearly all memory to one.

    Half of what the weights leave is shared out, at most 4 GiB to each, at least what one sequence needs.
    """
    weights = sum(need.ranks * need.weights for need in needs)
    left = max(0, (facts.free_bytes or 0) - weights)
    least = max([need.least_kv for need in needs], default=0)
    return max(least, min(DEFAULT_CPU_KV_BYTES, left // (2 * sum(need.ranks for need in needs))))


# --- a model's folder


def read_model_size(model: str, dtype: str = "auto", kv_cache_dtype: str = "auto") -> ModelSize | None:
    """What a folder says of a model's size.

    Args:
        model: the folder; for anything else nothing is known.
        dtype: in which its weights will be loaded, as vLLM takes it.
        kv_cache_dtype: of its KV, likewise.

    Raises:
        VllmWorldError: the folder's config.json can't be read.
    """
    folder = Path(model).expanduser()
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = {**config, **(config.get("text_config") or {})}
        loaded = _loaded_bytes(config, dtype)
        kv_bytes = _DTYPE_BYTES.get(kv_cache_dtype, loaded)
        weights = _weight_bytes(folder, loaded) or _estimated_weights(config, loaded)
        return _with_kv(config, weights, kv_bytes)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise VllmWorldError(f"{path}: can't be used as a model's configuration ({error}); check the folder") from error


def _with_kv(config: Mapping[str, Any], weights: int | None, kv_value_bytes: int) -> ModelSize | None:
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not layers or not heads:
        return None
    num_kv_heads = config.get("num_key_value_heads") or heads
    values = 2 * int(config.get("head_dim") or config["hidden_size"] // heads)
    if config.get("kv_lora_rank"):  # multi-head latent attention
        num_kv_heads, values = 1, int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
    if kinds := config.get("layer_types"):  # the other kinds keep a window or a state only
        layers = sum(kind == "full_attention" for kind in kinds)
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        layers = 0
    context = config.get("max_position_embeddings")
    return ModelSize(
        weights, int(layers), int(num_kv_heads), values, kv_value_bytes, None if context is None else int(context)
    )


def _loaded_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of a weight once loaded; `auto` means the checkpoint's type, but vLLM loads float32 in half of that."""
    if dtype != "auto":
        return _DTYPE_BYTES.get(dtype, 2)
    return min(2, _DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 2))


def _weight_bytes(folder: Path, float_bytes: int) -> int | None:
    """Bytes of all weights, from the heads of the safetensors files, else from their index, else from file sizes."""
    heads = [_safetensors_bytes(path, float_bytes) for path in sorted(folder.glob("*.safetensors"))]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listing = json.loads(index.read_text(encoding="utf-8"))
        if len(heads) < len(set(listing.get("weight_map", {}).values())):  # not all shards are here yet
            size = (listing.get("metadata") or {}).get("total_size")
            return None if size is None else int(size)
    if heads:
        return sum(heads)
    others = [path.stat().st_size for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    return sum(others) or None


def _safetensors_bytes(path: Path, float_bytes: int) -> int:
    """Bytes of a file's tensors once loaded: floats in the type wanted, all else as it is.

    The format: eight bytes of length, then JSON with type and shape by name.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file, or not whole")
        head = json.loads(file.read(length))
    total = 0
    for name, entry in head.items():
        if name != "__metadata__":
            kind = entry["dtype"]
            each = float_bytes if kind in _SAFETENSORS_FLOATS else _SAFETENSORS_OTHERS.get(kind, 1)
            total += math.prod(entry["shape"]) * each
    return total


def _estimated_weights(config: Mapping[str, Any], float_bytes: int) -> int | None:
    """Bytes of a Llama-like model's weights by its configuration; None where the shape isn't that simple."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if any(not config.get(name) for name in names) or config.get("num_experts") or config.get("num_local_experts"):
        return None
    hidden, inner, layers, heads, vocabulary = (int(config[name]) for name in names)
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_dim * (heads + (config.get("num_key_value_heads") or heads))
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return float_bytes * (layers * (attention + 3 * hidden * inner) + embeddings)

"""What two models need and whether it fits. Pure but for small files; needs no vLLM."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from minedraft.backends.vllm.device_facts import CPU, Device, DeviceFacts
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.memory_fit import (
    DEFAULT_CPU_KV_BYTES,
    GIB,
    EngineNeed,
    ModelSize,
    check_fit,
    default_cpu_kv_bytes,
    read_model_size,
)

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
"""The published shape of Llama 3.1 8B: 8,030,261,248 parameters."""


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes))
    return folder


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file's head, as the format has it; the numbers behind it are not looked at."""
    head = json.dumps({name: {"dtype": kind, "shape": shape} for name, (kind, shape) in tensors.items()}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head)


def size_of(folder: Path, dtype: str = "auto", kv: str = "auto") -> ModelSize:
    size = read_model_size(str(folder), dtype, kv)
    assert size is not None
    return size


def need(size: ModelSize | None, role: str = "target", **fields: Any) -> EngineNeed:
    return EngineNeed(role=role, model="M", size=size, **fields)


# --- reading a folder


def test_weights_from_the_configuration(tmp_path: Path) -> None:
    """Without weights on disk the shape tells; norms are left out, 0.27 million numbers of 8 billion."""
    size = size_of(write_config(tmp_path))
    assert size.weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert (size.max_model_len, size.num_kv_heads) == (131072, 8)
    assert size_of(tmp_path, "float32").weight_bytes == 2 * size.weight_bytes


def test_weights_from_safetensors(tmp_path: Path) -> None:
    """Floats count in the type that they will have, everything else as it is."""
    write_config(tmp_path)
    write_safetensors(tmp_path / "model-1.safetensors", {"a": ("F32", [10, 20]), "b": ("I32", [7])})
    write_safetensors(tmp_path / "model-2.safetensors", {"c": ("BF16", [100])})
    assert size_of(tmp_path).weight_bytes == 2 * 300 + 4 * 7
    assert size_of(tmp_path, "float32").weight_bytes == 4 * 300 + 4 * 7


def test_real_safetensors_files_can_be_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(4, dtype=torch.int8), "c": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, write_config(tmp_path) / "model.safetensors", metadata={"format": "pt"})
    assert size_of(tmp_path).weight_bytes == 2 * (15 + 2) + 4


def test_weights_from_the_index_while_shards_are_missing(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_safetensors(tmp_path / "model-1.safetensors", {"a": ("BF16", [10])})
    index = {"metadata": {"total_size": 12345}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert size_of(tmp_path).weight_bytes == 12345


def test_weights_from_other_files(tmp_path: Path) -> None:
    (write_config(tmp_path) / "pytorch_model.bin").write_bytes(bytes(999))
    assert size_of(tmp_path).weight_bytes == 999


def test_what_is_not_a_folder_is_unknown(tmp_path: Path) -> None:
    assert read_model_size("owner/model") is None
    assert read_model_size(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "[]", '{"num_hidden_layers": "x", "num_attention_heads": 2, "hidden_size": 4}'])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(VllmWorldError, match=r"config\.json"):
        read_model_size(str(tmp_path))


def test_broken_weights_are_named(tmp_path: Path) -> None:
    (write_config(tmp_path) / "model.safetensors").write_bytes(b"short")
    with pytest.raises(VllmWorldError, match="check the folder"):
        read_model_size(str(tmp_path))


# --- KV


def test_kv_per_token(tmp_path: Path) -> None:
    """Llama 3.1 8B keeps 128 KiB per token in bfloat16: 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    size = size_of(write_config(tmp_path))
    assert need(size, max_model_len=1).least_kv == 131072
    assert need(size, max_model_len=1, ranks=4).least_kv == 131072 // 4
    assert need(size, max_model_len=1, ranks=16).least_kv == 131072 // 8  # a head can't be split
    assert need(size).least_kv == 131072 * 131072
    assert need(size, max_model_len=-1).least_kv == 0  # vLLM shortens the context until it fits
    assert need(size_of(tmp_path, kv="fp8"), max_model_len=1).least_kv == 65536


def test_kv_of_other_kinds_of_attention(tmp_path: Path) -> None:
    """Latent attention keeps one vector per token and layer, on every rank; window layers are not counted."""
    latent = size_of(write_config(tmp_path / "a", kv_lora_rank=512, qk_rope_head_dim=64))
    assert need(latent, max_model_len=1).least_kv == need(latent, max_model_len=1, ranks=2).least_kv == 32 * 576 * 2
    kinds = ["sliding_attention", "full_attention"] * 16
    mixed = size_of(write_config(tmp_path / "b", layer_types=kinds, sliding_window=4096))
    assert need(mixed, max_model_len=1).least_kv == 65536
    window = size_of(write_config(tmp_path / "c", sliding_window=4096))
    assert need(window, max_model_len=1).least_kv == 0
    unused = size_of(write_config(tmp_path / "d", sliding_window=4096, use_sliding_window=False))
    assert need(unused, max_model_len=1).least_kv == 131072


# --- GPUs


def gpus(*free_gib: float, total_gib: float = 80.0) -> DeviceFacts:
    devices = [Device(str(i), int(total_gib * GIB), int(free * GIB)) for i, free in enumerate(free_gib)]
    return DeviceFacts("cuda", tuple(devices), "CUDA_VISIBLE_DEVICES", 512 * GIB, 400 * GIB)


def llama(tmp_path: Path) -> ModelSize:
    return size_of(write_config(tmp_path))


def test_it_fits(tmp_path: Path) -> None:
    size = llama(tmp_path)
    needs = [
        need(size, ranks=2, devices=("0", "1")),
        need(size, "drafter", devices=("2",), max_model_len=4096),
    ]
    assert check_fit(gpus(79, 79, 79), needs) == []


def test_a_target_that_does_not_fit(tmp_path: Path) -> None:
    """15 GiB of weights and 16 GiB for one sequence of the whole context; two ranks halve it."""
    size = llama(tmp_path)
    with pytest.raises(VllmWorldError) as caught:
        check_fit(gpus(23, total_gib=24), [need(size, devices=("0",))])
    text = str(caught.value)
    for part in ("target M", "30.96 GiB", "14.96 GiB of weights", "16.00 GiB of KV", "22.08 GiB", "23.00 GiB free"):
        assert part in text
    assert "lower --max-model-len" in text
    check_fit(gpus(23, 23, total_gib=24), [need(size, ranks=2, devices=("0", "1"))])
    check_fit(gpus(23, total_gib=24), [need(size, devices=("0",), max_model_len=32768)])


def test_memory_that_others_use(tmp_path: Path) -> None:
    with pytest.raises(VllmWorldError, match=r"device 1 it may use 10\.00 GiB"):
        check_fit(gpus(79, 10), [need(llama(tmp_path), ranks=2, devices=("0", "1"))])


def test_a_drafter_that_does_not_fit(tmp_path: Path) -> None:
    needs = [need(None, devices=("0",)), need(llama(tmp_path), "drafter", devices=("1",))]
    with pytest.raises(VllmWorldError, match=r"drafter M needs at least 30\.96 GiB.*use a smaller drafter"):
        check_fit(gpus(79, 20), needs)


def test_a_shared_device(tmp_path: Path) -> None:
    """Both count against what is free, and shares of vLLM's memory must leave room for each other."""
    size = llama(tmp_path)

    def both(**fields: Any) -> list[EngineNeed]:
        return [need(size, devices=("0",), **fields), need(size, "drafter", devices=("0",), **fields)]

    with pytest.raises(VllmWorldError, match="give the drafter a device of its own"):
        check_fit(gpus(50), both(utilization=0.45))
    with pytest.raises(VllmWorldError, match=r"184 %.*--draft-arg gpu_memory_utilization"):
        check_fit(gpus(79), both())
    assert check_fit(gpus(79), both(utilization=0.45)) == []


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    facts = DeviceFacts("cuda", (Device("GPU-1"), Device("1", 80 * GIB, 80 * GIB)), "CUDA_VISIBLE_DEVICES")
    found = check_fit(facts, [need(llama(tmp_path), devices=("GPU-1",)), need(None, "drafter", devices=("1",))])
    assert len(found) == 2
    assert "drafter M: its size is not known" in found[0]
    assert "device GPU-1: its free memory is not known" in found[1]


# --- CPUs


def machine(free_gib: float) -> DeviceFacts:
    return DeviceFacts(CPU, (Device("0"), Device("1")), "", 32 * GIB, int(free_gib * GIB))


def test_main_memory_holds_both(tmp_path: Path) -> None:
    size = llama(tmp_path)
    needs = [
        need(size, kv_bytes=4 * GIB, max_model_len=8192),
        need(size, "drafter", kv_bytes=4 * GIB, max_model_len=64),
    ]
    assert check_fit(machine(38), needs) == []
    with pytest.raises(VllmWorldError) as caught:
        check_fit(machine(37), needs)
    for part in ("37.00 GiB of main memory", "target M", "drafter M", "VLLM_CPU_KVCACHE_SPACE"):
        assert part in str(caught.value)


def test_a_pool_below_one_sequence(tmp_path: Path) -> None:
    with pytest.raises(
        VllmWorldError, match=r"max_model_len 16384 needs 2\.00 GiB of KV, but its KV pool has 1\.00 GiB"
    ):
        check_fit(machine(64), [need(llama(tmp_path), kv_bytes=GIB, max_model_len=16384)])


def test_the_default_pool_on_a_cpu(tmp_path: Path) -> None:
    """Half of what the weights leave, shared out; capped; never below one sequence."""
    size = llama(tmp_path)
    needs = [need(size, max_model_len=64), need(size, "drafter", max_model_len=64)]
    assert default_cpu_kv_bytes(machine(64), needs) == DEFAULT_CPU_KV_BYTES
    left = int(32 * GIB) - 2 * needs[0].weights
    assert default_cpu_kv_bytes(machine(32), needs) == left // 4
    assert default_cpu_kv_bytes(machine(1), needs) == needs[0].least_kv
    assert default_cpu_kv_bytes(machine(64), [need(None)]) == DEFAULT_CPU_KV_BYTES

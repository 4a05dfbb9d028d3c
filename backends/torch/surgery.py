"""Making models out of models: layers dropped, layers added that do nothing, weights with noise, and tiny random ones.

All work on Hugging Face folders. They give drafters of any quality, without a download and without training.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minedraft.backends.torch.errors import TorchWorldError

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
# What an identity layer must not add to the residual stream.
_RESIDUAL_OUTPUTS: Final = (
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
    "mlp.down_proj.weight",
    "mlp.down_proj.bias",
)


def drop_layers(source: Path, destination: Path, layers: Iterable[int]) -> None:
    """Write a copy of a Llama-like model without some layers: a drafter with the same vocabulary.

    Args:
        source: HF folder.
        destination: folder to fill; made if missing.
        layers: indices to leave out.

    Raises:
        TorchWorldError: an index is out of range, or the weights are not named as in Llama.
    """
    dropped = sorted(layers)
    config = _read_config(source)
    depth = config["num_hidden_layers"]
    if any(not 0 <= index < depth for index in dropped):
        raise TorchWorldError(f"layers {dropped}: model {str(source)!r} has layers 0 to {depth - 1}")
    kept = [index for index in range(depth) if index not in dropped]
    new_index = {old: new for new, old in enumerate(kept)}
    weights: dict[str, Tensor] = {}
    for name, tensor in _read_weights(source).items():
        match = _LAYER.fullmatch(name)
        if match is None:
            weights[name] = tensor
        elif int(match[1]) in new_index:
            weights[f"model.layers.{new_index[int(match[1])]}.{match[2]}"] = tensor
    _write(source, destination, _with_depth(config, kept), weights)


def add_identity_layers(source: Path, destination: Path, count: int) -> None:
    """Write a copy with layers added that pass their input on: the same text, computed more slowly.

    Stands in for a target that is much larger than its drafter, so that overlap shows on two CPU cores.

    Args:
        source: HF folder.
        destination: folder to fill; made if missing.
        count: layers to add, copies of the last one whose outputs are zero.
    """
    config = _read_config(source)
    depth = config["num_hidden_layers"]
    weights = _read_weights(source)
    prefix = f"model.layers.{depth - 1}."
    last = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    for index in range(depth, depth + count):
        for name, tensor in last.items():
            copy = torch.zeros_like(tensor) if name in _RESIDUAL_OUTPUTS else tensor.clone()
            weights[f"model.layers.{index}.{name}"] = copy
    order = [*range(depth), *[depth - 1] * count]
    _write(source, destination, _with_depth(config, order), weights)


def make_noisy_copy(source: Path, destination: Path, noise: float, *, seed: int = 0) -> None:
    """Write a copy whose weights carry noise: a drafter that agrees the less, the larger the noise.

    Args:
        source: HF folder.
        destination: folder to fill; made if missing.
        noise: standard deviation of the noise, relative to each tensor's own.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def perturb(tensor: Tensor) -> Tensor:
        if tensor.numel() < 2:
            return tensor
        values = tensor.double()
        draw = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        return (values + noise * values.std() * draw).to(tensor.dtype)

    weights = _read_weights(source)
    _write(source, destination, _read_config(source), {name: perturb(weights[name]) for name in sorted(weights)})


def make_tiny_llama(
    destination: Path,
    *,
    seed: int,
    vocab_size: int = 128,
    num_layers: int = 2,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_model_len: int = 512,
    eos_token_id: int | list[int] = 2,
    initializer_range: float = 0.3,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Write a random Llama without a tokenizer; for tests, where only exactness counts.

    Args:
        destination: folder to fill; made if missing.
        seed: of the weights.
        vocab_size: tokens.
        num_layers: depth.
        hidden_size: width; a multiple of `num_heads`.
        num_heads: attention heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        max_model_len: positions.
        eos_token_id: EOS id, or several.
        initializer_range: spread of the weights; large values make texts that vary.
        dtype: of the saved weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_model_len,
        initializer_range=initializer_range,
        bos_token_id=1,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(destination)


def _with_depth(config: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """The configuration for layers `order` of the old model."""
    changed = {**config, "num_hidden_layers": len(order)}
    if config.get("layer_types"):
        changed["layer_types"] = [config["layer_types"][index] for index in order]
    return changed


def _read_config(source: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    return config


def _read_weights(source: Path) -> dict[str, Tensor]:
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise TorchWorldError(f"model {str(source)!r} has no *.safetensors; save it with save_pretrained first")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    if not any(_LAYER.fullmatch(name) for name in weights):
        raise TorchWorldError(f"model {str(source)!r}: its layers are not named model.layers.N as in Llama")
    return weights


def _write(source: Path, destination: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, destination)
    (destination / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})

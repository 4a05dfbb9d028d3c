"""Shapes of dense and mixture-of-experts transformers: weights, FLOPs and KV bytes follow from them.

Names come from `data/models.toml`; a `config.json` as Hugging Face publishes it works as well. Counted are the matrices
(norms and biases are below 0.1 % of a model and are left out). Only decoders with gated MLPs and plain grouped-query
attention are priced; others (latent attention, sliding windows, linear attention) are refused, not approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minedraft.json_text import parse_json
from minedraft.sim.presets import offer, read_presets


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices inside the layers are stored and multiplied; embeddings and output head stay in 16 bits.

    Attributes:
        bits: per weight, scales and zero points included.
        compute: precision of the products on a GPU that has it (bf16 otherwise).
        weight_only: weights are expanded to bf16 on the fly.
    """

    bits: float
    compute: str = "bf16"
    weight_only: bool = False


QUANTIZATIONS: Final[Mapping[str, Quantization]] = {
    "none": Quantization(16.0),
    "fp8": Quantization(8.0, "fp8"),  # a scale per matrix
    "fp8_block": Quantization(8.0 + 32.0 / 128**2, "fp8"),  # a 32-bit scale per block of 128 x 128
    # Groups of 128 weights share a 16-bit scale and a 4-bit zero point.
    "awq": Quantization(4.0 + 20.0 / 128.0, weight_only=True),
    "gptq": Quantization(4.0 + 20.0 / 128.0, weight_only=True),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder.

    Attributes:
        name: what to call it.
        source: where the numbers come from.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        intermediate_size: inner width of an MLP, or of one expert.
        vocab_size: rows of the embedding.
        tied_embeddings: the output head is the embedding.
        num_experts: experts per layer; 0 for a dense model.
        num_experts_per_token: experts that a token visits.
        quantization: a key of `QUANTIZATIONS`.
        num_fused_inputs: hidden vectors that a projection joins into one before the first layer (EAGLE heads); 0 for
            an ordinary model.
        fused_input_size: width of each of those; 0 for `hidden_size`.
        attention_input_size: width that the first layer's attention reads; 0 for `hidden_size`.
        head_vocab_size: rows of the output head; 0 for `vocab_size`.

    Raises:
        ValueError: a figure is impossible; the message names it.
    """

    name: str
    source: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    quantization: str = "none"
    num_fused_inputs: int = 0
    fused_input_size: int = 0
    attention_input_size: int = 0
    head_vocab_size: int = 0

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        )
        for field in sizes:
            if getattr(self, field) < 1:
                raise ValueError(f"ModelShape.{field} is {getattr(self, field)}, must be >= 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"ModelShape.num_kv_heads is {self.num_kv_heads}, must divide num_heads {self.num_heads}")
        if self.num_experts and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"ModelShape.num_experts_per_token is {self.num_experts_per_token}, must be in 1..{self.num_experts}"
            )
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(
                f"ModelShape.quantization is {self.quantization!r}; {offer(self.quantization, QUANTIZATIONS)}"
            )

    # --- weights, in numbers of parameters

    @property
    def attention_params(self) -> int:
        """Of the first layer, and of all others unless that reads more."""
        width = self.attention_input_size or self.hidden_size
        return width * self.qkv_size + self.num_heads * self.head_dim * self.hidden_size

    @property
    def qkv_size(self) -> int:
        """Outputs of one layer's query, key and value projections."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def state_size(self) -> int:
        """Numbers of the target's hidden states that a head reads per position; 0 for a whole model.

        An EAGLE or MTP head joins one state with the embedding, an EAGLE-3 head three states.
        """
        width = self.fused_input_size or self.hidden_size
        return (1 if self.num_fused_inputs == 2 else self.num_fused_inputs) * width

    @property
    def fusion_params(self) -> int:
        """Of the projection that joins a head's inputs."""
        return self.num_fused_inputs * (self.fused_input_size or self.hidden_size) * self.hidden_size

    @property
    def mlp_params(self) -> int:
        """Of one MLP or one expert: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def always_read_params(self) -> int:
        """In all layers, what every step reads: all but experts, embedding and output head."""
        router = self.hidden_size * self.num_experts
        per_layer = self.attention_params + (router if self.num_experts else self.mlp_params)
        narrower = (self.num_layers - 1) * ((self.attention_input_size or self.hidden_size) - self.hidden_size)
        return self.num_layers * per_layer - narrower * self.qkv_size + self.fusion_params

    @property
    def expert_params(self) -> int:
        """Of all experts of all layers."""
        return self.num_layers * self.num_experts * self.mlp_params

    @property
    def head_params(self) -> int:
        """Of the output head."""
        return (self.head_vocab_size or self.vocab_size) * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Of the embedding, beside the output head."""
        shared = self.tied_embeddings and not self.head_vocab_size
        return 0 if shared else self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All of them."""
        return self.always_read_params + self.expert_params + self.head_params + self.embedding_params

    # --- bytes and FLOPs

    @property
    def layer_weight_bytes(self) -> float:
        """Bytes of one parameter inside a layer."""
        return QUANTIZATIONS[self.quantization].bits / 8.0

    @property
    def weight_bytes(self) -> float:
        """Memory that the weights take, over all devices of a group."""
        layers = (self.always_read_params + self.expert_params) * self.layer_weight_bytes
        return layers + 2.0 * (self.head_params + self.embedding_params)

    @property
    def flops_per_token(self) -> float:
        """Products and sums of one token in all layers, attention scores and output head left out."""
        visited = self.num_layers * self.num_experts_per_token * self.mlp_params
        return 2.0 * (self.always_read_params + visited)

    def active_experts(self, num_tokens: int) -> float:
        """Distinct experts of a layer that some token of a step visits, expected, if all are equally likely.

        E (1 - (1 - k / E)^n) for n tokens that visit k of E experts each. Real routers are less even, so fewer
        are touched by a small batch.
        """
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1.0 - (1.0 - self.num_experts_per_token / self.num_experts) ** num_tokens)

    def kv_bytes_per_token(self, dtype_bytes: float = 2.0) -> float:
        """Bytes that a token's keys and values take, over all layers."""
        return 2.0 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def load_model(name: str) -> ModelShape:
    """A model by preset name, or by the path of a Hugging Face `config.json` (or of the folder that has one).

    Args:
        name: a key of `data/models.toml`, or a path.

    Raises:
        ValueError: there is no such preset (near matches are offered), or the file can't be used.
    """
    return _from_file(Path(name)) if _is_path(name) else _from_preset(name)


def _is_path(name: str) -> bool:
    return name.endswith(".json") or "/" in name or Path(name).is_dir()


def _from_preset(name: str) -> ModelShape:
    presets = read_presets("models.toml")
    key = name.lower()
    if key not in presets:
        raise ValueError(f"no model {name!r}; {offer(name, presets)} (or give the path of a config.json)")
    entry = presets[key]
    fields: dict[str, Any] = {**presets.get(entry.get("base", ""), {}), **entry, "name": key}
    fields.pop("base", None)
    return ModelShape(**fields)


# --- Hugging Face's config.json

_DENSE: Final = ("llama", "mistral", "qwen2", "qwen3")
_SPARSE: Final = ("mixtral", "qwen3_moe")
_COUNTS: Final = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "target_hidden_size",
    "draft_vocab_size",
)


def _from_file(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; give a preset's name or the path of a config.json") from error
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not a model's config.json: it holds no table")
    try:
        return shape_from_config(config, name=file.parent.name or str(file), source=str(file))
    except KeyError as error:
        raise ValueError(f"{file}: has no {error.args[0]}; is it a model's config.json?") from error
    except TypeError as error:
        raise ValueError(f"{file}: a number is expected where there is none: {error}") from error


def shape_from_config(config: Mapping[str, Any], *, name: str, source: str) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Args:
        config: the fields of LlamaConfig, Qwen3Config, Qwen3MoeConfig and their like; EAGLE-3 heads are known by the
            names of their architectures, other heads look like a model of one layer.
        name: what to call the model.
        source: where it is from.

    Raises:
        KeyError: a field is missing.
        ValueError: an architecture or quantisation that isn't priced.
    """
    kind = str(config.get("model_type", ""))
    if kind not in (*_DENSE, *_SPARSE):
        raise ValueError(
            f"{source}: model_type is {kind!r}, which isn't priced; known are {', '.join((*_DENSE, *_SPARSE))}"
        )
    if config.get("sliding_window") and config.get("use_sliding_window", kind in ("mistral", "mixtral")):
        raise ValueError(f"{source}: sliding_window is {config['sliding_window']}, which isn't priced")
    for field in _COUNTS:
        if config.get(field) is not None and type(config[field]) is not int:
            raise ValueError(f"{source}: {field} is {config[field]!r}, must be a whole number")
    num_experts, inner = 0, config["intermediate_size"]
    if kind in _SPARSE:
        num_experts = config["num_local_experts"] if kind == "mixtral" else config["num_experts"]
        inner = inner if kind == "mixtral" else config["moe_intermediate_size"]
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(f"{source}: dense layers between sparse ones aren't priced")
    num_heads = config["num_attention_heads"]
    head: dict[str, Any] = {}
    if any("Eagle3" in str(name) for name in config.get("architectures") or ()):
        head = {
            "num_fused_inputs": 3,
            "fused_input_size": config.get("target_hidden_size") or 0,
            "attention_input_size": 2 * config["hidden_size"],
            "head_vocab_size": config.get("draft_vocab_size") or 0,
        }
    return ModelShape(
        name=name,
        source=source,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        intermediate_size=inner,
        vocab_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=num_experts,
        num_experts_per_token=config["num_experts_per_tok"] if num_experts else 0,
        quantization=_quantization(config.get("quantization_config"), source),
        **head,
    )


def _quantization(config: Mapping[str, Any] | None, source: str) -> str:
    if not config:
        return "none"
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: quantization_config is {config!r}, must be a table")
    method, bits = str(config.get("quant_method", "")), config.get("bits", config.get("w_bit", 4))
    if method in ("awq", "gptq") and bits == 4:
        return method
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8_block" if config.get("weight_block_size") else "fp8"
    if method == "modelopt" and "FP8" in str(config.get("quant_algo", "")):
        return "fp8"
    raise ValueError(
        f"{source}: quantization_config is {method!r}, {bits} bits, which isn't priced; known are 4-bit awq and gptq, "
        "and fp8"
    )

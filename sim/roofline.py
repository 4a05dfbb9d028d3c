"""`Roofline`: the time of a forward pass from the model's shape and the GPU's peaks; nothing is measured per shape.

    pass = linear + experts + attention + element-wise + all-reduce + kernel gaps + engine overhead
    linear, attention = max(memory, compute) + compute_exposed * min(memory, compute)

* *linear*: weights are read once per pass, GEMM FLOPs grow with the tokens; the output head counts its own rows.
* *experts*: those that the pass's tokens touch, expected, are read; their FLOPs are added, for grouped kernels hide
  little of either behind the other.
* *attention*: keys and values of the context are read, those of new tokens written and read; FLOPs per query-key pair.
* *all-reduce*: two per layer, a ring: 2 (tp - 1) / tp of the activations over the link, plus a latency each.
* *kernels*: under CUDA graphs every kernel adds a gap. In eager mode the host launches them one by one, and a pass
  can't be shorter than all its launches: small drafters are then bound by launches, not by their size.
* *engine overhead*: per pass and per sequence (input preparation, sampling on the host side of the device queue). The
  part per sequence stops growing at `overhead_max_seqs`: the fit behind it ends there, and it isn't extrapolated.

Left out: prefill's own kernel choice, uneven routing of experts, expert parallelism, pipeline parallelism, links
between nodes, power limits. Host time that delays a step's start is the world's (`round_overhead_s`), not this model's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from minedraft.sim.device_group import DeviceGroup
from minedraft.sim.models import QUANTIZATIONS

# Of a dense layer in vLLM: two norms, qkv, two q/k norms or rope parts, rope, KV write, attention, output projection,
# gate-up, activation, down. Counted in the paper's setting too: 12 launches of 45 us are its 0.55 ms per drafter layer.
KERNELS_PER_LAYER: Final = 12
# Router, top-k, sorting, and the second of two grouped GEMMs, beyond a dense MLP's.
MOE_KERNELS_PER_LAYER: Final = 5
# Embedding, final norm, output head, softmax and sampling.
KERNELS_PER_STEP: Final = 8
# Reads and writes of the residual stream's width by element-wise kernels, per layer and token.
ELEMENTWISE_ACCESSES: Final = 12
# Logits are written in 16 bits, read, and turned to fp32 probabilities: bytes per logit.
LOGIT_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class RooflineSettings:
    """What isn't known from shapes and data sheets. Efficiencies of kernels are the GPU's, in `data/gpus.toml`.

    Attributes:
        cuda_graph: replay captured graphs; False is eager mode.
        kernel_gap_s: tail and start of a kernel under CUDA graphs; aiconfigurator's own constant per operator.
        launch_s: host time per kernel in eager mode. 45 us reproduce the drafting times of the MineDraft paper (arXiv
            2603.18016, Fig. 25: 14.5, 16.2 and 19.2 ms per token with 28, 28 and 36 layers).
        attention_efficiency: share of the dense peak that attention reaches at large pair counts.
        expert_efficiency: share of the dense peak that grouped experts reach; 0.5 is read off the tables of vLLM's
            fused experts in aiconfigurator-core 0.12.0.
        weight_only_efficiency: compute of GEMMs that expand their weights on the fly, against bf16 ones.
        overhead_s: of the engine, per pass. This and the next two are what `minedraft validate silicon` finds missing
            in real vLLM's steps with 4 to 64 sequences beside measured operators, fitted to Llama-3.1-70B in fp8 on
            H100 (45 runs). Fitted to this roofline instead, the part per sequence is the same and the part per pass
            2.1 ms, which is what its kernels miss for that model, not the engine's.
        overhead_per_seq_s: per pass and sequence.
        overhead_max_seqs: sequences at which that stops growing, since the fit ends there.

    Raises:
        ValueError: a figure is out of range; the message names it.
    """

    cuda_graph: bool = True
    kernel_gap_s: float = 3e-6
    launch_s: float = 45e-6
    attention_efficiency: float = 0.5
    expert_efficiency: float = 0.5
    weight_only_efficiency: float = 0.8
    overhead_s: float = 8e-5
    overhead_per_seq_s: float = 4.7e-5
    overhead_max_seqs: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"RooflineSettings.{field.name} is {value}, must be finite and >= 0")
            if field.name.endswith("_efficiency") and not 0.0 < value <= 1.0:
                raise ValueError(f"RooflineSettings.{field.name} is {value}, must be in (0, 1]")


_DEFAULTS: Final = RooflineSettings()


class Roofline:
    """A `minedraft.sim.steps.StepModel` for one model on one group of GPUs; see the module's docstring."""

    __slots__ = (
        "_expert_token_s",
        "_experts_s",
        "_exposed",
        "_fixed_s",
        "_flops_token_s",
        "_head_flops_s",
        "_head_weights_s",
        "_kv_token_s",
        "_least_s",
        "_max_seqs",
        "_miss",
        "_overhead_s",
        "_pair_s",
        "_per_seq_s",
        "_rest_token_s",
        "_weights_s",
        "group",
        "settings",
    )

    def __init__(self, group: DeviceGroup, settings: RooflineSettings = _DEFAULTS) -> None:
        self.group = group
        self.settings = settings
        self._set_linear()
        self._set_attention()
        self._set_rest()

    def _set_linear(self) -> None:
        """Weights, GEMM FLOPs and the output head, per device."""
        shape, gpu, tp = self.group.shape, self.group.gpu, self.group.tp
        quantization = QUANTIZATIONS[shape.quantization]
        bandwidth = gpu.memory_bytes_per_s * gpu.bandwidth_efficiency
        bf16 = gpu.bf16_flops * gpu.bf16_efficiency
        flops = bf16
        if quantization.compute == "fp8" and gpu.fp8_flops:
            flops = gpu.fp8_flops * gpu.fp8_efficiency
        elif quantization.bits < 16.0:  # expanded on the fly, by choice or because the GPU has nothing better
            flops = bf16 * self.settings.weight_only_efficiency
        self._weights_s = shape.always_read_params * shape.layer_weight_bytes / tp / bandwidth
        self._experts_s = shape.expert_params * shape.layer_weight_bytes / tp / bandwidth
        self._miss = 1.0 - shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0
        self._flops_token_s = 2.0 * shape.always_read_params / tp / flops
        visited = shape.num_layers * shape.num_experts_per_token * shape.mlp_params
        peak = gpu.fp8_flops if quantization.compute == "fp8" and gpu.fp8_flops else gpu.bf16_flops
        self._expert_token_s = 2.0 * visited / tp / (peak * self.settings.expert_efficiency)
        self._head_weights_s = 2.0 * shape.head_params / tp / bandwidth
        self._head_flops_s = 2.0 * shape.head_params / tp / bf16
        self._exposed = gpu.compute_exposed

    def _set_attention(self) -> None:
        """KV traffic and attention FLOPs, per device."""
        shape, gpu = self.group.shape, self.group.gpu
        bandwidth = gpu.memory_bytes_per_s * gpu.bandwidth_efficiency
        self._kv_token_s = self.group.kv_bytes_per_token / bandwidth
        heads = shape.num_heads / self.group.tp
        flops = 4.0 * shape.num_layers * heads * shape.head_dim  # scores and weighted sum
        self._pair_s = flops / (gpu.bf16_flops * self.settings.attention_efficiency)

    def _set_rest(self) -> None:
        """Element-wise kernels, all-reduces, launches, overhead."""
        shape, gpu, tp, settings = self.group.shape, self.group.gpu, self.group.tp, self.settings
        bandwidth = gpu.memory_bytes_per_s * gpu.bandwidth_efficiency
        activation_bytes = 2.0 * shape.hidden_size
        self._rest_token_s = shape.num_layers * ELEMENTWISE_ACCESSES * activation_bytes / bandwidth
        kernels = KERNELS_PER_LAYER + (MOE_KERNELS_PER_LAYER if shape.num_experts else 0)
        num_kernels = KERNELS_PER_STEP + shape.num_layers * kernels
        self._fixed_s = num_kernels * settings.kernel_gap_s
        if tp > 1:
            num_reduces = 2 * shape.num_layers
            num_kernels += num_reduces
            per_token = 2.0 * (tp - 1) / tp * activation_bytes / (gpu.link_bytes_per_s * gpu.link_efficiency)
            self._fixed_s += num_reduces * gpu.all_reduce_latency_s
            self._rest_token_s += num_reduces * per_token
        # A logit row is gathered to one device and sampled there.
        self._head_flops_s += LOGIT_BYTES * (shape.head_vocab_size or shape.vocab_size) / bandwidth
        self._least_s = 0.0 if settings.cuda_graph else num_kernels * settings.launch_s
        self._overhead_s = settings.overhead_s
        self._per_seq_s = settings.overhead_per_seq_s
        self._max_seqs = settings.overhead_max_seqs

    def step_s(self, num_seqs: int, num_tokens: int, context: float, num_pairs: float, num_logits: int) -> float:
        """See the module's docstring, and `minedraft.sim.steps` for the arguments."""
        memory = self._weights_s
        compute = num_tokens * self._flops_token_s
        if num_logits:
            memory += self._head_weights_s
            compute += num_logits * self._head_flops_s
        exposed = self._exposed
        total = memory + exposed * compute if memory > compute else compute + exposed * memory
        memory = (context + 2 * num_tokens) * self._kv_token_s
        compute = num_pairs * self._pair_s
        total += memory + exposed * compute if memory > compute else compute + exposed * memory
        total += num_tokens * self._rest_token_s + self._fixed_s
        if self._experts_s:
            total += self._experts_s * (1.0 - self._miss**num_tokens) + num_tokens * self._expert_token_s
        if total < self._least_s:
            total = self._least_s
        if num_seqs > self._max_seqs:
            num_seqs = self._max_seqs
        return total + self._overhead_s + num_seqs * self._per_seq_s

    @property
    def weight_read_s(self) -> float:
        """The floor of a small pass of a dense model: all weights once, at the peak bandwidth of the data sheet."""
        shape, gpu = self.group.shape, self.group.gpu
        layers = (shape.always_read_params + shape.expert_params) * shape.layer_weight_bytes
        return (layers + 2.0 * shape.head_params) / self.group.tp / gpu.memory_bytes_per_s

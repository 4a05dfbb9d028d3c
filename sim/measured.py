"""`Measured`: the time of a forward pass from measured times of its operators (see `minedraft.sim.operator_tables`).

    pass = layers * (GEMMs + attention + all-reduces + element-wise kernels) + output head + engine overhead

GEMMs, experts and all-reduces are interpolated in the number of tokens. What is measured and what is modelled:

* **Attention of a verification is modelled.** Tables exist for prompts (every token of a sequence is new) and for
  decoding (one query per sequence), none for q = k + 1 queries behind a long context. Such a pass takes the longer of
  two measured times: decoding with as many sequences and as much KV (keys and values must be read), and prompts with as
  many sequences and query-key pairs (the products must be computed). It is exact at both ends, and right in between if
  memory and compute overlap. Chunked prompts, and passes that mix prompts with verification, are priced the same way,
  by their means per sequence.
* **Element-wise kernels are modelled**: `SMALL_KERNELS` per layer with a gap each, plus their traffic at 80 % of the
  peak bandwidth (aiconfigurator's own rule).
* A vocabulary wider than the widest measured matrix is that one, scaled. Weight-only quantisation (awq, gptq) isn't in
  the tables and is refused.

What the tables don't hold at all is refused when the model is built; passes beyond their ends are refused or flagged,
see `minedraft.sim.fence`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from minedraft.sim.device_group import DeviceGroup
from minedraft.sim.fence import Fence, Outside
from minedraft.sim.operator_tables import Curve, OperatorTables, Plane

# Norm, rope and KV write, norm, activation, and quantising inputs or adding residuals.
SMALL_KERNELS: Final = 5
BANDWIDTH_EFFICIENCY: Final = 0.8

DTYPES: Final[Mapping[str, str]] = {"none": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block"}
"""What the tables call a model's quantisation."""


@dataclass(frozen=True, slots=True)
class MeasuredSettings:
    """What the tables don't hold.

    Attributes:
        cuda_graph: all-reduces under CUDA graphs; False is eager mode.
        kernel_gap_s: of each element-wise kernel.
        overhead_s: of the engine, per pass. This and the next two are what `minedraft validate silicon` finds missing
            in real vLLM's steps with 4 to 64 sequences, fitted to Llama-3.1-70B in fp8 on H100 (45 runs).
        overhead_per_seq_s: per pass and sequence.
        overhead_max_seqs: sequences at which that stops growing, since the fit ends there.
        outside: "refuse" or "flag" passes beyond the tables; flagged ones are extrapolated from the last two points.

    Raises:
        ValueError: a figure is out of range; the message names it.
    """

    cuda_graph: bool = True
    kernel_gap_s: float = 3e-6
    overhead_s: float = 8e-5
    overhead_per_seq_s: float = 4.7e-5
    overhead_max_seqs: int = 64
    outside: Outside = "refuse"

    def __post_init__(self) -> None:
        for name in ("kernel_gap_s", "overhead_s", "overhead_per_seq_s", "overhead_max_seqs"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"MeasuredSettings.{name} is {getattr(self, name)}, must be finite and >= 0")


_DEFAULTS: Final = MeasuredSettings()


class _Line:
    """A measured curve, linear between neighbours; before its first point it is level, beyond its last it is fenced."""

    __slots__ = ("_fence", "_what", "xs", "ys")

    def __init__(self, curve: Curve, what: str, fence: Fence) -> None:
        self.xs = sorted(curve)
        self.ys = [curve[x] for x in self.xs]
        self._what = what
        self._fence = fence

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        last = len(xs) - 1
        if x > xs[last]:
            self._fence.cross(f"measured: {self._what} was measured up to {xs[last]}, asked for is {x:g}")
            if not last:
                return ys[0]
        i = bisect_right(xs, x, 1, last) - 1
        low = ys[i]
        return low + (ys[i + 1] - low) * (x - xs[i]) / (xs[i + 1] - xs[i])


class _Sheet:
    """A measured plane over (sequences, length): linear in both."""

    __slots__ = ("_batches", "_fence", "_lines", "_what")

    def __init__(self, plane: Plane, what: str, fence: Fence) -> None:
        self._batches = sorted(plane)
        self._lines = [_Line(plane[n], f"{what} of {n} sequences, by length,", fence) for n in self._batches]
        self._what = what
        self._fence = fence

    def at(self, num_seqs: int, length: float) -> float:
        batches, lines = self._batches, self._lines
        last = len(batches) - 1
        if num_seqs > batches[last]:
            self._fence.cross(f"measured: {self._what} was measured up to {batches[last]} sequences, not {num_seqs}")
            i = last - 1
        else:
            i = bisect_right(batches, num_seqs) - 1
        low = lines[i].at(length)
        batch = batches[i]
        if batch == num_seqs:
            return low
        return low + (lines[i + 1].at(length) - low) * (num_seqs - batch) / (batches[i + 1] - batch)


class Measured:
    """A `minedraft.sim.steps.StepModel` for one model on one group of GPUs; see the module's docstring.

    Raises:
        ValueError: the package isn't installed, or its tables don't cover the model, the GPU or the cut.
    """

    __slots__ = ("_decode", "_head", "_num_layers", "_prefill", "_settings", "_tokens", "fence", "group")

    def __init__(self, group: DeviceGroup, gpu: str, settings: MeasuredSettings = _DEFAULTS) -> None:
        self.group = group
        fence = self.fence = Fence(settings.outside)
        self._settings = settings
        shape, tp = group.shape, group.tp
        if shape.quantization not in DTYPES:
            raise ValueError(
                f"quantization is {shape.quantization!r}, which wasn't measured; use {', '.join(DTYPES)}, or roofline"
            )
        tables = OperatorTables(gpu)
        heads = (shape.num_heads // tp, group.kv_heads_per_device, shape.head_dim, group.kv_cache_dtype)
        self._decode = _Sheet(tables.decode_attention(*heads), "attention", fence)
        self._prefill = _Sheet(tables.prefill_attention(*heads), "prompt attention", fence)
        self._num_layers = shape.num_layers
        head_rows = (shape.head_vocab_size or shape.vocab_size) // tp
        self._head = _Line(tables.gemm("bfloat16", head_rows, shape.hidden_size), "the output head, by rows,", fence)
        self._tokens = self._per_token_work(tables)

    def _per_token_work(self, tables: OperatorTables) -> _Line:
        """All that depends on the number of tokens alone, of all layers together."""
        shape, gpu, tp, settings = self.group.shape, self.group.gpu, self.group.tp, self._settings
        dtype = DTYPES[shape.quantization]
        hidden, inner = shape.hidden_size, shape.intermediate_size // tp
        query = shape.num_heads // tp * shape.head_dim
        qkv = query + 2 * self.group.kv_heads_per_device * shape.head_dim
        curves = [tables.gemm(dtype, qkv, hidden), tables.gemm(dtype, hidden, query)]
        if shape.num_experts:
            experts = (shape.intermediate_size, shape.num_experts, shape.num_experts_per_token, tp)
            curves += [tables.experts(dtype, hidden, *experts), tables.gemm("bfloat16", shape.num_experts, hidden)]
        else:
            curves += [tables.gemm(dtype, 2 * inner, hidden), tables.gemm(dtype, hidden, inner)]
        lines = [_Line(curve, "a GEMM, by tokens,", self.fence) for curve in curves]
        once = self._head_work(tables, dtype, qkv)
        every = [*lines, *once]
        last = min(line.xs[-1] for line in every)
        grid = sorted({x for line in every for x in line.xs if x <= last})
        reduce = None
        if tp > 1:
            reduce = _Line(
                tables.all_reduce(tp, cuda_graph=settings.cuda_graph), "an all-reduce, by elements,", self.fence
            )
        # Streams that element-wise kernels read or write: two norms, rope, activation, residuals.
        width = 8 * hidden + 3 * inner + 2 * qkv
        stream_s = 2.0 * width / (gpu.memory_bytes_per_s * BANDWIDTH_EFFICIENCY)
        total = {}
        for n in grid:
            layer_s = sum(line.at(n) for line in lines) + SMALL_KERNELS * settings.kernel_gap_s + n * stream_s
            if reduce is not None:
                layer_s += 2.0 * reduce.at(n * hidden)
            total[n] = shape.num_layers * layer_s + sum(line.at(n) for line in once)
        return _Line(total, "a step, by tokens,", self.fence)

    def _head_work(self, tables: OperatorTables, dtype: str, qkv: int) -> list[_Line]:
        """What an EAGLE head has beside its layers: the projection that joins its inputs, and wider attention inputs.

        The width beyond the hidden size is priced as a matrix of its own, which reads the same weights.
        """
        shape, hidden = self.group.shape, self.group.shape.hidden_size
        curves = []
        if shape.num_fused_inputs:
            depth = shape.num_fused_inputs * (shape.fused_input_size or hidden)
            curves.append(tables.gemm(dtype, hidden // self.group.tp, depth))
        if shape.attention_input_size > hidden:
            curves.append(tables.gemm(dtype, qkv, shape.attention_input_size - hidden))
        return [_Line(curve, "a GEMM, by tokens,", self.fence) for curve in curves]

    def step_s(self, num_seqs: int, num_tokens: int, context: float, num_pairs: float, num_logits: int) -> float:
        """See the module's docstring, and `minedraft.sim.steps` for the arguments."""
        attention = self._decode.at(num_seqs, (context + num_tokens) / num_seqs)
        if num_tokens != num_seqs:
            computed = self._prefill.at(num_seqs, (2.0 * num_pairs / num_seqs) ** 0.5)
            if computed > attention:
                attention = computed
        total = self._tokens.at(num_tokens) + self._num_layers * attention
        if num_logits:
            total += self._head.at(num_logits)
        settings = self._settings
        seqs = num_seqs if num_seqs < settings.overhead_max_seqs else settings.overhead_max_seqs
        return total + settings.overhead_s + seqs * settings.overhead_per_seq_s

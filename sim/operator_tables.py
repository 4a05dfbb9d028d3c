"""Reads the operator times that NVIDIA publishes in the PyPI package `aiconfigurator-core` (Apache-2.0).

The package is data here: its parquet files are read with pyarrow, which comes with it; none of its code runs. It holds
times of single operators as vLLM runs them (GEMMs, attention of prompts and of decoding, all-reduce, grouped experts)
on A100, H100, H200 and L40S. Install it with `pip install minedraft[timing]`.

Times in the files are milliseconds; all that leaves this module is seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "aiconfigurator_core"
SYSTEMS: Final[Mapping[str, str]] = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s"}

ROUTINGS: Final = ("power_law_1.01", "power_law_1.2", "balanced")
"""How tokens spread over experts, the most wanted first: real routers favour some, so a small batch touches fewer."""

Curve = dict[int, float]
Plane = dict[int, dict[int, float]]


def systems_folder() -> Path:
    """Where the package's data lies.

    Raises:
        ValueError: it isn't installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f'kind "measured" needs {PACKAGE.replace("_", "-")}; install it: pip install minedraft[timing]'
        )
    return Path(spec.origin).parent / "systems"


class OperatorTables:
    """The tables of one GPU.

    Args:
        gpu: a key of `SYSTEMS`.

    Raises:
        ValueError: the package isn't there, or has nothing about this GPU.
    """

    def __init__(self, gpu: str) -> None:
        if gpu not in SYSTEMS:
            raise ValueError(f"gpu is {gpu!r}, of which nothing was measured; use {', '.join(SYSTEMS)}, or roofline")
        self.gpu = gpu
        self._folder = systems_folder() / "data" / SYSTEMS[gpu]

    def gemm(self, dtype: str, width: int, depth: int) -> Curve:
        """Seconds by number of rows of a product with a (depth x width) matrix of weights.

        Between measured shapes, the logarithm of the time is interpolated linearly in the logarithms of width and
        depth, which is exact where time is proportional to the weights read. A matrix wider than the widest measured
        one costs as much per column as that one.

        Raises:
            ValueError: the shape or the dtype isn't covered.
        """
        table = _gemm_table(self._folder, dtype)
        if not table:
            raise ValueError(f"no {dtype} GEMM was measured on {self.gpu}; use roofline, or another quantization")
        widths, depths = sorted({n for n, _ in table}), sorted({k for _, k in table})
        stretch = max(1.0, width / widths[-1])
        corners = [
            (n, k, u * v) for n, u in _log_shares(widths, width / stretch) for k, v in _log_shares(depths, depth)
        ]
        if not corners:
            raise ValueError(f"no GEMM with {depth} inputs was measured on {self.gpu} ({depths[0]} to {depths[-1]})")
        curves = [(table.get((n, k), {}), share) for n, k, share in corners]
        rows = sorted(set.intersection(*(set(curve) for curve, _ in curves)))
        if len(rows) < 2:
            raise ValueError(f"GEMMs near {width} x {depth} are missing in {self.gpu}'s tables; use roofline")
        return {m: stretch * exp(sum(share * log(curve[m]) for curve, share in curves)) for m in rows}

    def experts(self, dtype: str, hidden: int, inner: int, num_experts: int, per_token: int, tp: int) -> Curve:
        """Seconds by number of tokens of one layer's experts, with the routing that comes first in `ROUTINGS`.

        Raises:
            ValueError: nobody measured such a layer.
        """
        columns = _read(_newest(self._folder, "moe", "moe_perf.parquet"))
        names = ("moe_dtype", "hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size")
        for routing in ROUTINGS:
            key = (dtype, hidden, inner, num_experts, per_token, tp, 1, routing)
            found = _best(columns, (*names, "distribution"), key, "num_tokens")
            if len(found) > 1:
                return found
        raise ValueError(
            f"no layer of {num_experts} experts of {hidden} x {inner} in {dtype} with tp {tp} was measured on "
            f"{self.gpu}; use roofline"
        )

    def decode_attention(self, heads: int, kv_heads: int, head_dim: int, kv_dtype: str) -> Plane:
        """Seconds by number of sequences and KV length, of one layer's attention with one query per sequence.

        Raises:
            ValueError: such heads weren't measured.
        """
        return self._attention("generation_attention_perf.parquet", heads, kv_heads, head_dim, kv_dtype, "step", 1)

    def prefill_attention(self, heads: int, kv_heads: int, head_dim: int, kv_dtype: str) -> Plane:
        """Seconds by number of sequences and length, of one layer's attention over whole prompts.

        Raises:
            ValueError: such heads weren't measured.
        """
        return self._attention("context_attention_perf.parquet", heads, kv_heads, head_dim, kv_dtype, "isl", 0)

    def _attention(
        self, file: str, heads: int, kv_heads: int, head_dim: int, kv_dtype: str, axis: str, offset: int
    ) -> Plane:
        columns = _read(_newest(self._folder, "attention", file))
        count = len(columns["latency"])
        windows = columns.get("window_size", [0] * count)
        plane: Plane = {}
        wanted = (heads, kv_heads, head_dim, {"bf16": "bfloat16"}.get(kv_dtype, kv_dtype), 0)
        names = ("num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype")
        rows = zip(*(columns[name] for name in names), windows, strict=True)
        for i, row in enumerate(rows):
            if row == wanted:
                lengths = plane.setdefault(columns["batch_size"][i], {})
                length, seconds = columns[axis][i] + offset, columns["latency"][i] / 1e3
                lengths[length] = min(seconds, lengths.get(length, seconds))
        if not plane:
            raise ValueError(
                f"attention with {heads} heads, {kv_heads} KV heads of {head_dim} per device and a {kv_dtype} cache "
                f"wasn't measured on {self.gpu}; use another tp, or roofline"
            )
        return plane

    def all_reduce(self, tp: int, *, cuda_graph: bool) -> Curve:
        """Seconds by number of 16-bit elements: vLLM's own kernel, or NCCL where vLLM uses that (PCIe with tp > 2).

        Raises:
            ValueError: not measured with as many devices.
        """
        if self.gpu == "l40s" and tp > 2:
            columns = _read(_newest(self._folder, "comm", "nccl_perf.parquet", "nccl"))
            found = _best(columns, ("nccl_dtype", "op_name", "num_gpus"), ("half", "all_reduce", tp), "message_size")
        else:
            columns = _read(_newest(self._folder, "comm", "custom_allreduce_perf.parquet"))
            backend = "vllm_graph" if cuda_graph else "vllm_eager"
            found = _best(columns, ("backend", "num_gpus"), (backend, tp), "message_size")
        if not found:
            raise ValueError(f"tp is {tp}, with which no all-reduce was measured on {self.gpu}; use 1, 2, 4 or 8")
        return found


# --- files


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in folder.name.split("."))


def _newest(folder: Path, family: str, file: str, framework: str = "vllm") -> Path:
    """The file in the folder of the newest version that has it."""
    versions = [path for path in (folder / family / framework).glob("*") if (path / file).is_file()]
    if not versions:
        raise ValueError(f"the installed aiconfigurator-core has no {family} table of {folder.name} under {framework}")
    return max(versions, key=_version) / file


@cache
def _read(path: Path) -> dict[str, list[Any]]:
    from pyarrow import parquet

    columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    return columns


@cache
def _gemm_table(folder: Path, dtype: str) -> dict[tuple[int, int], Curve]:
    """By (width, depth): the best time by rows."""
    columns = _read(_newest(folder, "gemm", "gemm_perf.parquet"))
    table: dict[tuple[int, int], Curve] = {}
    names = ("gemm_dtype", "m", "n", "k", "latency")
    for kind, m, n, k, latency in zip(*(columns[name] for name in names), strict=True):
        if kind == dtype:
            curve = table.setdefault((n, k), {})
            curve[m] = min(latency / 1e3, curve.get(m, inf))
    return table


def _best(columns: Mapping[str, list[Any]], names: tuple[str, ...], key: tuple[Any, ...], axis: str) -> Curve:
    """The least time by `axis` of the rows whose columns `names` are `key`."""
    found: Curve = {}
    rows = zip(zip(*(columns[name] for name in names), strict=True), columns[axis], columns["latency"], strict=True)
    for row, place, latency in rows:
        if row == key:
            found[place] = min(latency / 1e3, found.get(place, latency))
    return dict(sorted(found.items()))


def _log_shares(axis: list[int], value: float) -> list[tuple[int, float]]:
    """Neighbours of a value on an axis and their shares, linear in the logarithm; none outside the axis."""
    if not axis[0] <= value <= axis[-1]:
        return []
    for low, high in pairwise(axis):
        if low <= value <= high:
            share = (log(value) - log(low)) / (log(high) - log(low))
            return [pair for pair in ((low, 1.0 - share), (high, share)) if pair[1]]
    return [(axis[0], 1.0)]

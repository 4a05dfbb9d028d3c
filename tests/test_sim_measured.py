"""Operator tables of aiconfigurator-core: what is read, how passes are composed, what is refused."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from minedraft.cli import run_cli
from minedraft.commands.validate_silicon import Answer, Overheads, SiliconRow, answer, fit, read_rows
from minedraft.config import ConfigError, parse_config
from minedraft.sim import operator_tables
from minedraft.sim.device_group import DeviceGroup
from minedraft.sim.fence import ExtrapolationWarning
from minedraft.sim.gpus import load_gpu
from minedraft.sim.measured import Measured, MeasuredSettings
from minedraft.sim.models import load_model
from minedraft.sim.operator_tables import SYSTEMS, OperatorTables
from minedraft.sim.roofline import Roofline, RooflineSettings
from minedraft.sim.steps import CostError

needs_tables = pytest.mark.skipif(
    importlib.util.find_spec(operator_tables.PACKAGE) is None, reason="the extra timing isn't installed"
)


def group(model: str, gpu: str, tp: int = 1, **more: Any) -> DeviceGroup:
    return DeviceGroup(load_model(model), load_gpu(gpu), tp, **more)


NO_OVERHEAD = {"overhead_s": 0.0, "overhead_per_seq_s": 0.0}


def measured(model: str, gpu: str, tp: int = 1, **settings: Any) -> Measured:
    """The device's own time: without the engine's overhead, unless that is given."""
    return Measured(group(model, gpu, tp), gpu, MeasuredSettings(**{**NO_OVERHEAD, **settings}))


def step_s(model: Any, num_seqs: int, width: int, context: int = 512) -> float:
    pairs = num_seqs * (width * context + width * (width + 1) / 2)
    return float(model.step_s(num_seqs, num_seqs * width, num_seqs * context, pairs, num_seqs * width))


# --- tables


@needs_tables
def test_a_measured_gemm_is_returned_as_it_is() -> None:
    """Times in the tables of 4096 x 4096 bf16 products, ms (aiconfigurator-core 0.12)."""
    for gpu, figures in {"a100": {1: 0.024, 256: 0.054}, "h100": {64: 0.015, 512: 0.024}, "l40s": {1: 0.050}}.items():
        curve = OperatorTables(gpu).gemm("bfloat16", 4096, 4096)
        for rows, milliseconds in figures.items():
            assert 1e3 * curve[rows] == pytest.approx(milliseconds, abs=0.6e-3)


@needs_tables
def test_shapes_between_measured_ones_take_times_between() -> None:
    tables = OperatorTables("h100")
    low, mid, high = (tables.gemm("bfloat16", width, 5120) for width in (8192, 9000, 10240))
    for rows in (1, 64, 1024):
        assert min(low[rows], high[rows]) <= mid[rows] <= max(low[rows], high[rows])
    # A vocabulary beyond the widest matrix costs as much per column as that one.
    wide, widest = tables.gemm("bfloat16", 131072, 4096), tables.gemm("bfloat16", 65536, 4096)
    assert wide[16] == pytest.approx(2 * widest[16])


@needs_tables
def test_all_reduces_of_both_kinds() -> None:
    """128 elements over two A100: 4.9 us in a graph, 44 us in eager mode."""
    tables = OperatorTables("a100")
    assert tables.all_reduce(2, cuda_graph=True)[128] == pytest.approx(4.9e-6, rel=0.02)
    assert tables.all_reduce(2, cuda_graph=False)[128] == pytest.approx(44e-6, rel=0.02)
    # vLLM's own kernel isn't used over PCIe with more than two devices, NCCL is.
    assert OperatorTables("l40s").all_reduce(4, cuda_graph=True)[1048576] == pytest.approx(622e-6, rel=0.01)


@needs_tables
@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda tables: tables.gemm("int3", 4096, 4096), "no int3 GEMM was measured on h100"),
        (lambda tables: tables.gemm("bfloat16", 4096, 1_000_000), "no GEMM with 1000000 inputs"),
        (lambda tables: tables.all_reduce(3, cuda_graph=True), "tp is 3, with which no all-reduce"),
        (lambda tables: tables.decode_attention(7, 7, 128, "bf16"), "attention with 7 heads"),
        (lambda tables: tables.experts("fp8", 4096, 999, 128, 8, 1), "no layer of 128 experts of 4096 x 999"),
    ],
)
def test_what_the_tables_do_not_hold_is_refused(ask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(OperatorTables("h100"))


def test_a_gpu_without_tables() -> None:
    with pytest.raises(ValueError, match="gpu is 'l40', of which nothing was measured; use a100, h100"):
        OperatorTables("l40")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_tables, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ValueError, match=r"needs a-package-that-is-not-there; .*minedraft\[timing\]"):
        OperatorTables("h100")


# --- passes

AGREE = [
    ("qwen3-32b", 4, ("a100", "h100", "h200", "l40s")),
    ("llama-3.1-70b", 4, ("a100", "h100", "h200")),
    ("llama-3.1-8b", 1, ("a100", "h100", "h200", "l40s")),
    ("qwen3-14b", 1, ("a100", "h100", "l40s")),
    ("qwen3-30b-a3b", 2, ("h100", "h200")),
]


@needs_tables
@pytest.mark.parametrize(("model", "tp", "gpus"), AGREE, ids=lambda value: str(value)[:16])
def test_the_roofline_agrees(model: str, tp: int, gpus: tuple[str, ...]) -> None:
    """Two independent models of the same passes: within 45 % each, and 20 % on average."""
    shapes = [(1, 1, 512), (16, 1, 512), (64, 1, 1024), (16, 5, 512), (64, 5, 512), (1, 2048, 0), (4, 1024, 0)]
    for gpu in gpus:
        bound, tables = Roofline(group(model, gpu, tp), RooflineSettings(**NO_OVERHEAD)), measured(model, gpu, tp)
        ratios = [step_s(bound, *shape) / step_s(tables, *shape) for shape in shapes]
        assert all(1 / 1.45 < ratio < 1.45 for ratio in ratios), (gpu, ratios)
        assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.2), gpu


@needs_tables
def test_a_decode_step_is_its_operators() -> None:
    """Qwen3-8B on one H100, 16 sequences of 511 + 1 tokens: every GEMM, attention and small kernel by hand."""
    tables, model = OperatorTables("h100"), measured("qwen3-8b", "h100", kernel_gap_s=0.0)
    gemms = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    layer = sum(tables.gemm("bfloat16", *shape)[16] for shape in gemms)
    layer += tables.decode_attention(32, 8, 128, "bf16")[16][512]
    layer += 16 * 2 * (8 * 4096 + 3 * 12288 + 2 * 6144) / (3.35e12 * 0.8)
    head = tables.gemm("bfloat16", 151936, 4096)[16]
    assert model.step_s(16, 16, 16 * 511, 16 * 512, 16) == pytest.approx(36 * layer + head, rel=1e-9)


@needs_tables
def test_attention_of_a_verification_lies_between_decoding_and_prompts() -> None:
    """The ends are the measured kernels; a verification is at least the longer of the two."""
    model = measured("llama-3.1-8b", "h100")
    decode = OperatorTables("h100").decode_attention(32, 8, 128, "bf16")
    prompt = OperatorTables("h100").prefill_attention(32, 8, 128, "bf16")

    def attention(num_seqs: int, width: int, context: int) -> float:
        tokens = num_seqs * width
        pairs = num_seqs * (width * context + width * (width + 1) / 2)
        none = model.step_s(num_seqs, tokens, -tokens, 0.0, 0)  # no KV to read, nothing to multiply
        floor = min(decode[num_seqs].values())
        return (model.step_s(num_seqs, tokens, num_seqs * context, pairs, 0) - none) / 32 + floor

    assert attention(16, 1, 1023) == pytest.approx(decode[16][1024], rel=0.02)
    assert attention(1, 4096, 0) == pytest.approx(prompt[1][4096], rel=0.05)
    narrow, wide, all_new = attention(16, 1, 2048), attention(16, 5, 2048), attention(16, 256, 2048)
    assert narrow <= wide < all_new
    assert wide < 1.1 * narrow  # few queries ride along with the reading of long contexts


@needs_tables
def test_outside_the_tables_is_refused_or_flagged() -> None:
    with pytest.raises(CostError, match=r'measured: attention of 64 sequences.*up to \d+.*outside = "flag"'):
        step_s(measured("llama-3.1-8b", "h100"), 64, 1, 100_000)
    model = measured("llama-3.1-8b", "h100", outside="flag")
    with pytest.warns(ExtrapolationWarning, match="measured: attention of 64 sequences"):
        far = step_s(model, 64, 1, 100_000)
    assert model.fence.num_crossed == 1
    assert 3 * step_s(model, 64, 1, 8000) < far < 20 * step_s(model, 64, 1, 8000)


@needs_tables
@pytest.mark.parametrize(
    ("model", "gpu", "tp", "message"),
    [
        ("llama-3.1-8b-awq", "h100", 1, "quantization is 'awq', which wasn't measured"),
        ("llama-3.1-8b-fp8", "a100", 1, "no fp8 GEMM was measured on a100"),
        ("eagle-vicuna-13b", "h100", 1, "attention with 40 heads, 40 KV heads"),
        ("qwen3-8b", "l40", 1, "gpu is 'l40', of which nothing was measured"),
        ("vicuna-13b", "h100", 4, "attention with 10 heads"),
    ],
)
def test_models_beyond_the_tables(model: str, gpu: str, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(model, gpu, tp)


@pytest.mark.parametrize("name", ["kernel_gap_s", "overhead_s", "overhead_per_seq_s", "overhead_max_seqs"])
def test_impossible_settings(name: str) -> None:
    with pytest.raises(ValueError, match=f"MeasuredSettings.{name} is -1"):
        MeasuredSettings(**{name: -1})


# --- configuration and command line


@needs_tables
def test_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    table: dict[str, Any] = {
        "workload": {"num_requests": 4},
        "cost": {
            "kind": "measured",
            "target": {"model": "qwen3-32b", "gpu": "H100", "tp": 4},
            "draft": {"model": "qwen3-0.6b", "gpu": "h100", "outside": "flag"},
        },
    }
    assert parse_config(table).build_cost().target.group == group("qwen3-32b", "h100", 4)
    table["cost"]["target"]["gpu"] = "l40"
    with pytest.raises(ConfigError, match=r"cost.target.gpu: is 'l40', of which nothing was measured"):
        parse_config(table)


# --- against silicon


@needs_tables
def test_the_sample_is_split_by_gpu() -> None:
    rows, num_others = read_rows()
    llama = [row for row in rows if row.model == "llama-3.1-70b-fp8"]
    assert {row.gpu for row in llama if row.is_fitted} == {"h100"}
    assert {row.gpu for row in llama if not row.is_fitted} == {"h200"}
    assert len(llama) == 105
    assert all(row.gpu in SYSTEMS and row.ttft_ms > 0 < row.tpot_ms for row in rows)
    assert num_others > 0


@needs_tables
def test_rows_of_silicon_that_were_held_out() -> None:
    """A few H200 rows of Llama-3.1-70B, nothing fitted, short runs: TPOT within 12 % each."""
    rows, _ = read_rows()
    wanted = [
        r for r in rows if r.model == "llama-3.1-70b-fp8" and r.gpu == "h200" and r.prompt_len == r.output_len == 1024
    ]
    chosen = [row for row in wanted if row.num_clients in (4, 16)]
    assert len(chosen) == 8
    errors = [answer(row, "measured", Overheads(), 2).tpot_error for row in chosen]
    assert max(map(abs, errors)) < 0.12, errors


def made_up(num_clients: int, ttft_ms: float, tpot_ms: float) -> SiliconRow:
    return SiliconRow("m", "h100", 1, "bf16", 1024, 1024, num_clients, ttft_ms, tpot_ms)


def test_the_fit_finds_what_is_missing() -> None:
    answers = [Answer(made_up(n, 100.0, 10.0 + 0.5 + 0.03 * n), 80.0, 10.0) for n in (1, 4, 16, 64)]
    found = fit(answers)
    assert (found.step_s, found.step_per_seq_s) == (pytest.approx(0.5e-3), pytest.approx(0.03e-3))
    assert (found.max_seqs, found.request_s) == (64, pytest.approx(0.020))


def test_a_fit_is_never_negative() -> None:
    shrinking = [Answer(made_up(n, 100.0, 11.0 - 0.01 * n), 120.0, 10.0) for n in (1, 4, 16, 64)]
    found = fit(shrinking)
    assert (found.step_per_seq_s, found.request_s) == (0.0, 0.0)
    assert found.step_s > 0.0
    too_slow = fit([Answer(made_up(n, 100.0, 8.0), 100.0, 10.0) for n in (1, 4, 16, 64)])
    assert (too_slow.step_s, too_slow.step_per_seq_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cost", "linear"], "--cost linear: unknown; use measured or roofline"),
        (["--requests-per-client", "0"], "--requests-per-client 0: must be >= 1"),
    ],
)
def test_validate_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["validate", "silicon", *arguments]) == 2
    assert message in capsys.readouterr().err


@needs_tables
def test_validate_refuses_models_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["validate", "silicon", "--model", "gpt-2"]) == 2
    assert "--model gpt-2: no such rows; use llama-3.1-70b-fp8" in capsys.readouterr().err


@needs_tables
@pytest.mark.slow
def test_validate_prints_every_group(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command on the rows that are quick to simulate."""
    rows, _ = read_rows()
    quick = [row for row in rows if row.output_len <= 1024 and row.num_clients <= 8]
    monkeypatch.setattr("minedraft.commands.validate.read_rows", lambda: (quick, 3))
    assert run_cli(["validate", "silicon", "--requests-per-client", "3", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    held_out = {(g["model"], g["gpu"]): g for g in report["groups"] if g["held_out"]}
    assert held_out["llama-3.1-70b-fp8", "h200"]["tpot_error_percent"]["mean"] < 10
    assert len(report["rows"]) + len(report["refused"]) == len(quick)
    assert report["num_other_rows"] == 3

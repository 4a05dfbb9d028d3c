"""`minedraft run --backend vllm`: texts equal stock vLLM's, figures come from the journal, bad input is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import add_tokenizer
from vllm_kit import BLOCK_SIZE, MAX_MODEL_LEN, Engine, replay_report

from minedraft.cli import run_cli

pytestmark = pytest.mark.slow

VOCAB_SIZE = 128
PROMPTS = ("Hello", "What is PSD?", "1 + 1 =", "x" * 100, "Tell me a story", "{}", "a b c", "Hello")
MAX_TOKENS = (20, 31, 1, 40, 25, 12, 50, 20)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from minedraft.backends.torch.surgery import make_noisy_copy, make_tiny_llama

    folder = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "dtype": torch.float32}
    make_tiny_llama(folder / "target", seed=1, **shape)
    add_tokenizer(folder / "target", VOCAB_SIZE)
    make_noisy_copy(folder / "target", folder / "noisy", 0.03)
    rows = [
        {"prompt": text, "max_tokens": limit, "max_draft_tokens": i % 4, "priority": -i}
        for i, (text, limit) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))
    ]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[str]:
    """Stock vLLM's answers to the same chats."""
    from vllm import SamplingParams

    with Engine(tiny / "target", skip_tokenizer_init=False) as engine:
        chats: Any = [[{"role": "user", "content": text}] for text in PROMPTS]
        params = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in MAX_TOKENS]
        outputs = engine.llm.chat(chats, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def arguments(tiny: Path, *more: object) -> list[str]:
    found = ["run", "--backend", "vllm", "--target", tiny / "target", "--draft", tiny / "noisy", "-k", 3]
    found += [
        "--dtype",
        "float32",
        "--set",
        f"scheduler.max_model_len={MAX_MODEL_LEN}",
        "--engine-arg",
        "enforce_eager=true",
    ]
    found += ["--set", f"scheduler.block_size={BLOCK_SIZE}", "--set", "scheduler.max_batch_size=3"]
    found += ["--set", "scheduler.max_num_batched_tokens=64"]
    return [str(argument) for argument in (*found, *more)]


def prompts_of(tiny: Path) -> list[str]:
    return ["--prompts", str(tiny / "prompts.jsonl")]


def test_psd(tiny: Path, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("json", "journal", "trace")}
    cores = os.sched_getaffinity(0)
    names = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    environment = {name: os.environ.get(name) for name in names}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert run_cli(arguments(tiny, "--mode", "psd", *prompts_of(tiny), *options)) == 0
    # What was set for the engine in this process is as it was.
    assert os.sched_getaffinity(0) == cores
    assert {name: os.environ.get(name) for name in names} == environment

    out = capsys.readouterr().out
    assert "Drafting overlapped with verification" in out
    assert f"> {PROMPTS[0]}" in out
    found = json.loads(files["json"].read_text())
    assert [row["text"] for row in found["outputs"]] == expected
    assert (found["mode"], found["error"], found["completed"]) == ("psd", None, len(PROMPTS))
    assert found["total_output_tokens"] == sum(row["num_tokens"] for row in found["outputs"])
    assert 0 < found["spec_decode_accepted_tokens"] < found["spec_decode_draft_tokens"]
    assert found["max_running_requests_allowed"] == 6
    assert all(found[name] > 0 for name in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "duration"))
    assert (found["target"], found["draft"]) == (str(tiny / "target"), str(tiny / "noisy"))

    report = replay_report(files["journal"])
    assert report.first_difference is None, str(report.first_difference)
    assert run_cli(["replay", str(files["journal"])]) == 0
    assert capsys.readouterr().out.startswith("identical")
    lanes = {
        event["tid"] for event in json.loads(files["trace"].read_text()) if event["ph"] == "X" and event["pid"] == 1
    }
    assert lanes == {1, 2}


def test_ar_has_no_drafter(tiny: Path, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "json"
    assert run_cli(arguments(tiny, "--mode", "ar", "--target-device", "cpu:0", "--json", path, *prompts_of(tiny))) == 0
    found = json.loads(path.read_text())
    assert [row["text"] for row in found["outputs"]] == expected
    assert (found["draft"], found["spec_decode_draft_tokens"]) == (None, 0)


def test_a_target_on_several_cores_has_a_process_of_its_own(tiny: Path, tmp_path: Path) -> None:
    """As a user runs it: figures on stdout are JSON and nothing else; sampled texts follow their seeds.

    Steps have room for both prompts: on a CPU, vLLM 0.32 dies of a seed whose prompt comes in chunks.
    """
    env = {
        name: os.environ[name]
        for name in os.environ
        if name not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")
    }
    options = ["--mode", "sd", "--json", "-", "--prompt", "Hello", "--prompt", "Hello", "--temperature", "1.0"]
    options += ["--max-tokens", "30", "--seed", "7", "--target-device", "cpu:0-1", "--draft-device", "cpu:1"]
    options += ["--set", "scheduler.max_num_batched_tokens=512"]
    command = [str(Path(sys.executable).with_name("minedraft")), *arguments(tiny, *options)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    texts = [row["text"] for row in found["outputs"]]
    assert all(texts)
    assert texts[0] != texts[1]  # prompt number i gets seed + i
    assert found["num_draft_devices"] == 0  # no device is the drafter's alone


def test_the_demo(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With models that are made here: three runs, equal texts, files that can be read."""
    monkeypatch.setattr("minedraft.commands.demo_vllm.TARGET", str(tiny / "target"))
    monkeypatch.setattr("minedraft.commands.demo_vllm.DRAFT", str(tiny / "noisy"))
    assert run_cli(["demo", "--backend", "vllm", "--output-dir", str(tmp_path / "demo")]) == 0
    assert "All three modes wrote the same tokens." in capsys.readouterr().out
    runs = [json.loads((tmp_path / "demo" / f"vllm-{mode}.json").read_text()) for mode in ("ar", "sd", "psd")]
    assert [run["completed"] for run in runs] == [8, 8, 8]
    assert runs[0]["outputs"] == runs[1]["outputs"] == runs[2]["outputs"]
    assert [run["overlapped_draft_share"] > 0 for run in runs] == [False, False, True]
    report = replay_report(tmp_path / "demo" / "vllm-psd.journal.jsonl")
    assert report.first_difference is None, str(report.first_difference)


def refused(capsys: pytest.CaptureFixture[str], *command: object) -> str:
    capsys.readouterr()
    assert run_cli([str(argument) for argument in command]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("minedraft: error: ")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input_is_named(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hello = ("--prompt", "Hello")
    assert "did you mean 'enforce_eager'" in refused(capsys, *arguments(tiny, *hello, "--engine-arg", "enforce_eage=1"))
    assert "write cpu:0" in refused(capsys, *arguments(tiny, *hello, "--target-device", "cuda:0"))
    assert "kv_watermark: has no meaning" in refused(
        capsys, *arguments(tiny, *hello, "--set", "scheduler.kv_watermark=0.1")
    )
    assert "no such folder" in refused(capsys, *arguments(tiny, *hello, "--trace", tmp_path / "none" / "trace"))
    ar = ("--mode", "ar", "--target-device", "cpu:0")
    assert "prompt 2: has 318 tokens, but max_model_len is 256" in refused(
        capsys, *arguments(tiny, *hello, "--prompt", "x" * 300, *ar)
    )
    assert "prompt 1: temperature" in refused(capsys, *arguments(tiny, *hello, "--temperature", "-1", *ar))
    late = tmp_path / "late.jsonl"
    late.write_text('{"prompt": "a", "arrival_s": 3.0}\n')
    assert "prompt 1: arrival_s has no meaning" in refused(capsys, *arguments(tiny, "--prompts", late, *ar))


def test_facts_of_this_machine() -> None:
    from minedraft.backends.vllm.device_facts import CPU, facts_here

    facts = facts_here(os.environ)
    if facts.kind != CPU:
        pytest.skip("not a CPU build of vLLM")
    assert facts.names == tuple(str(core) for core in sorted(os.sched_getaffinity(0)))
    assert facts.total_bytes is not None
    assert facts.free_bytes is not None
    assert 0 < facts.free_bytes < facts.total_bytes


def test_what_the_front_doors_believe_of_vllm() -> None:
    """Names and defaults that launch.py, placement.py and memory_fit.py use without importing vLLM."""
    import dataclasses

    from vllm import envs
    from vllm.config import CacheConfig
    from vllm.engine.arg_utils import EngineArgs

    from minedraft.backends.vllm import launch, memory_fit, placement
    from minedraft.commands import vllm_run

    assert CacheConfig().gpu_memory_utilization == memory_fit.DEFAULT_UTILIZATION
    assert {launch.KV_SPACE, placement.OMP_BIND} <= set(envs.environment_variables)
    known = {item.name for item in dataclasses.fields(EngineArgs)}
    used = {*launch._SINGLE, *launch._CONFLICTS, *vllm_run.ENGINE_FIELDS.values(), *vllm_run.DRAFT_FIELDS.values()}
    used |= {"scheduler_cls", "additional_config", "kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_cache_dtype"}
    assert used - known == {"headless"}  # of the server, not of the engine
    for name in (launch.SCHEDULER_CLS, launch.NULL_PROPOSER):
        module, _, cls = name.rpartition(".")
        assert isinstance(getattr(__import__(module, fromlist=[cls]), cls), type)

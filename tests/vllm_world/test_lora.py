"""LoRA on the target: every request gets its own adapter's text, with more adapters than a step may carry.

Up to 0.33 vLLM's LoRA operators for CPUs give a request without an adapter the last adapter in use, if one is in its
step (they index with -1), with minedraft and without. So such requests run along here, but their texts aren't compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import Engine, make_requests, minedraft_options

NUM_ADAPTERS = 5
MAX_LORAS = 2
RANK = 8
OPTIONS = {"enable_lora": True, "max_loras": MAX_LORAS, "max_lora_rank": RANK, "max_cpu_loras": NUM_ADAPTERS}

HIDDEN, KV, INNER = 128, 64, 256
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Of the linear layers of the `models` fixture's target: inputs, outputs."""


def make_adapter(folder: Path, seed: int) -> None:
    """A random adapter for all linear layers, as PEFT would save it."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, (num_in, num_out) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{key}.lora_A.weight"] = 0.2 * torch.randn(RANK, num_in, generator=generator)
            weights[f"{key}.lora_B.weight"] = 0.2 * torch.randn(num_out, RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    modules = [name.partition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """vLLM's handles of `NUM_ADAPTERS` adapters, and None for the model as it is."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    handles: list[Any] = [None]
    for number in range(1, NUM_ADAPTERS + 1):
        make_adapter(folder / f"a{number}", seed=number)
        handles.append(LoRARequest(f"a{number}", number, str(folder / f"a{number}")))
    return handles


def choose(adapters: Sequence[Any], number: int) -> Any:
    """Which adapter request `number` wants: neighbours differ, some want none, and all are wanted several times."""
    return adapters[(3 * number + number // 7) % len(adapters)]


def add(engine: Engine, adapters: Sequence[Any], rounds: int) -> list[str]:
    from vllm import SamplingParams

    jobs = make_requests() * rounds
    for i, job in enumerate(jobs):
        params = SamplingParams(temperature=0.0, max_tokens=min(24, job.max_tokens), ignore_eos=job.ignore_eos)
        prompt = {"prompt_token_ids": job.prompt}
        engine.engine.add_request(f"{i}", prompt, params, lora_request=choose(adapters, i))
    return [f"{i}" for i in range(len(jobs))]


@pytest.fixture(scope="module")
def expected(models: Path, adapters: list[Any]) -> dict[str, list[int]]:
    """Stock vLLM's texts by id."""
    with Engine(models / "target", **OPTIONS) as engine:
        add(engine, adapters, rounds=2)
        return with_adapters(engine.run([]), adapters)


def with_adapters(texts: dict[str, list[int]], adapters: Sequence[Any]) -> dict[str, list[int]]:
    """Texts of the requests that have an adapter."""
    assert any(choose(adapters, int(name)) is None for name in texts)
    return {name: text for name, text in texts.items() if choose(adapters, int(name)) is not None}


@pytest.fixture(scope="module")
def engine(models: Path, expected: dict[str, list[int]]) -> Iterator[Engine]:
    assert expected  # made before: two engines in one process share vLLM's globals
    with Engine(models / "target", **OPTIONS, **minedraft_options(models / "noisy", mode="psd")) as engine:
        yield engine


def in_use(engine: Engine) -> set[int]:
    """Adapters of all requests that the core knows."""
    requests = engine.scheduler.requests
    known = [requests[name].lora_request for name in engine.conductor.core.state.sequences if name in requests]
    return {handle.lora_int_id for handle in known if handle is not None}


def test_adapters_change_the_text(adapters: list[Any], expected: dict[str, list[int]]) -> None:
    by_prompt: dict[int, dict[int, list[int]]] = {}
    for name, text in expected.items():
        by_prompt.setdefault(int(name) % len(make_requests()), {})[choose(adapters, int(name)).lora_int_id] = text
    pairs = [list(texts.values()) for texts in by_prompt.values() if len(texts) > 1 and len(min(texts.values())) > 5]
    assert len(pairs) >= 5
    assert all(one != other for one, other in pairs)


def test_more_adapters_than_a_step_may_carry(
    engine: Engine, adapters: list[Any], expected: dict[str, list[int]]
) -> None:
    most_held = 0
    most_in_use = 0

    def look(_: int) -> None:
        nonlocal most_held, most_in_use
        engine.check_blocks()
        most_held = max(most_held, engine.conductor._gate.num_held)
        most_in_use = max(most_in_use, len(in_use(engine)))

    add(engine, adapters, rounds=2)
    texts = engine.run([], on_step=look)
    assert len(texts) == 2 * len(make_requests())
    assert with_adapters(texts, adapters) == expected
    assert most_held > 5
    assert most_in_use == MAX_LORAS
    assert engine.conductor.core.state.num_accepted_tokens > 50
    engine.check_rest()
    assert engine.conductor._gate.num_held == 0
    assert engine.conductor.counters.strays == 0


def test_aborts_of_running_waiting_and_held_requests(
    engine: Engine, adapters: list[Any], expected: dict[str, list[int]]
) -> None:
    """Nobody waits for the place of an adapter whose requests have gone."""
    names = add(engine, adapters, rounds=2)
    aborts = {step: names[(5 * step + 1) % len(names)] for step in range(0, 40, 2)}
    texts = with_adapters(engine.run([], aborts=aborts), adapters)
    gone = set(aborts.values())
    assert texts.keys() >= expected.keys() - gone
    for name, text in texts.items():
        assert text == (expected[name][: len(text)] if name in gone else expected[name])
    engine.check_rest()
    assert engine.conductor._gate.num_held == 0
    assert engine.conductor.counters.strays == 0

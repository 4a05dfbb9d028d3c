"""Requests with long outputs are announced to the workers anew: same text, same blocks, and only where it may be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import Engine, Job, make_requests, minedraft_options, plain_ids, renamed

MIN_TOKENS = 6


class Watched:
    """Compares what the workers know of everybody in a step with what vLLM's scheduler knows, and counts retellings."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        from minedraft.backends.vllm import compat

        self.retold: Counter[str] = Counter()
        self.longest_list = 0
        scheduler = engine.scheduler
        core: Any = engine.engine.engine_core.engine_core  # type: ignore[attr-defined]
        runner = core.model_executor.driver_worker.worker.model_runner
        update, announce = runner._update_states, compat.announce_again

        def updated(output: Any) -> Any:
            done = update(output)
            for request_id in output.num_scheduled_tokens:
                request, known = scheduler.requests[request_id], runner.requests[request_id]
                text = list(known.prompt_token_ids) + known.output_token_ids
                assert text == list(request.all_token_ids), request_id
                held = [block.block_id for block in compat._blocks(scheduler, request_id)]
                assert known.block_ids[0][: len(held)] == held, request_id
                row = runner.input_batch.req_id_to_index[request_id]
                assert runner.input_batch.token_ids_cpu[row, : len(text)].tolist() == text, request_id
                self.longest_list = max(self.longest_list, len(known.output_token_ids))
            return done

        def announced(scheduler: Any, output: Any, request_id: str, text: Any) -> None:
            self.retold[request_id] += 1
            announce(scheduler, output, request_id, text)

        patch.setattr(runner, "_update_states", updated)
        patch.setattr(compat, "announce_again", announced)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from minedraft.backends.vllm import retelling

    monkeypatch.setattr(retelling, "MIN_TOKENS", MIN_TOKENS)


@pytest.fixture(scope="module")
def reference(models: Path) -> dict[str, list[int]]:
    with Engine(models / "target") as engine:
        return engine.run(make_requests())


@pytest.fixture(scope="module")
def engine(models: Path, reference: dict[str, list[int]]) -> Iterator[Engine]:
    assert reference  # vLLM keeps one engine per process: the other one must be closed by now
    options = minedraft_options(models / "noisy", mode="psd", k=6)
    with Engine(models / "target", num_gpu_blocks_override=20, **options) as engine:
        yield engine


@pytest.mark.parametrize("seed", range(4))
def test_same_text_and_blocks(
    engine: Engine, reference: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With a pool that forces preemptions, aborts, and a scheduler that is reset behind the core's back."""
    from vllm.v1.core.sched.scheduler import Scheduler

    rng = random.Random(seed)
    watched = Watched(engine, monkeypatch)
    jobs = renamed(make_requests(), f"a{seed}-")
    aborts = {rng.randrange(60): rng.choice(jobs).request_id for _ in range(3)}
    resets = {rng.randrange(5, 60) for _ in range(3 * (seed % 2))}

    def disturb(step: int) -> None:
        if step in resets:
            Scheduler.reset_prefix_cache(engine.scheduler, reset_running_requests=True)
        else:
            engine.check_blocks()

    texts = plain_ids(engine.run(jobs, per_step=2, aborts=aborts, on_step=disturb), f"a{seed}-")
    gone = {name.removeprefix(f"a{seed}-") for name in aborts.values()}
    for name, text in reference.items():
        kept = texts.get(name, [])
        assert kept == (text[: len(kept)] if name in gone else text), name
    assert max(watched.retold.values()) > 3, "nobody was retold again and again"
    assert len(watched.retold) > 5
    assert not engine.conductor._retelling, "somebody who has ended is still remembered"
    assert seed % 2 or engine.conductor.counters.strays == 0
    engine.conductor.counters.strays = 0
    engine.check_rest()


def test_lists_stay_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests run, three in each sub-batch, so everybody is looked at in every step of theirs."""
    watched = Watched(engine, monkeypatch)
    jobs = [Job(f"short{i}", [5 + i, 6, 7], 90) for i in range(6)]
    texts = engine.run(jobs)
    assert [len(text) for text in texts.values()] == [90] * 6
    assert len(watched.retold) == 6
    assert watched.longest_list < MIN_TOKENS + 2 * 7


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"min_tokens": 30},
        {"min_tokens": 30, "stop_token_ids": list(range(3, 60))},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_who_is_never_retold(engine: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """It would be sampled otherwise: the same text as when nobody is retold, beside somebody who is."""
    from vllm import SamplingParams

    from minedraft.backends.vllm import retelling

    prompts = [{"prompt_token_ids": [9 + i, 10, 11]} for i in range(4)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40 + i, ignore_eos=True, **(options if i % 2 else {}))
        for i in range(4)
    ]

    def generate() -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in engine.llm.generate(prompts, params, use_tqdm=False)]

    watched = Watched(engine, monkeypatch)
    texts = generate()
    assert len(watched.retold) == 2
    monkeypatch.setattr(retelling, "MIN_TOKENS", 10_000)
    assert generate() == texts


def test_seeds_go_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a seed keeps its generator."""
    from vllm import SamplingParams

    from minedraft.backends.vllm import retelling

    def generate() -> list[list[int]]:
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=40, ignore_eos=True, extra_args={"max_draft_tokens": 0})
            for i in range(4)
        ]
        prompts = [{"prompt_token_ids": [9 + i, 10, 11]} for i in range(4)]
        return [list(one.outputs[0].token_ids) for one in engine.llm.generate(prompts, params, use_tqdm=False)]

    watched = Watched(engine, monkeypatch)
    texts = generate()
    assert watched.retold
    monkeypatch.setattr(retelling, "MIN_TOKENS", 10_000)
    assert generate() == texts


def test_only_where_rows_alternate(models: Path, reference: dict[str, list[int]]) -> None:
    """In sd everybody runs in every step: the workers copy nothing, and nobody is retold."""
    options = minedraft_options(models / "noisy", mode="sd", k=3)
    with Engine(models / "target", **options) as engine:
        looked = []
        engine.conductor._retelling.look = lambda *args: looked.append(args)
        assert engine.run(make_requests()) == reference
        assert not looked


def test_workers_in_other_processes(
    models: Path, reference: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, which get the arrays through shared memory."""
    from minedraft.backends.vllm import compat

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by itself vLLM wants a NUMA node for each rank
    told: Counter[str] = Counter()
    announce = compat.announce_again

    def announced(scheduler: Any, output: Any, request_id: str, text: Any) -> None:
        told[request_id] += 1
        announce(scheduler, output, request_id, text)

    monkeypatch.setattr(compat, "announce_again", announced)
    options = minedraft_options(models / "noisy", mode="psd", k=3)
    with Engine(models / "target", tensor_parallel_size=2, **options) as engine:
        assert engine.run(make_requests()) == reference
        assert engine.conductor.counters.strays == 0
    assert max(told.values()) > 3

"""The core sees vLLM's own block pool: shared prefixes cost nothing twice, and what is cached isn't planned again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_kit import BLOCK_SIZE, Engine, Job, minedraft_options, plain_ids, renamed, replay_report

PROMPT = [(11 + 5 * j) % 125 + 3 for j in range(5 * BLOCK_SIZE)]


def family(count: int, max_tokens: int = 40) -> list[Job]:
    """Requests that share a prompt of five blocks, but for the last few tokens."""
    return [Job(f"s{i}", [*PROMPT, 3 + i, 5 + 2 * i], max_tokens + i % 5) for i in range(count)]


def strangers(count: int) -> list[Job]:
    return [Job(f"o{i}", [(7 * i + 3 * j) % 125 + 3 for j in range(70)], 30 + i) for i in range(count)]


@pytest.fixture(scope="module")
def texts(models: Path) -> dict[str, list[int]]:
    with Engine(models / "target") as engine:
        return engine.run([*family(8), *strangers(6)])


@pytest.fixture(scope="module")
def engine(models: Path, texts: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    assert texts  # stock vLLM has run: one engine at a time
    # 16 usable blocks: two of the family by their own blocks of seven, five where they share five of them.
    journal = tmp_path_factory.mktemp("view") / "run.jsonl"
    options = minedraft_options(models / "noisy", mode="psd", journal=str(journal))
    with Engine(models / "target", num_gpu_blocks_override=17, max_num_batched_tokens=32, **options) as engine:
        yield engine
        engine.close()
    report = replay_report(journal)
    assert report.first_difference is None, str(report.first_difference)
    assert report.num_decisions > 100


def test_shared_blocks_are_counted_once(engine: Engine, texts: dict[str, list[int]]) -> None:
    most = 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, len(engine.conductor.core.state.running))
        engine.check_blocks()

    jobs = family(8)
    assert plain_ids(engine.run(renamed(jobs, "a"), on_step=look), "a") == {
        job.request_id: texts[job.request_id] for job in jobs
    }
    assert most >= 4
    assert engine.conductor.counters.strays == 0
    engine.check_rest()


def test_what_is_cached_takes_no_step(engine: Engine, texts: dict[str, list[int]]) -> None:
    """A prompt of 162 tokens in steps of 32 takes six; with its first five blocks cached, one."""
    steps = engine.conductor.counters.steps
    job = family(1, 1)[0]._replace(request_id="again")
    assert engine.run([job])["again"] == texts["s0"][:1]
    assert engine.conductor.counters.steps == steps + 1


def test_preemptions_among_those_that_share(engine: Engine, texts: dict[str, list[int]]) -> None:
    """Who gives way frees only what nobody else holds, and finds the rest again."""
    preemptions = engine.conductor.counters.preemptions
    jobs = [*family(8), *strangers(6)]
    mixed = [jobs[(5 * i) % len(jobs)] for i in range(len(jobs))]
    found = engine.run(renamed(mixed, "b"), per_step=2, on_step=lambda _: engine.check_blocks())
    assert plain_ids(found, "b") == {job.request_id: texts[job.request_id] for job in mixed}
    assert engine.conductor.counters.preemptions > preemptions
    state = engine.conductor.core.state  # nobody is planned drafts that vLLM doesn't take, as from who joins on a hit
    metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == state.num_draft_tokens  # type: ignore[attr-defined]
    assert engine.conductor.counters.strays == 0
    engine.check_rest()

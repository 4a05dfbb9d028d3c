"""One psd engine with a drafter that disagrees now and then and with little KV, through everything that can happen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import Engine, Job, make_load, make_requests, minedraft_options, plain_ids, renamed, replay_report


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("psd") / "run.jsonl"


@pytest.fixture(scope="module")
def engine(models: Path, journal: Path) -> Iterator[Engine]:
    # 17 usable blocks: two of the longest requests fill them.
    options = minedraft_options(
        models / "noisy",
        mode="psd",
        journal=str(journal),
        drafter={"restart_backoff_s": 0.01, "max_restarts": 5, "hang_timeout_s": 60.0},
    )
    with Engine(models / "target", num_gpu_blocks_override=18, **options) as engine:
        yield engine


def run(engine: Engine, prefix: str, jobs: list[Job] | None = None, **options: object) -> dict[str, list[int]]:
    """Texts by the ids of the jobs, after a look at the books."""
    texts = engine.run(renamed(jobs or make_requests(), prefix), **options)  # type: ignore[arg-type]
    engine.check_rest()
    assert engine.conductor.counters.strays == 0
    return plain_ids(texts, prefix)


def expected(reference: dict[str, list[int]], jobs: list[Job] | None = None) -> dict[str, list[int]]:
    return {job.request_id: reference[job.request_id] for job in jobs or make_requests()}


def test_preemptions_and_mixed_prompts(engine: Engine, reference: dict[str, list[int]]) -> None:
    counters, state = engine.conductor.counters, engine.conductor.core.state
    texts = run(engine, "a", on_step=lambda _: engine.check_blocks())
    assert texts == expected(reference)
    assert counters.preemptions > 0
    assert counters.trims > 0
    assert 0.2 < state.num_accepted_tokens / state.num_draft_tokens < 0.95
    assert max(len(text) for text in texts.values()) == 70


def test_prefix_cache_hits(engine: Engine, reference: dict[str, list[int]]) -> None:
    """Hits at the first chunk and beyond it, by requests that join while the first one runs and after it ended."""
    by_id = {job.request_id: job for job in make_requests()}
    for prefix in ("b", "bb"):
        jobs = [by_id[name]._replace(request_id=f"{name}-{i}") for i in range(3) for name in ("r12", "r14")]
        texts = run(engine, prefix, jobs, per_step=1)
        assert texts == {job.request_id: reference[job.request_id.partition("-")[0]] for job in jobs}
    metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
    assert metrics["vllm:prefix_cache_hits"].value >= 4 * 64  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "min_tokens": 10, "frequency_penalty": 0.3},
        {"temperature": 0.0, "allowed_token_ids": list(range(3, 60))},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 1.0, "top_k": 1, "n": 2},
    ],
    ids=["logprobs", "min_tokens", "allowed", "prompt_logprobs", "n"],
)
def test_sampling_parameters(engine: Engine, options: dict[str, object]) -> None:
    """What vLLM reports is the same for requests that are drafted for and for those that opt out."""
    from vllm import SamplingParams

    jobs = make_requests()[:6]
    reports = []
    for extra in (None, {"max_draft_tokens": 0}):
        params = [SamplingParams(max_tokens=12 + i, extra_args=extra, **options) for i in range(len(jobs))]
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        reports.append([[report(one) for one in output.outputs] for output in outputs])
    assert reports[0] == reports[1]
    engine.check_rest()


def test_seeds(engine: Engine) -> None:
    """Also with prompts that come in chunks, which without `cpu_sampling` end the engine on a CPU."""
    from vllm import SamplingParams

    jobs = [job for job in make_requests() if len(job.prompt) > 60][:4]
    texts = []
    for _ in range(2):
        params = [
            SamplingParams(temperature=1.0, seed=11 + i, max_tokens=12, extra_args={"max_draft_tokens": 0})
            for i in range(len(jobs))
        ]
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == len(jobs)
    engine.check_rest()


def report(one: Any) -> object:
    """Ids, and per token the log-probabilities that came with it."""
    rows = [sorted((token, round(entry.logprob, 3)) for token, entry in row.items()) for row in one.logprobs or ()]
    return list(one.token_ids), rows, one.finish_reason


def test_aborts(engine: Engine, reference: dict[str, list[int]]) -> None:
    aborts = {3: "cr2", 5: "cr5", 8: "cr7", 12: "cr0", 13: "cr12"}
    texts = run(engine, "c", aborts=aborts)
    gone = {request_id.removeprefix("c") for request_id in aborts.values()}
    assert texts.keys() >= expected(reference).keys() - gone
    for request_id, text in texts.items():
        whole = reference[request_id]
        assert text == whole[: len(text)] if request_id in gone else text == whole


def test_drafter_killed(engine: Engine, reference: dict[str, list[int]]) -> None:
    """Every request goes on without drafts, and with them once the drafter is back."""
    lost = engine.conductor.counters.drafters_lost

    def kill(step: int) -> None:
        if step == 10:
            os.kill(engine.conductor.drafter_pid, signal.SIGKILL)

    assert run(engine, "d", on_step=kill) == expected(reference)
    assert engine.conductor.counters.drafters_lost == lost + 1
    engine.await_drafts()
    assert run(engine, "e") == expected(reference)


def test_drafter_stopped(engine: Engine, reference: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung drafter costs one deadline, not one per round; its late answer is dropped."""
    channel = engine.conductor._channel
    settings = channel._settings
    late = engine.conductor.counters.late_drafts
    import dataclasses

    channel._settings = dataclasses.replace(settings, deadline_s=0.5)

    def stop(step: int) -> None:
        if step == 10:
            os.kill(engine.conductor.drafter_pid, signal.SIGSTOP)

    try:
        started = time.monotonic()
        assert run(engine, "f", on_step=stop) == expected(reference)
        assert time.monotonic() - started < 30.0
        assert engine.conductor.counters.late_drafts > late
    finally:
        channel._settings = settings
        os.kill(engine.conductor.drafter_pid, signal.SIGCONT)
    engine.await_drafts()
    assert run(engine, "g") == expected(reference)


def test_engine_resets_running_requests(engine: Engine, reference: dict[str, list[int]]) -> None:
    """Somebody preempts everybody behind the core's back: noticed, counted, and nothing is lost."""
    from vllm.v1.core.sched.scheduler import Scheduler

    strays = engine.conductor.counters.strays

    def reset(step: int) -> None:
        if step == 12:  # past our own method, which would tell the core
            Scheduler.reset_prefix_cache(engine.scheduler, reset_running_requests=True)

    texts = engine.run(renamed(make_requests(), "h"), on_step=reset)
    assert plain_ids(texts, "h") == expected(reference)
    assert engine.conductor.counters.strays > strays
    engine.conductor.counters.strays = 0
    engine.check_rest()


def test_load_with_a_failing_drafter(engine: Engine, reference: dict[str, list[int]]) -> None:
    """Finishes and refills at every phase, aborts, and a drafter that dies, comes back and is stopped meanwhile."""
    engine.await_drafts()
    jobs = make_load()
    aborts = {5 * i: f"il{9 * i}" for i in range(1, 12)}

    def disturb(step: int) -> None:
        pid = engine.conductor.drafter_pid
        if pid is not None and step % 25 == 20:
            os.kill(pid, signal.SIGKILL if step == 20 else signal.SIGSTOP)
        if pid is not None and step % 25 == 24:
            os.kill(pid, signal.SIGCONT)
        if step % 10 == 0:
            engine.check_blocks()

    texts = run(engine, "i", jobs, per_step=2, aborts=aborts, on_step=disturb)
    gone = {request_id.removeprefix("i") for request_id in aborts.values()}
    assert texts.keys() >= expected(reference, jobs).keys() - gone
    for request_id, text in texts.items():
        whole = reference[request_id]
        assert text == whole[: len(text)] if request_id in gone else text == whole


def test_replay_takes_the_same_decisions(engine: Engine, journal: Path) -> None:
    """E7, over all of the above: kills, stops, aborts, preemptions and strays included."""
    report = replay_report(journal)
    assert report.first_difference is None, str(report.first_difference)
    assert report.num_decisions > 300

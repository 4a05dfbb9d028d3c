"""vLLM paused in each of its ways, put to sleep and woken: nobody is let in meanwhile, and no text changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Engine,
    Job,
    make_load,
    make_requests,
    minedraft_options,
    plain_ids,
    renamed,
    replay_report,
)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pauses") / "j"


@pytest.fixture(scope="module")
def engine(models: Path, journal: Path) -> Iterator[Engine]:
    options = minedraft_options(models / "noisy", mode="psd", journal=str(journal))
    with Engine(models / "target", **options) as engine:
        yield engine


@pytest.fixture
def strays(engine: Engine) -> Iterator[Callable[[], int]]:
    before = engine.conductor.counters.strays
    yield lambda: int(engine.conductor.counters.strays - before)
    engine.check_rest()


def core_of(engine: Engine) -> Any:
    """VLLM's engine core."""
    return engine.engine.engine_core.engine_core


def expect(texts: dict[str, list[int]], prefix: str, reference: dict[str, list[int]]) -> None:
    assert plain_ids(texts, prefix) == {name: reference[name] for name in plain_ids(texts, prefix)}


@pytest.mark.parametrize("first", [1, 2, 5, 6, 9])
def test_nobody_is_let_in(
    engine: Engine, reference: dict[str, list[int]], strays: Callable[[], int], first: int
) -> None:
    """A pause that lets the running ones end (mode `wait`): as in stock vLLM, who waits is served afterwards."""
    from vllm.v1.core.sched.interface import PauseState

    core = core_of(engine)
    inside: list[str] = []
    lengths: list[int] = []

    def look(step: int) -> None:
        if step == first:
            core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            inside[:] = [request.request_id for request in core.scheduler.running]
        running = [request.request_id for request in core.scheduler.running]
        if not core.is_scheduler_paused():
            return
        assert set(running) <= set(inside)
        if step > first + 1:
            assert engine.conductor.core.state.waiting.num_live == 0
        lengths.append(len(core.scheduler.waiting))
        if not running:
            assert not core.scheduler.has_unfinished_requests()
            core.resume_scheduler()

    prefix = f"wait{first}-"
    jobs = renamed(make_requests(), prefix)
    aborts = {first + 8: jobs[-1].request_id}  # it waits
    texts = engine.run(jobs, per_step=2, aborts=aborts, on_step=look)
    assert len(lengths) > 3
    assert max(lengths) > 3
    assert len(texts) == len(jobs) - 1
    expect(texts, prefix, reference)
    assert strays() <= 6  # those that were about to join


@pytest.mark.parametrize("clear_cache", [False, True])
def test_keep(engine: Engine, reference: dict[str, list[int]], strays: Callable[[], int], clear_cache: bool) -> None:
    """A pause that freezes the requests, as for new weights; with `clear_cache` all of them lose their KV."""
    core = core_of(engine)

    def look(step: int) -> None:
        if step % 7 == 3:
            core.pause_scheduler("keep", clear_cache=clear_cache)
            for _ in range(3):
                outputs = core.step_fn()[0].get(0)  # it may have to tell the workers who ended before
                assert outputs is None or not outputs.outputs
            core.resume_scheduler()

    prefix = f"keep{clear_cache}-"
    texts = engine.run(renamed(make_requests(), prefix), per_step=3, on_step=look)
    assert len(texts) == len(make_requests())
    expect(texts, prefix, reference)
    assert strays() == 0


def test_abort(engine: Engine, reference: dict[str, list[int]], strays: Callable[[], int]) -> None:
    core = core_of(engine)

    def look(step: int) -> None:
        if step == 6:
            core.pause_scheduler("abort")
            assert not core.scheduler.requests
            core.resume_scheduler()
            # The front end would have heard of it from the output queue of an engine in a process of its own.
            processor = engine.engine.output_processor
            processor.abort_requests(list(processor.request_states), internal=True)

    jobs = make_requests()
    engine.run(renamed(jobs, "gone"), on_step=look)
    expect(engine.run(renamed(jobs, "after")), "after", reference)
    assert strays() == 0


def test_caches_may_be_reset_at_any_time(
    engine: Engine, reference: dict[str, list[int]], strays: Callable[[], int]
) -> None:
    def look(step: int) -> None:
        if step % 5 == 4:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    jobs = [*renamed(make_requests(), "reset"), *renamed(make_load(30), "reset")]
    expect(engine.run(jobs, per_step=4, on_step=look), "reset", reference)
    assert strays() == 0


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_sleep(engine: Engine, reference: dict[str, list[int]], strays: Callable[[], int], mode: str) -> None:
    """The drafter sleeps while the target does, and drafts again afterwards.

    A CPU has no sleep mode: vLLM's workers only say so. All the rest is as on a GPU.
    """
    conductor, core = engine.conductor, core_of(engine)
    assert not conductor._may_nap  # the target was started without enable_sleep_mode
    conductor._may_nap = True
    lost, pid = conductor.counters.drafters_lost, conductor.drafter_pid
    jobs = make_requests()
    if mode == "abort":
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
    else:

        def look(step: int) -> None:
            if step == 6:
                engine.engine.sleep(level=1, mode=mode)  # type: ignore[arg-type]
                assert core.is_sleeping()
                engine.engine.wake_up()

        texts = engine.run(renamed(jobs, "asleep"), on_step=look)
        assert len(texts) == len(jobs)
        expect(texts, "asleep", reference)
    deadline, number = time.monotonic() + 240.0, 0
    before = conductor.core.state.num_accepted_tokens
    while conductor.core.state.num_accepted_tokens == before:
        assert time.monotonic() < deadline
        prefix = f"{mode}{number}-"
        expect(engine.run(renamed(jobs, prefix)), prefix, reference)
        number += 1
    conductor._may_nap = False
    assert (conductor.counters.drafters_lost, conductor.drafter_pid) == (lost, pid)
    assert strays() == 0


def test_a_pause_that_keeps_the_caches_keeps_the_drafter_awake(engine: Engine, strays: Callable[[], int]) -> None:
    conductor, core = engine.conductor, core_of(engine)
    conductor._may_nap = True
    core.pause_scheduler("keep", clear_cache=False)
    core.resume_scheduler()
    engine.run(renamed(make_requests()[:2], "awake"))
    conductor._may_nap = False
    assert conductor.core.state.drafter_up
    assert strays() == 0


def test_the_drafter_has_a_session_for_every_running_request(engine: Engine) -> None:
    from minedraft.backends.vllm.errors import VllmWorldError
    from minedraft.backends.vllm.limits import drafter_engine
    from minedraft.backends.vllm.settings import DrafterSettings

    assert drafter_engine(engine.scheduler, DrafterSettings(engine={"model": "m"}))["max_num_seqs"] == 6
    assert drafter_engine(engine.scheduler, DrafterSettings(engine={"model": "m", "max_num_seqs": 7}))
    with pytest.raises(VllmWorldError, match=r"max_num_seqs is 5, but the target runs up to 6"):
        drafter_engine(engine.scheduler, DrafterSettings(engine={"model": "m", "max_num_seqs": 5}))


def test_the_drafter_follows_the_target_into_sleep_mode(engine: Engine) -> None:
    from minedraft.backends.vllm.limits import drafter_engine
    from minedraft.backends.vllm.settings import DrafterSettings

    model_config = engine.scheduler.vllm_config.model_config
    for wanted in (True, False):
        model_config.enable_sleep_mode = wanted
        assert drafter_engine(engine.scheduler, DrafterSettings(engine={"model": "m"}))["enable_sleep_mode"] is wanted
        own = DrafterSettings(engine={"model": "m", "enable_sleep_mode": not wanted})
        assert drafter_engine(engine.scheduler, own)["enable_sleep_mode"] is not wanted


def test_replay_takes_the_same_decisions(engine: Engine, journal: Path) -> None:
    """Who was held back has left the core and come again; figures can be made of that."""
    from minedraft.journal import read_journal
    from minedraft.metrics import MetricsCollector, metrics_from_journal

    engine.close()
    report = replay_report(journal)
    assert report.first_difference is None, str(report.first_difference)
    assert report.num_decisions > 300
    collector = MetricsCollector(num_target_devices=1, num_draft_devices=1, max_model_len=256)
    assert metrics_from_journal(read_journal(journal), collector).completed > 100


def test_a_long_pause_costs_nobody_anything(models: Path, reference: dict[str, list[int]]) -> None:
    """A core that went on admitting would be let down step after step, and give those requests up."""
    from vllm.v1.core.sched.interface import PauseState

    with Engine(models / "target", **minedraft_options(None, mode="ar", k=1)) as engine:
        core = core_of(engine)
        num_steps: list[int] = []

        def look(step: int) -> None:
            if step == 1:
                core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            if core.is_scheduler_paused():
                num_steps.append(step)
                if not core.scheduler.running:
                    core.resume_scheduler()

        jobs = sorted(make_requests(), key=lambda job: -job.max_tokens)
        texts = engine.run(jobs, on_step=look)
        assert len(num_steps) > 55
        assert len(texts) == len(jobs)
        expect(texts, "", reference)
        assert engine.conductor.counters.strays <= 6
        engine.check_rest()


@pytest.mark.slow
def test_an_engine_in_other_processes(models: Path, reference: dict[str, list[int]]) -> None:
    """As a trainer does it to a server, by vLLM's own calls: each way of pausing, amid requests that go on coming."""
    texts = asyncio.run(pause_in_every_way(models))
    assert len(texts) == 4 * len(make_requests())
    for name, text in texts.items():
        whole = reference[name.partition("-")[2]]
        if name.startswith("abort") and text != whole:  # the text so far
            assert text == whole[: len(text)]
        else:
            assert text == whole, name


async def pause_in_every_way(models: Path) -> dict[str, list[int]]:
    """Texts by way and request id."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {
        "model": str(models / "target"),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 65,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        **minedraft_options(models / "noisy", mode="psd"),
    }
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    texts: dict[str, list[int]] = {}
    try:
        for name, clear_cache in (("keep", False), ("keepclear", True), ("wait", True), ("abort", True)):
            running = [asyncio.create_task(generate(llm, job, texts)) for job in renamed(make_requests(), f"{name}-")]
            while not texts.get(f"{name}-r0"):
                await asyncio.sleep(0.01)
            await llm.pause_generation(mode=name.removesuffix("clear"), clear_cache=clear_cache)  # type: ignore[arg-type]
            num_done = sum(map(len, texts.values()))
            await asyncio.sleep(0.1)
            assert sum(map(len, texts.values())) == num_done
            assert await llm.is_paused()
            await llm.resume_generation()
            await asyncio.gather(*running)
    finally:
        llm.shutdown()
    return texts


async def generate(llm: Any, job: Job, texts: dict[str, list[int]]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos, detokenize=False)
    async for output in llm.generate({"prompt_token_ids": job.prompt}, params, job.request_id):
        texts[job.request_id] = list(output.outputs[0].token_ids)

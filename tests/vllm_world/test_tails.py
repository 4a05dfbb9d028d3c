"""The workers' copies of the block tables are right in every step, whoever has had the blocks that were cut off."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_kit import Engine, Job, make_load, make_requests, minedraft_options, plain_ids, renamed


class Watched:
    """Compares the workers' tables with vLLM's before every forward pass, and counts how requests grow again."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        from minedraft.backends.vllm import compat, tails

        self.counts: Counter[str] = Counter()
        scheduler = engine.scheduler
        core: Any = engine.engine.engine_core.engine_core  # type: ignore[attr-defined]
        runner = core.model_executor.driver_worker.worker.model_runner
        update, take, resend = runner._update_states, compat.take_blocks, compat.resend_blocks

        def updated(output: Any) -> Any:
            done = update(output)
            for request_id in output.num_scheduled_tokens:
                held = [block.block_id for block in compat._blocks(scheduler, request_id)]
                assert runner.requests[request_id].block_ids[0][: len(held)] == held, request_id
                index = runner.input_batch.req_id_to_index[request_id]
                row = runner.input_batch.block_table[0].get_numpy_array()[index]
                assert row[: len(held)].tolist() == held, request_id
                self.counts["checked"] += 1
            return done

        def taken(scheduler: Any, found: Any, num_new: Any) -> Any:
            found = list(found)
            left = take(scheduler, found, num_new)
            for before, after in zip(found, left, strict=True):
                self.counts["back" if after is None else "lost" if not after[2] else "left"] += bool(before[2])
            return left

        def resent(*args: Any) -> None:
            self.counts["resent"] += 1
            resend(*args)

        patch.setattr(runner, "_update_states", updated)
        patch.setattr(tails.compat, "take_blocks", taken)
        patch.setattr(tails.compat, "resend_blocks", resent)


@pytest.fixture(scope="module")
def reference(models: Path) -> dict[str, list[int]]:
    with Engine(models / "target") as engine:
        return engine.run([*make_requests(), *make_load()])


@pytest.fixture(scope="module", params=["sd", "psd"])
def engine(models: Path, reference: dict[str, list[int]], request: pytest.FixtureRequest) -> Iterator[Engine]:
    assert reference  # vLLM keeps one engine per process: the other one must be closed by now
    options = minedraft_options(models / "noisy", mode=request.param, k=12)
    with Engine(models / "target", num_gpu_blocks_override=20, **options) as engine:
        yield engine


def test_tables_of_the_workers(
    engine: Engine, reference: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twelve drafts, of which many are rejected, every third request is cut in a round.

    The pool is short, so that blocks which were cut become others', requests are preempted, and drafts are shortened.
    """
    watched = Watched(engine, monkeypatch)
    jobs = [*make_requests(), *make_load()]
    aborts = {7 * i: f"l{5 * i}" for i in range(1, 12)}
    texts = engine.run(jobs, per_step=3, aborts=aborts, on_step=lambda _: engine.check_blocks())
    gone = set(aborts.values())
    for job in jobs:
        if job.request_id in texts:
            text = reference[job.request_id]
            kept = texts[job.request_id]
            assert kept == (text[: len(kept)] if job.request_id in gone else text)
        else:
            assert job.request_id in gone
    counters = engine.conductor.counters
    assert counters.strays == 0
    assert counters.preemptions > 0
    assert watched.counts["checked"] > 500
    assert watched.counts["back"] > 50
    assert watched.counts["lost"] > 5
    assert watched.counts["resent"] > 5
    engine.check_rest()
    assert not engine.conductor._tails, "somebody who has ended left a tail"
    assert not engine.scheduler.prev_step_scheduled_req_ids, "somebody who has ended counts as scheduled"


def test_whoever_begins_anew_has_no_tail(engine: Engine) -> None:
    """A request that lost its place behind the core's back gets a new table, and so does another one of its name."""
    from vllm.v1.core.sched.scheduler import Scheduler

    jobs = [Job(f"again{i}", [5 + i, 6, 7 + i], 40) for i in range(4)]
    seen = []

    def disturb(step: int) -> None:
        if step % 6 == 5:
            seen.append(len(engine.conductor._tails))
            Scheduler.reset_prefix_cache(engine.scheduler, reset_running_requests=True)
            assert not engine.conductor._tails

    texts = engine.run(jobs, on_step=disturb)
    assert any(seen)
    assert [len(text) for text in texts.values()] == [40] * 4
    engine.conductor.counters.strays = 0
    engine.check_rest()


class Trouble:
    """Whatever may come between two steps of vLLM, or between the core's plan and vLLM's carrying it out."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.engine, self.conductor = engine, engine.conductor
        self.plan, self.scheduled = self.conductor.plan, self.conductor.scheduled
        self.stolen: list[Any] = []
        self.is_planned = True

    @property
    def pool(self) -> Any:
        return self.engine.scheduler.kv_cache_manager.block_pool

    def __call__(self, step: int) -> None:
        """Before a step."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.scheduler import Scheduler

        scheduler, chance = self.engine.scheduler, self.random.random()
        scheduler.set_pause_state(PauseState.PAUSED_NEW if chance > 0.9 else PauseState.UNPAUSED)
        if chance < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        elif chance < 0.04 and self.conductor._planned is None:  # past our own method, which would tell the core
            Scheduler.reset_prefix_cache(scheduler, reset_running_requests=True)
        elif chance < 0.07:
            scheduler.reset_prefix_cache()
        # Between two steps the core's plan may be there already; then vLLM runs that one and nothing else.
        self.is_planned = not (0.07 < chance < 0.12 and self.conductor._planned is None)

    def planned(self) -> None:
        """Instead of the conductor's `plan`."""
        if not self.is_planned:
            self.counts["unplanned"] += 1
            return
        self.plan()
        if self.random.random() < 0.1:  # vLLM finds its pool short and preempts whom it likes
            self.counts["short"] += 1
            self.stolen = self.pool.get_new_blocks(self.pool.get_num_free_blocks())

    def carried_out(self, output: Any) -> None:
        """Instead of the conductor's `scheduled`."""
        if self.stolen:
            self.pool.free_blocks(self.stolen)
            self.stolen = []
        self.scheduled(output)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens(
    engine: Engine, reference: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Tables and texts are right, and who has ended is forgotten, also in steps that aren't what the core planned."""
    from vllm.v1.core.sched.interface import PauseState

    from minedraft.backends.vllm import conductor

    watched, trouble = Watched(engine, monkeypatch), Trouble(engine, seed)
    monkeypatch.setattr(engine.conductor, "plan", trouble.planned)
    monkeypatch.setattr(engine.conductor, "scheduled", trouble.carried_out)
    monkeypatch.setattr(conductor, "_MAX_DISPLACED", 1000)
    prefix = f"trouble{seed}"
    jobs = renamed([*make_requests(), *make_load()], prefix)
    aborts = {9 * i: f"{prefix}l{5 * i}" for i in range(1, 12)}
    texts = plain_ids(engine.run(jobs, per_step=2, aborts=aborts, on_step=trouble), prefix)
    assert min(trouble.counts["unplanned"], trouble.counts["short"]) > 2
    assert watched.counts["back"] > 20
    gone = {request_id.removeprefix(prefix) for request_id in aborts.values()}
    for request_id, text in texts.items():
        whole = reference[request_id]
        assert text == (whole[: len(text)] if request_id in gone else whole), request_id
    assert len(texts) >= len(jobs) - len(gone)
    engine.conductor.counters.strays = 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run([Job(f"{prefix}last", [5, 6], 1)])
    engine.check_rest()
    assert not engine.conductor._tails, "somebody who has ended left a tail"
    assert not engine.conductor._stays
    assert not engine.scheduler.prev_step_scheduled_req_ids, "somebody who has ended counts as scheduled"


# --- Single decisions, on a pool of vLLM's.


def pool_of(num_blocks: int, size: int) -> Any:
    """What `Tails` sees of a scheduler: vLLM's own block pool, and the tables of its requests."""
    from vllm.v1.core.block_pool import BlockPool

    manager = SimpleNamespace(req_to_blocks={}, records_new_block_ids=False)
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=size)
    coordinator = SimpleNamespace(single_type_managers=[manager])
    kv = SimpleNamespace(coordinator=coordinator, block_pool=pool)
    kv.get_block_ids = lambda request_id: ([block.block_id for block in manager.req_to_blocks[request_id]],)
    return SimpleNamespace(
        kv_cache_manager=kv, block_size=size, requests={}, running=[], use_v2_model_runner=False, tables=manager
    )


def add(scheduler: Any, request_id: str, num_computed: int, num_blocks: int) -> Any:
    from vllm.v1.request import RequestStatus

    request = SimpleNamespace(request_id=request_id, status=RequestStatus.RUNNING, num_computed_tokens=num_computed)
    scheduler.requests[request_id] = request
    scheduler.tables.req_to_blocks[request_id] = scheduler.kv_cache_manager.block_pool.get_new_blocks(num_blocks)
    return request


def ids_of(scheduler: Any, request_id: str) -> list[int]:
    return [block.block_id for block in scheduler.tables.req_to_blocks[request_id]]


def output_for(scheduler: Any, new: dict[str, list[int] | None]) -> Any:
    cached = SimpleNamespace(
        req_ids=list(new),
        resumed_req_ids=set(),
        new_block_ids=[None if ids is None else (ids,) for ids in new.values()],
    )
    return SimpleNamespace(scheduled_cached_reqs=cached)


def test_a_tail_comes_back_in_parts_and_in_order() -> None:
    from minedraft.backends.vllm.tails import Tails

    scheduler = pool_of(20, 4)
    add(scheduler, "a", 5, 5)
    before = ids_of(scheduler, "a")
    tails = Tails(scheduler)
    assert tails.cut(["a", "stranger"]) == 1
    assert ids_of(scheduler, "a") == before[:2]
    for tokens, blocks in ((1, 2), (4, 3), (4, 3), (11, 4)):
        tails.take_back({"a": tokens})
        assert ids_of(scheduler, "a") == before[:blocks], tokens
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 19 - blocks
    assert len(tails) == 1  # one block is still out
    assert tails.cut(["a"]) == 1
    tails.take_back({"a": 15})
    assert ids_of(scheduler, "a") == before
    assert not tails
    output = output_for(scheduler, {"a": [99]})
    tails.resend(output, is_planned=True)
    assert not output.scheduled_cached_reqs.resumed_req_ids  # vLLM's new block comes behind its own: append it


@pytest.mark.parametrize("how", ["held", "cached", "cut again by another"])
def test_a_block_that_others_have_had_is_lost(how: str) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    from minedraft.backends.vllm.tails import Tails

    scheduler = pool_of(20, 4)
    add(scheduler, "a", 4, 3)
    pool, tails = scheduler.kv_cache_manager.block_pool, Tails(scheduler)
    tails.cut(["a"])
    first = tails._tails["a"][2][0]
    if how == "cached":
        first.set_block_hash(make_block_hash_with_group_id(b"somebody's", 0))
    else:
        add(scheduler, "b", 4, 1)
        pool.touch([first])
        scheduler.tables.req_to_blocks["b"].append(first)
        if how == "cut again by another":
            tails.cut(["b"])
    tails.take_back({"b": 4, "a": 8} if how == "cut again by another" else {"a": 8})
    lost, kept = ("a", "b") if how != "cut again by another" or len(ids_of(scheduler, "b")) == 2 else ("b", "a")
    output = output_for(scheduler, {lost: [7], kept: None} if how != "cached" else {lost: [7]})
    tails.resend(output, is_planned=True)
    cached = output.scheduled_cached_reqs
    assert cached.resumed_req_ids == {lost}
    assert cached.new_block_ids[0] == (ids_of(scheduler, lost),)
    assert lost not in tails._tails
    held = [block for table in scheduler.tables.req_to_blocks.values() for block in table]
    assert len({block.block_id for block in held}) == len(held), "two requests hold the same block"
    assert all(block.ref_cnt == 1 for block in held)


def test_what_runs_unplanned_is_sent_whole() -> None:
    from minedraft.backends.vllm.tails import Tails

    scheduler = pool_of(20, 4)
    add(scheduler, "a", 4, 3)
    tails = Tails(scheduler)
    tails.cut(["a"])
    tails.take_back({})
    output = output_for(scheduler, {"a": [7]})
    tails.resend(output, is_planned=False)
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}


def test_a_table_that_is_not_what_it_was_is_sent_whole() -> None:
    from minedraft.backends.vllm.tails import Tails

    scheduler = pool_of(20, 4)
    add(scheduler, "a", 4, 3)
    tails = Tails(scheduler)
    tails.cut(["a"])
    scheduler.tables.req_to_blocks["a"] += scheduler.kv_cache_manager.block_pool.get_new_blocks(1)  # whoever did it
    before = ids_of(scheduler, "a")
    tails.take_back({"a": 8})
    assert ids_of(scheduler, "a") == before
    output = output_for(scheduler, {"a": [7]})
    tails.resend(output, is_planned=True)
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}


def test_where_new_blocks_are_zeroed_none_is_taken_back() -> None:
    from minedraft.backends.vllm.tails import Tails

    scheduler = pool_of(20, 4)
    scheduler.tables.records_new_block_ids = True
    add(scheduler, "a", 4, 3)
    tails = Tails(scheduler)
    tails.cut(["a"])
    tails.take_back({"a": 8})
    assert len(ids_of(scheduler, "a")) == 1
    output = output_for(scheduler, {"a": [7, 8]})
    tails.resend(output, is_planned=True)
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}


# --- What a joining request has counted on.


def test_a_found_prefix_is_the_last_to_be_taken() -> None:
    """Others of the same step allocate first: they must not evict what is about to be used while others are free."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    from minedraft.backends.vllm import compat

    scheduler = pool_of(12, 4)
    pool = scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(11)
    for i, block in enumerate(blocks):
        block.set_block_hash(make_block_hash_with_group_id(b"%d" % i, 0))
    pool.free_blocks(blocks[2:])  # two are still somebody's; the next two are the first to be evicted
    found = SimpleNamespace(blocks=([*blocks[1:4]],))
    scheduler.kv_cache_manager.get_computed_blocks = lambda _: (found, 12, 0)
    free = pool.get_num_free_blocks()
    compat.keep_prefix(scheduler, SimpleNamespace())
    assert pool.get_num_free_blocks() == free
    assert [block.ref_cnt for block in blocks] == [1, 1] + [0] * 9
    taken = pool.get_new_blocks(free - 2)
    assert not {block.block_id for block in taken} & {block.block_id for block in blocks[1:4]}
    assert [block.block_id for block in pool.get_new_blocks(2)] == [blocks[3].block_id, blocks[2].block_id]

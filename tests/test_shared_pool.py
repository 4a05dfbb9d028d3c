"""A pool whose blocks several requests share: whatever the core plans, the world's real pool has room for it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_blocks import BlockStore, StoreAnswers
from toy_world import ToyDevices, ToyModel

from minedraft import Request, Scheduler, SchedulerConfig, load_policies
from minedraft.codec import Pooled, Record, decode, encode
from minedraft.work import (
    DraftWork,
    RequestAborted,
    RequestArrived,
    RequestDisplaced,
    VerifyWork,
    WorkDone,
    WorldError,
)

MAX_MODEL_LEN = 48


class SharedDevices(ToyDevices):
    """Toy devices whose prompts begin alike, and whose target KV lies in a block store."""

    def __init__(self, model: ToyModel, store: BlockStore) -> None:
        super().__init__(model, MAX_MODEL_LEN)
        self.store = store
        self.num_hit_tokens = 0

    def arrive(self, request: Request) -> None:
        super().arrive(request)
        family = int(request.request_id.partition("-")[2]) % 2
        shared = [1 + (family + 3 * i) % 10 for i in range(request.prompt_len - 1)]
        self.text[request.request_id][: len(shared)] = shared

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.store.drop(request_id)

    def execute(self, work):  # type: ignore[no-untyped-def]
        if isinstance(work, VerifyWork):
            self._allocate(work)
        return super().execute(work)

    def _allocate(self, work: VerifyWork) -> None:
        for request_id, incarnation in work.freed:
            if self.incarnation_of(request_id) == incarnation:
                self.store.drop(request_id)
        for i, request_id in enumerate(work.request_ids):
            text, start = self.text[request_id], work.num_computed[i]
            if request_id not in self.store.tables:
                # More may have been published since it was admitted; and less may be left, since who came before it
                # in this step may have taken cached blocks that nobody held. Then more is computed than planned.
                blocks = self.store.lookup(text)
                self.target_kv[request_id, work.incarnations[i]] = text[:start]
                if len(blocks) * self.store.block_size >= start + work.num_new[i] and not work.is_last[i]:
                    continue  # all of this chunk is there already: it joins with a later one
                self.store.join(request_id, blocks)
                self.num_hit_tokens += len(blocks) * self.store.block_size
            self.store.grow(request_id, start + work.num_new[i] + work.num_draft[i])

    def incarnation_of(self, request_id: str) -> int | None:
        found = [incarnation for owner, incarnation in self.target_kv if owner == request_id]
        return found[-1] if found else None


class World:
    """A loop as vLLM's: the core is asked while the target is at rest; drafts may be out."""

    def __init__(self, seed: int, mode: str, num_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.store = BlockStore(num_blocks, 4)
        self.devices = SharedDevices(ToyModel(seed), self.store)
        self.answers = StoreAnswers(self.store, self.devices.text)
        config = SchedulerConfig(
            num_batches=2 if mode == "psd" else 1,
            max_batch_size=4,
            max_num_batched_tokens=24,
            max_model_len=MAX_MODEL_LEN,
            block_size=4,
            num_target_blocks=num_blocks,
            num_draft_blocks=0 if mode == "ar" else 64,
            num_speculative_tokens=3,
        )
        self.core = Scheduler(config, load_policies({"mode": f"fixed,mode={mode}"}), self.answers.pool)
        self.requests: dict[str, Request] = {}
        self.drafting: tuple[DraftWork, object] | None = None
        self.now_s = 0.0

    def tell(self, event: object) -> None:
        self.core.update(event, self.now_s)  # type: ignore[arg-type]
        # What the core cut is cut here too, once it has spoken; only running requests hold more than they need.
        self.core.state.refresh()
        for owner, seq in self.core.state.running.items():
            if owner in self.store.tables and seq.num_uncomputed == 1 and not self.is_stale(owner, seq.incarnation):
                self.store.trim(owner, seq.target_capacity)

    def is_stale(self, owner: str, incarnation: int) -> bool:
        return self.devices.incarnation_of(owner) != incarnation

    def arrive(self, number: int) -> None:
        length = self.rng.choice([1, 5, 9, 17, 18, 30])
        request = Request(f"r-{number}", length, self.rng.randint(1, 16), self.now_s)
        self.requests[request.request_id] = request
        self.devices.arrive(request)
        self.tell(RequestArrived(request))

    def turn(self) -> None:
        self.now_s += 1.0
        if self.drafting is not None and self.rng.random() < 0.6:
            self.finish_draft()
        self.answers.sync(self.core.state.target_freed)
        verifying = None
        for work in self.core.schedule(self.now_s):
            if isinstance(work, DraftWork):
                self.drafting = (work, self.devices.execute(work))
            else:
                verifying = work
        if verifying is None:
            if self.drafting is not None:
                self.finish_draft()
            return
        result = self.devices.execute(verifying)
        if self.rng.random() < 0.1 and self.devices.text:
            self.abort(self.rng.choice(list(self.devices.text)))
        self.devices.deliver(verifying)
        for i, request_id in enumerate(verifying.request_ids):
            if request_id in self.store.tables:
                computed = min(verifying.num_computed[i] + verifying.num_new[i], len(self.devices.text[request_id]))
                self.store.publish(request_id, self.devices.text[request_id], computed)
        self.tell(WorkDone(verifying.work_id, result, self.now_s, self.now_s))
        self.store.check()

    def finish_draft(self) -> None:
        assert self.drafting is not None
        (work, result), self.drafting = self.drafting, None
        self.tell(WorkDone(work.work_id, result, self.now_s, self.now_s))  # type: ignore[arg-type]

    def abort(self, request_id: str) -> None:
        self.devices.forget(request_id)
        self.tell(RequestAborted(request_id))


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@given(seed=st.integers(0, 1 << 30), num_blocks=st.integers(14, 40))
def test_whatever_is_planned_fits(mode: str, seed: int, num_blocks: int) -> None:
    world = World(seed, mode, num_blocks)
    number = 0
    for _ in range(400):
        while number < 14 and world.rng.random() < 0.4:
            world.arrive(number)
            number += 1
        world.turn()
        if number == 14 and not world.core.num_unfinished:
            break
    assert not world.core.num_unfinished
    assert not world.devices.text
    assert len(world.store.free) == num_blocks
    world.answers.sync([])
    world.answers.pool.check_integrity()
    for request_id, text in world.devices.finished.items():
        assert len(text) <= world.requests[request_id].max_tokens


def test_sharing_lets_more_requests_run_and_skips_what_is_computed() -> None:
    """Ten requests with one long prompt: by their own blocks two fit at once, but they share most of them."""
    at_once, hits = {}, {}
    for shared in (True, False):
        world = World(1, "ar", 22)
        if not shared:
            world.store.lookup = lambda text: []  # type: ignore[method-assign]
        for i in range(10):
            request = Request(f"r-{2 * i}", 30, 6, 0.0)
            world.devices.arrive(request)
            world.tell(RequestArrived(request))
        at_once[shared] = 0
        while world.core.num_unfinished:
            world.turn()
            at_once[shared] = max(at_once[shared], len(world.core.state.running))
        hits[shared] = world.devices.num_hit_tokens
    assert at_once == {True: 4, False: 2}
    assert hits[False] == 0
    assert hits[True] >= 8 * 28


def test_displaced() -> None:
    """A request whose KV the world dropped keeps its place and its text, and a result in flight is nobody's."""
    world = World(3, "ar", 40)
    for i in range(5):
        request = Request(f"r-{i}", 6, 8, 0.0)
        world.devices.arrive(request)
        world.tell(RequestArrived(request))
    works = world.core.schedule(1.0)
    assert [len(work.request_ids) for work in works] == [4]
    with pytest.raises(WorldError, match="less than its prompt"):
        world.core.update(RequestDisplaced("r-1", 5), 1.0)
    world.core.update(RequestDisplaced("r-1", 6), 1.0)
    world.core.update(RequestDisplaced("nobody", 6), 1.0)
    result = world.devices.execute(works[0])
    world.core.update(WorkDone(works[0].work_id, result, 1.0, 2.0), 2.0)  # type: ignore[arg-type]
    seq = world.core.state.sequences["r-1"]
    assert (seq.num_tokens, seq.num_preemptions, seq.num_computed) == (6, 1, 0)
    (work,) = world.core.schedule(3.0)
    assert "r-1" in work.request_ids  # before r-4, which arrived later
    assert "r-4" not in work.request_ids
    assert work.num_computed[work.request_ids.index("r-1")] == 0
    ended = world.core.update(RequestDisplaced("r-1", 14), 3.0)
    assert [output.request_id for output in ended] == ["r-1"]  # at its limit


def test_answers_survive_the_journal() -> None:
    answers = Pooled(7, (("a", 8, 1),), (("b", 0),))
    for item in (answers, answers._replace(num_free=None), RequestDisplaced("a", 9)):
        assert decode(encode(1.5, item)) == Record(1.5, item)

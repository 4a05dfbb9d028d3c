"""Ingestion: the drafter takes prompts in beside the target's own work, and neither waits for the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from driver import Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from test_scenarios import H100S, config, figures
from test_scheduler_machine import SLOTS, SchedulerMachine, configs
from toy_world import ToyModel

from minedraft import Request, SchedulerConfig, load_policies
from minedraft.batch import BatchPhase
from minedraft.drafting import wants_draft
from minedraft.policy import BUILTIN, Mode, Move
from minedraft.scheduler_config import CATCH_UP_TOKENS
from minedraft.sim.pearl import PearlBackend
from minedraft.work import (
    DraftResult,
    DraftWork,
    Event,
    RequestDisplaced,
    VerifyWork,
    Work,
    WorkDone,
    WorldError,
    ZeroDraft,
)


def ingestions(driver: Driver) -> list[DraftWork]:
    return [work for work in driver.works if isinstance(work, DraftWork) and not any(work.num_draft)]


def drafts(driver: Driver) -> list[DraftWork]:
    return [work for work in driver.works if isinstance(work, DraftWork) and any(work.num_draft)]


def request(name: str, prompt_len: int = 6, max_tokens: int = 60, **fields: Any) -> Request:
    return Request(name, prompt_len, max_tokens, **fields)


def num_draft_computed(driver: Driver, name: str) -> int:
    return driver.scheduler.state.sequences[name].num_draft_computed


def long_prompt(mode: str = "sd", **limits: Any) -> Driver:
    """A prompt of 1,000 tokens, computed in chunks of 300; the first is on its way, and so is the first ingestion."""
    usual = {"max_num_batched_tokens": 300, "max_num_draft_batched_tokens": 1024, "max_model_len": 2048}
    driver = Driver(mode, **{**usual, **limits})
    driver.arrive(request("long", 1000, max_tokens=900))
    return driver


# --- what is ingested, and when


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_a_lone_long_prompt_is_drafted_as_soon_as_the_target_has_computed_it(mode: str) -> None:
    driver = long_prompt(mode)
    while driver.verifying is not None and not driver.verifying.is_last[0]:
        while driver.drafting is not None:
            driver.ingest_done()
        assert len(driver.works) == len(set(driver.works))
        driver.verify_done()
    while driver.drafting is not None:
        driver.ingest_done()
    assert sum(sum(work.num_new) for work in ingestions(driver)) == 1000, "every token once"
    driver.verify_done()
    assert driver.drafting is not None
    assert driver.drafting.num_draft == (4,)
    assert driver.drafting.num_new == (1,)
    assert driver.verifying is None


def test_an_ingestion_is_as_long_as_what_the_target_computes_meanwhile() -> None:
    for budget, expected in ((100, CATCH_UP_TOKENS), (300, 300), (1000, 1000)):
        driver = long_prompt(max_num_batched_tokens=budget)
        assert driver.drafting is not None
        assert driver.drafting.num_new == (expected,)
    driver = long_prompt(max_num_batched_tokens=1000, max_num_draft_batched_tokens=200)
    assert driver.drafting is not None
    assert driver.drafting.num_new == (200,), "no more than the drafter takes at once"


def test_the_batch_stays_open_and_keeps_its_phase() -> None:
    driver = long_prompt()
    batch = driver.scheduler.state.batches.batches[0]
    assert batch.phase is BatchPhase.VERIFYING
    driver.verify_done()
    assert batch.phase is BatchPhase.VERIFYING, "its next chunk, with the ingestion still in flight"
    assert driver.drafting is not None
    driver.arrive(request("next"))
    driver.verify_done()
    assert "next" in batch.members
    assert batch.phase is BatchPhase.VERIFYING
    assert driver.drafting is ingestions(driver)[0]


def test_whom_it_leaves_far_behind_is_verified_without_drafts_meanwhile() -> None:
    """The target is done with the prompt long before the drafter: it never waits for somebody who can't be drafted."""
    driver = long_prompt(max_batch_size=4)
    for _ in range(12):
        driver.verify_done()
        assert driver.verifying is not None
    assert driver.verifying.is_last == (True,)
    assert driver.verifying.zero_draft[ZeroDraft.CATCH_UP] == 1
    assert len(ingestions(driver)) == 1
    driver.ingest_done()
    while driver.drafting is not None and not any(driver.drafting.num_draft):
        driver.ingest_done()
        if driver.drafting is None:
            driver.verify_done()
    assert driver.drafting is not None, "the drafter has caught up"
    missing = driver.drafting.num_new[0]
    assert missing <= driver.scheduler.config.catch_up_limit


def test_who_writes_a_lot_meanwhile_is_caught_up_with_too() -> None:
    """It has outgrown the draft blocks that it was given when it came."""
    driver = long_prompt(max_batch_size=4)
    for _ in range(300):
        driver.verify_done()
    assert driver.verifying is not None
    assert driver.verifying.num_computed[0] > 1000 + driver.scheduler.config.catch_up_limit + 4
    for _ in range(40):
        if driver.drafting is not None:
            driver.draft_done()
        else:
            driver.verify_done()
    assert driver.verifies()[-1].num_draft == (4,)


def test_who_is_nearly_there_is_waited_for() -> None:
    driver = long_prompt(max_num_batched_tokens=1000)
    assert driver.drafting is not None
    assert driver.drafting.num_new == (1000,)
    driver.verify_done()
    assert driver.verifying is None, "the ingestion in flight is all that is missing"
    driver.ingest_done()
    assert driver.drafting is not None
    assert driver.drafting.num_draft == (4,)


def test_who_has_no_draft_kv_is_not_waited_for() -> None:
    """The draft pool has room for the one who lags far behind, so the other one can't be drafted either."""
    driver = long_prompt(num_draft_blocks=253)
    driver.arrive(request("short", 20))
    for _ in range(12):
        driver.verify_done()
        assert driver.verifying is not None
    assert driver.verifying.num_new == (1, 1)
    assert driver.verifying.zero_draft[ZeroDraft.CATCH_UP] == driver.verifying.zero_draft[ZeroDraft.DRAFT_KV] == 1
    assert len(ingestions(driver)) == 1


def test_who_is_never_drafted_again_gives_its_draft_kv_to_others() -> None:
    """Also where nobody of its batch can be drafted, for want of that very KV."""
    driver = Driver("sd", draft_max_model_len=40, num_draft_blocks=10, max_num_batched_tokens=64)
    driver.arrive(request("old", 30, max_tokens=200), request("new", 8, max_tokens=20))
    assert not driver.scheduler.state.sequences["new"].draft_capacity
    while driver.scheduler.state.sequences["old"].num_tokens < 40:
        driver.step(num_accepted=4)
    for _ in range(6):
        driver.step(num_accepted=4)
    assert not driver.scheduler.state.sequences["old"].draft_capacity
    assert any("new" in work.request_ids for work in drafts(driver))


def test_a_batch_that_can_be_drafted_goes_first() -> None:
    driver = Driver("psd", max_num_batched_tokens=40, max_num_draft_batched_tokens=64)
    driver.arrive(*[request(f"r{i}", max_tokens=300) for i in range(4)])
    for _ in range(6):
        driver.step(num_accepted=1)
    driver.arrive(request("long", 200, max_tokens=100))
    before = len(ingestions(driver))
    state = driver.scheduler.state
    for _ in range(60):
        known = len(driver.works)
        if driver.drafting is not None:
            driver.draft_done()
        else:
            driver.verify_done(num_accepted=1)
        if any(work is driver.drafting for work in driver.works[known:]) and not any(driver.drafting.num_draft):
            assert not any(
                batch.phase is BatchPhase.IDLE and wants_draft(state, batch) for batch in state.batches.batches
            )
    assert len(ingestions(driver)) > before + 3
    assert "long" in drafts(driver)[-1].request_ids + drafts(driver)[-2].request_ids


def test_the_next_batchs_prompts_follow_those_that_are_verified() -> None:
    driver = Driver("psd")
    driver.arrive(request("a", 10), request("b", 12))
    assert driver.verifying is not None
    first = driver.verifying.request_ids
    assert driver.drafting is not None
    assert driver.drafting.request_ids == first
    driver.ingest_done()
    assert driver.drafting is not None
    assert set(driver.drafting.request_ids) == {"a", "b"} - set(first)
    assert driver.scheduler.state.batches.batches[driver.drafting.batch].phase is BatchPhase.IDLE
    driver.ingest_done()
    assert driver.drafting is None


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"draft_ingests_beside": False}, {}),
        ({"draft_keeps_kv": False, "num_draft_blocks": 0}, {}),
        ({}, {"max_draft_tokens": 0}),
        ({}, {"max_tokens": 1}),
        ({"draft_max_model_len": 20}, {}),
        ({"num_draft_blocks": 4}, {}),
    ],
    ids=["no time of its own", "no KV", "opted out", "one token", "too long for the draft model", "no room"],
)
def test_who_is_not_ingested(limits: dict[str, Any], fields: dict[str, Any]) -> None:
    driver = Driver("sd", **limits)
    driver.arrive(request("long", 100, **fields))
    assert driver.drafting is None
    driver.drain(num_accepted=1)
    assert not ingestions(driver)


def test_a_head_takes_in_what_the_target_has_computed() -> None:
    driver = long_prompt(draft_follows_target=True)
    assert driver.drafting is None, "nothing is computed yet"
    driver.verify_done()
    assert driver.drafting is not None
    assert (driver.drafting.num_computed, driver.drafting.num_new) == ((0,), (300,))
    driver.verify_done()
    assert driver.verifying is not None, "the target goes on"
    driver.ingest_done()
    assert driver.drafting is not None
    assert (driver.drafting.num_computed, driver.drafting.num_new) == ((300,), (300,))
    driver.drain(num_accepted=2)


def test_a_lost_context_comes_back_beside_the_target() -> None:
    """A new drafter starts empty: it takes the contexts in while the target writes on."""
    driver = long_prompt(max_num_batched_tokens=128, max_batch_size=4)
    for _ in range(8):
        driver.step(num_accepted=2)
    driver.lose_drafter()
    for _ in range(3):
        driver.verify_done()
    num_before = len(ingestions(driver))
    driver.drafter_back()
    for _ in range(20):
        if driver.verifying is not None:
            driver.verify_done(num_accepted=2)
        if driver.drafting is not None:
            driver.draft_done()
    again = ingestions(driver)[num_before:]
    assert again[0].num_computed == (0,)
    assert len(again) > 2
    assert any(driver.verifies()[-1].num_draft)
    driver.drain()


# --- what may happen meanwhile


def meanwhile() -> Driver:
    """An ingestion of "long" in flight, beside its own verification; "other" waits in the other batch."""
    driver = Driver("psd", max_num_batched_tokens=32, max_num_draft_batched_tokens=256)
    driver.arrive(request("long", 100), request("other", 20))
    assert driver.drafting is not None
    assert driver.drafting.request_ids == ("long",)
    return driver


def test_an_abort() -> None:
    driver = meanwhile()
    driver.abort("long")
    driver.arrive(request("long", 30))  # the name is used again
    driver.ingest_done()
    assert num_draft_computed(driver, "long") == 0
    freed = [pair for work in driver.works if isinstance(work, DraftWork) for pair in work.freed]
    assert freed == [("long", 0)]
    driver.drain(num_accepted=1)


def test_a_displacement() -> None:
    driver = meanwhile()
    driver.feed(RequestDisplaced("long", 100))
    incarnation = driver.scheduler.state.sequences["long"].incarnation
    driver.ingest_done()
    assert num_draft_computed(driver, "long") == 0
    assert incarnation != 0
    driver.drain(num_accepted=1)
    assert len(driver.outputs) == 2


def test_a_lost_drafter_and_a_result_that_still_comes() -> None:
    driver = meanwhile()
    late = driver.drafting
    assert late is not None
    driver.lose_drafter()
    assert num_draft_computed(driver, "long") == 0
    assert not driver.scheduler.state.sequences["long"].num_ingesting
    driver.drafter_back()
    driver.feed(WorkDone(late.work_id, DraftResult((0,) * len(late.request_ids)), driver.now_s, driver.now_s))
    assert num_draft_computed(driver, "long") == 0
    driver.drain(num_accepted=1)
    assert len(driver.outputs) == 2


def test_a_failure_is_not_repeated_before_the_targets_next_step() -> None:
    driver = meanwhile()
    driver.draft_failed()
    assert num_draft_computed(driver, "long") == 0
    assert driver.drafting is None, "else a drafter that refuses everything would be asked for ever in one moment"
    driver.verify_done()
    assert driver.drafting is not None
    driver.drain(num_accepted=1)
    assert len(driver.outputs) == 2


def test_a_preemption_of_the_target_kv() -> None:
    """Somebody older needs the blocks while the drafter takes the younger one's tokens in, which takes it long."""
    driver = Driver("psd", block_size=4, num_target_blocks=32, max_model_len=120, kv_watermark=0.0)
    driver.arrive(request("old", 60, max_draft_tokens=0))
    driver.verify_done()
    driver.arrive(request("young", 56))
    young = driver.scheduler.state.sequences["young"]
    while driver.drafting is None:
        driver.verify_done()
    assert young.num_ingesting == 56
    while not young.num_preemptions:
        assert young.num_ingesting == 56
        driver.verify_done()
    assert not young.num_ingesting
    driver.ingest_done()
    assert not young.num_draft_computed
    driver.drain()
    assert len(driver.outputs) == 2
    assert drafts(driver)[-1].incarnations != (1,)


def test_a_move_to_the_other_batch() -> None:
    class Once:
        """Moves "long" to the other batch as soon as it may."""

        def __init__(self) -> None:
            self.done = False

        def moves(self, batches: Any) -> list[Move]:
            for batch in batches:
                for seq in batch.members():
                    idle = batch.phase is BatchPhase.IDLE and batch.num_requests
                    if seq.request_id == "long" and idle and seq.num_computed_tokens and not self.done:
                        self.done = True
                        return [Move(seq, 1 - batch.index)]
            return []

    policies = load_policies({"mode": "fixed,mode=psd"})
    object.__setattr__(policies, "rebalance", Once())
    driver = Driver("psd", policies, max_num_batched_tokens=32, max_num_draft_batched_tokens=256)
    driver.arrive(request("long", 100), request("other", 20))
    work = driver.drafting
    assert work is not None
    assert work.request_ids == ("long",)
    driver.verify_done()
    assert driver.scheduler.state.sequences["long"].batch != work.batch
    driver.ingest_done()
    assert num_draft_computed(driver, "long") == sum(work.num_new)
    driver.drain(num_accepted=1)


def test_drafts_that_nobody_asked_for_are_refused() -> None:
    driver = meanwhile()
    assert driver.drafting is not None
    with pytest.raises(WorldError, match="for nothing"):
        driver.feed(WorkDone(driver.drafting.work_id, DraftResult((1,)), 0.0, 0.0))


# --- any events in any order


@st.composite
def tight_configs(draw: Any) -> SchedulerConfig:
    """Prompts take several steps of the target, and pools are short now and then."""
    config = draw(configs())
    return replace(
        config,
        num_speculative_tokens=draw(st.integers(1, 4)),
        max_num_draft_batched_tokens=draw(st.integers(2 * config.max_batch_size, 80)),
        max_model_len=64,
        draft_max_model_len=None,
        kv_watermark=0.0,
        num_target_blocks=-(-64 // config.block_size) + draw(st.sampled_from([0, 1, 2, 4, 8, 32])),
        num_draft_blocks=draw(st.integers(16, 70)),
        draft_keeps_kv=True,
        draft_ingests_beside=True,
    )


class IngestionMachine(SchedulerMachine):
    """The scheduler's state machine where the drafter ingests a lot; it counts what happens meanwhile."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        config=tight_configs(),
        names=st.fixed_dictionaries({slot: st.sampled_from(sorted(BUILTIN[slot])) for slot in SLOTS}),
        mode=st.sampled_from([Mode.SD, Mode.PSD]),
        model=st.builds(ToyModel, st.integers(0, 99), st.sampled_from([0, 60, 100]), st.booleans()),
        prompt_lens=st.lists(st.integers(10, 50), min_size=1, max_size=4),
    )
    def start(self, prompt_lens: list[int], **kwargs: Any) -> None:
        super().start(selection=None, **kwargs)
        self.ingestion: DraftWork | None = None
        for prompt_len in prompt_lens:
            self.arrive(prompt_len, 12, 0, None, reuse=False)

    @rule(
        prompt_len=st.integers(4, 50),
        max_tokens=st.integers(1, 40),
        max_draft=st.sampled_from([None, None, 0]),
        num_steps=st.integers(0, 12),
    )
    def a_long_prompt(self, prompt_len: int, max_tokens: int, max_draft: int | None, num_steps: int) -> None:
        self.arrive(prompt_len, max_tokens, 0, max_draft, reuse=False)
        for _ in range(num_steps):  # the drafter is slow
            if VerifyWork in self.in_flight:
                self.complete_verify()

    def take(self, works: list[Work]) -> None:
        super().take(works)
        for work in works:
            if isinstance(work, DraftWork):
                self.ingestion = None if any(work.num_draft) else work

    def feed(self, event: Event) -> None:
        before = [(seq, seq.incarnation) for seq in self.scheduler.state.running.values() if seq.num_ingesting]
        kind = type(event.result if isinstance(event, WorkDone) else event).__name__
        work, request_id = self.ingestion, getattr(event, "request_id", None)
        if work is not None:
            self.seen[kind] += 1
            self.seen["its own " + kind] += request_id in work.request_ids or event[0] == work.work_id
            if DraftWork not in self.in_flight:
                self.ingestion = None
        super().feed(event)
        for seq, incarnation in before:
            if kind == "VerifyResult" and seq.incarnation != incarnation:
                self.seen["preempted" if seq.request_id in self.devices.text else "ended"] += 1
            elif kind == "VerifyResult" and not seq.num_ingesting:
                self.seen["lost its draft KV"] += 1
            elif seq.num_ingesting and seq.num_uncomputed == 1:
                self.seen["decodes"] += 1


def test_whatever_happens_meanwhile() -> None:
    IngestionMachine.seen.clear()
    run_state_machine_as_test(IngestionMachine, settings=settings(settings.default, stateful_step_count=60))
    seen = IngestionMachine.seen
    kinds = ("VerifyResult", "DraftResult", "WorkFailed", "DrafterLost", "RequestArrived", "RequestAborted")
    assert all(seen[kind] for kind in (*kinds, "its own WorkFailed", "its own RequestDisplaced", "decodes")), seen


# --- the simulated world


LONG = {
    "cost": H100S,
    "workload__num_requests": 1,
    "workload__prompt_lens": {"kind": "fixed", "tokens": 120_000},
    "workload__output_lens": {"kind": "fixed", "tokens": 32},
    "acceptance": {"kind": "constant", "alpha": 0.8},
}


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_a_long_prompt_costs_speculation_nothing(mode: str) -> None:
    """TPOT of one long prompt is better than without speculation; before there were ingestions it was a multiple."""
    plain = figures("ar", **LONG)
    beside = figures(mode, devices__colocated=False, **LONG)
    after = figures(mode, devices__colocated=False, scheduler__draft_ingests_beside=False, **LONG)
    assert beside.ttft.mean == pytest.approx(plain.ttft.mean, rel=1e-3)
    assert beside.tpot.mean < plain.tpot.mean
    assert after.tpot.mean > 3 * beside.tpot.mean


def test_what_only_ingests_is_no_drafting() -> None:
    """It keeps the drafter busy, but isn't what hides behind verification."""
    run = figures("sd", devices__colocated=False, **LONG)
    assert run.overlapped_draft_share == 0.0
    assert run.mean_draft_ms < 30.0
    assert run.draft_utilisation > 0.2


def test_on_the_targets_devices_nothing_is_ingested_beside() -> None:
    assert not config("sd").scheduler_config().draft_ingests_beside
    assert config("sd", devices__colocated=False).scheduler_config().draft_ingests_beside
    assert config("psd").scheduler_config().draft_ingests_beside
    assert not config("pearl").scheduler_config().draft_ingests_beside
    assert config("sd", scheduler__draft_ingests_beside=True).scheduler_config().draft_ingests_beside


def test_pearl_refuses_it() -> None:
    from minedraft.sim.acceptance import ConstantRate
    from minedraft.sim.cost import ConstantCost

    backend = PearlBackend([], ConstantCost(1.0, draft_base_s=1.0), ConstantRate(0.5))
    backend.submit(VerifyWork(0, 0, ("a",), (0,), (0,), (0,), (9,), (0,), (True,), (0,) * 13, (1,), ()))
    with pytest.raises(ValueError, match="draft_ingests_beside"):
        backend.submit(DraftWork(1, 0, ("a",), (0,), (0,), (0,), (9,), (0,), ()))

"""Scenarios of the scheduler, one invariant or rule each; what holds under any order of events is in the machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from driver import Driver
from hypothesis import given
from hypothesis import strategies as st

from minedraft import Engine, FinishReason, Request, SchedulerConfig, WorldError, load_policies
from minedraft.batch import BatchPhase
from minedraft.work import (
    DrafterReady,
    DraftResult,
    Event,
    RequestArrived,
    VerifyResult,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
    ZeroDraft,
)


def request(name: str, prompt_len: int = 4, max_tokens: int = 20, **options: int) -> Request:
    return Request(name, prompt_len, max_tokens, **options)


def requests(count: int, **options: int) -> list[Request]:
    return [request(f"r{i}", **options) for i in range(count)]


# --- the pipeline


def test_drafting_of_one_batch_goes_on_while_the_other_is_verified() -> None:
    driver = Driver()
    driver.arrive(*requests(4))
    overlapped = 0
    for _ in range(12):
        driver.step(num_accepted=2)
        if driver.drafting is not None and any(driver.drafting.num_draft) and driver.verifying is not None:
            assert driver.drafting.batch != driver.verifying.batch
            overlapped += 1
    assert overlapped >= 9


def test_i16_the_two_batches_are_verified_in_turn() -> None:
    driver = Driver()
    driver.arrive(*requests(6, max_tokens=100))
    for _ in range(30):
        driver.step(num_accepted=1)
    order = [work.batch for work in driver.verifies()][4:]
    assert all(a != b for a, b in pairwise(order)), order


def test_i14_arrivals_keep_the_batches_within_one_of_each_other() -> None:
    driver = Driver()
    for r in requests(11, max_tokens=300):
        driver.arrive(r)
        driver.step()
        a, b = driver.sizes()
        assert abs(a - b) <= 1


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_i14_departures_leave_no_batch_empty_while_two_requests_run(keep: int) -> None:
    """PSD never decays into SD: whoever leaves, within two rounds both batches hold requests again."""
    driver = Driver()
    driver.arrive(*requests(8, max_tokens=400))
    for _ in range(6):
        driver.step()
    first = list(driver.scheduler.state.batches.batches[0].members)
    others = list(driver.scheduler.state.batches.batches[1].members)
    for name in (first + others)[: 8 - keep]:
        driver.abort(name)
    for _ in range(4):
        driver.step()
    assert min(driver.sizes()) >= 1
    assert sum(driver.sizes()) == keep


def test_i14_keep_within_bounds_the_difference_after_departures() -> None:
    policies = load_policies({"rebalance": "keep-within,difference=1"})
    driver = Driver(policies=policies)
    driver.arrive(*requests(16, max_tokens=400))
    for _ in range(6):
        driver.step()
    for name in list(driver.scheduler.state.batches.batches[0].members)[:5]:
        driver.abort(name)
    for _ in range(4):
        driver.step()
    a, b = driver.sizes()
    assert abs(a - b) <= 1


def test_a_moved_request_keeps_its_kv() -> None:
    driver = Driver()
    driver.arrive(*requests(4, max_tokens=400))
    for _ in range(6):
        driver.step()
    for name in list(driver.scheduler.state.batches.batches[0].members):
        driver.abort(name)
    computed = {r: seq.num_computed for r, seq in driver.scheduler.state.running.items()}
    for _ in range(3):
        driver.step()
    moved = {r: seq for r, seq in driver.scheduler.state.running.items() if seq.batch == 0}
    assert moved
    assert all(seq.num_computed >= computed[r] for r, seq in moved.items())
    assert all(seq.num_preemptions == 0 for seq in moved.values())


@pytest.mark.parametrize("sizes", [(4, 0), (1, 1), (1, 0)])
def test_i20_drains(sizes: tuple[int, int]) -> None:
    driver = Driver()
    driver.arrive(*requests(max(2, 2 * max(sizes)), max_tokens=30))
    for _ in range(4):
        driver.step()
    for batch, keep in zip(driver.scheduler.state.batches.batches, sizes, strict=True):
        for name in list(batch.members)[keep:]:
            driver.abort(name)
    driver.drain(num_accepted=1)
    done = [output for output in driver.outputs if output.finish_reason is FinishReason.LENGTH]
    assert len(done) == sum(sizes)
    assert all(output.num_output_tokens == 30 for output in done)


def test_one_request_alone_is_drafted_and_verified_by_turns() -> None:
    driver = Driver()
    driver.arrive(request("only", max_tokens=9))
    driver.drain(num_accepted=4)
    kinds = ["V" if isinstance(work, VerifyWork) else "D" if any(work.num_draft) else "i" for work in driver.works]
    assert "".join(kinds) == "ViDVDVDVD"[: len(kinds)]
    assert len(kinds) > 5


def test_cold_start_gives_the_prompt_to_the_free_target_first() -> None:
    """Time to first token: a prompt isn't made to wait for the drafter."""
    driver = Driver()
    driver.arrive(request("first"))
    assert isinstance(driver.works[0], VerifyWork)
    assert driver.works[0].num_draft == (0,)


def test_a_drafter_without_time_of_its_own_ingests_a_prompt_beside_drafting() -> None:
    driver = Driver("sd", draft_ingests_beside=False)
    driver.arrive(request("a", max_tokens=60))
    driver.arrive(request("b", prompt_len=9))
    driver.verify_done()
    assert driver.drafting is not None
    work = driver.drafting
    assert (work.request_ids, work.num_new, work.num_draft) == (("a", "b"), (5, 9), (4, 0))


def test_a_batch_of_prompts_stays_open_until_the_target_is_free() -> None:
    driver = Driver()
    driver.arrive(request("a"))
    driver.arrive(request("b", prompt_len=9))
    driver.ingest_done()  # of a
    driver.ingest_done()  # of b, which leaves its batch open
    assert driver.drafting is None
    driver.arrive(request("c"), request("d"))
    driver.verify_done()
    assert set(driver.verifies()[-1].request_ids) >= {"b"}
    assert len(driver.verifies()[-1].request_ids) == 2


@pytest.mark.parametrize("mode", ["ar", "sd"])
def test_one_batch_takes_new_requests_at_its_next_round(mode: str) -> None:
    driver = Driver(mode)
    driver.arrive(request("a", max_tokens=50))
    driver.arrive(request("b", max_tokens=50))
    assert driver.verifying is not None
    assert driver.verifying.request_ids == ("a",)
    driver.step()
    driver.step()
    assert set(driver.verifies()[-1].request_ids) == {"a", "b"}


# --- prompts and budgets


def test_a_long_prompt_is_computed_in_chunks_beside_verification() -> None:
    driver = Driver(max_num_batched_tokens=16, max_batch_size=4)
    driver.arrive(request("short", max_tokens=60))
    driver.step()
    driver.arrive(request("long", prompt_len=40, max_tokens=60))
    for _ in range(20):
        driver.step(num_accepted=1)
    chunks = [
        (work.num_new[i], work.is_last[i], work.num_draft[i])
        for work in driver.verifies()
        for i, name in enumerate(work.request_ids)
        if name == "long"
    ]
    first = next(i for i, (_, last, _) in enumerate(chunks) if last)
    assert sum(new for new, _, _ in chunks[: first + 1]) == 40
    assert len(chunks[: first + 1]) >= 3
    assert all(k == 0 for _, _, k in chunks[: first + 1])
    assert any(k > 0 for _, _, k in chunks[first + 1 :])


def test_prompts_get_half_of_the_budget_whatever_the_drafts_want() -> None:
    driver = Driver("sd", max_num_batched_tokens=24, max_batch_size=8, num_speculative_tokens=8)
    driver.arrive(*requests(4, max_tokens=200))
    for _ in range(4):
        driver.step()
    driver.arrive(request("prompt", prompt_len=100))
    driver.step()
    driver.step()
    work = driver.verifies()[-1]
    assert "prompt" in work.request_ids
    assert work.num_new[work.request_ids.index("prompt")] >= 12
    assert sum(work.num_draft) > 0


def test_zero_draft_causes_are_named() -> None:
    driver = Driver("sd", num_speculative_tokens=3)
    driver.arrive(request("plain", max_draft_tokens=0), request("last", max_tokens=2))
    driver.step()
    causes = driver.verifies()[-1].zero_draft
    assert causes[ZeroDraft.OPTED_OUT] == 1
    assert causes[ZeroDraft.LENGTH_LIMIT] == 1


def test_drafts_stop_at_the_draft_models_context_for_that_request_only() -> None:
    driver = Driver("sd", draft_max_model_len=20, num_speculative_tokens=4)
    driver.arrive(request("long", prompt_len=18, max_tokens=30), request("short", prompt_len=4, max_tokens=12))
    driver.drain(num_accepted=0)
    for work in driver.verifies():
        for name, k in zip(work.request_ids, work.num_draft, strict=True):
            if name == "long":
                assert k <= 1
    assert any(
        k == 4
        for work in driver.verifies()
        for name, k in zip(work.request_ids, work.num_draft, strict=True)
        if name == "short"
    )


@given(prompt_len=st.integers(1, 40), k=st.integers(0, 6), accepted=st.integers(0, 6), block_size=st.integers(1, 8))
def test_reservations_at_every_offset_of_a_block(prompt_len: int, k: int, accepted: int, block_size: int) -> None:
    """I7 at every block edge; `check_work` and `check_state` look after every event."""
    driver = Driver(num_speculative_tokens=k, block_size=block_size, max_model_len=64, num_target_blocks=256)
    driver.arrive(request("a", prompt_len, 20), request("b", prompt_len + 1, 20))
    driver.drain(accepted)


def test_the_draft_kv_is_rewound_exactly_for_every_accepted_count() -> None:
    for accepted in range(5):
        driver = Driver("sd", num_speculative_tokens=4)
        driver.arrive(request("a", prompt_len=6, max_tokens=100))
        driver.ingest_done()
        driver.verify_done()
        driver.draft_done()
        driver.verify_done(accepted)
        assert driver.drafting is not None
        # 7 committed before, 4 drafted: KV of drafts 1-3 was written, and of those the accepted are good.
        assert driver.drafting.num_computed == (7 + min(accepted, 3),)
        assert driver.drafting.num_new == (8 + accepted - (7 + min(accepted, 3)),)


# --- order and memory


def test_i15_first_come_first_served() -> None:
    driver = Driver("ar", max_batch_size=2)
    driver.arrive(*requests(7, max_tokens=3))
    driver.drain()
    assert [output.request_id for output in driver.outputs] == [f"r{i}" for i in range(7)]


def test_priority_is_lower_first() -> None:
    policies = load_policies({"admission": "priority", "mode": "fixed,mode=ar"})
    driver = Driver("ar", policies=policies, max_batch_size=1)
    driver.arrive(request("x", max_tokens=3), request("low", priority=5), request("high", priority=-1))
    driver.step()
    driver.step()
    driver.step()
    assert driver.verifying is not None
    assert driver.verifying.request_ids == ("high",)


def test_i15_a_preempted_request_goes_before_those_that_never_started() -> None:
    driver = Driver("ar", max_batch_size=3, block_size=1, max_model_len=24, num_target_blocks=26, kv_watermark=0.0)
    driver.arrive(*requests(3, prompt_len=6, max_tokens=16))
    driver.arrive(request("late", prompt_len=6, max_tokens=16))
    driver.drain()
    preempted = [output for output in driver.outputs if output.num_preemptions]
    assert preempted
    order = [output.request_id for output in driver.outputs]
    assert order.index("late") == 3
    assert all(output.num_output_tokens == 16 for output in driver.outputs)


def test_an_urgent_request_never_gives_way_to_an_older_one_that_is_less_so() -> None:
    """The one request that is safe from preemption is the first by rank, not by arrival alone."""
    policies = load_policies({"mode": "fixed,mode=ar", "admission": "priority", "preemption": "least-urgent"})
    driver = Driver(policies=policies, block_size=1, max_model_len=24, num_target_blocks=30, kv_watermark=0.0)
    driver.arrive(request("patient", prompt_len=6, max_tokens=16, priority=5))
    driver.step()
    driver.arrive(*(request(name, prompt_len=6, max_tokens=16, priority=p) for name, p in (("urgent", -5), ("mid", 0))))
    driver.drain()
    num_preemptions = {output.request_id: output.num_preemptions for output in driver.outputs}
    assert num_preemptions["urgent"] == 0
    assert num_preemptions["patient"] > 0
    assert list(num_preemptions) == ["urgent", "mid", "patient"]


@pytest.mark.parametrize("name", ["newest", "cost-aware", "least-urgent"])
def test_i19_preemptions_are_bounded_and_the_load_drains(name: str) -> None:
    policies = load_policies({"preemption": name})
    driver = Driver(policies=policies, block_size=2, max_model_len=40, num_target_blocks=30, num_draft_blocks=24)
    driver.arrive(*requests(12, prompt_len=5, max_tokens=30))
    driver.drain(num_accepted=1)
    assert sum(output.num_preemptions for output in driver.outputs) > 0
    assert max(output.num_preemptions for output in driver.outputs) <= 12


def test_speculation_never_preempts() -> None:
    """With room for the next token but not for drafts, drafts are cut and nobody loses KV."""
    driver = Driver(
        "sd", block_size=1, max_model_len=16, num_target_blocks=20, kv_watermark=0.0, num_speculative_tokens=4
    )
    driver.arrive(request("a", prompt_len=8, max_tokens=4), request("b", prompt_len=8, max_tokens=2))
    driver.drain(num_accepted=4)
    assert all(output.num_preemptions == 0 for output in driver.outputs)
    assert any(0 < sum(work.num_draft) < 6 for work in driver.verifies())


def test_draft_kv_is_dropped_from_the_latest_arrival_first_and_costs_no_text() -> None:
    driver = Driver("sd", block_size=1, num_draft_blocks=30, max_model_len=64, num_target_blocks=512)
    driver.arrive(request("old", prompt_len=10, max_tokens=40), request("new", prompt_len=10, max_tokens=40))
    driver.drain(num_accepted=3)
    assert all(output.num_preemptions == 0 for output in driver.outputs)
    assert sum(work.zero_draft[ZeroDraft.DRAFT_KV] for work in driver.verifies()) > 0
    assert [output.request_id for output in driver.outputs] == ["old", "new"]


def test_draft_kv_is_never_taken_from_an_older_request() -> None:
    driver = Driver("sd", block_size=1, num_draft_blocks=64, max_model_len=64, num_target_blocks=512)
    driver.arrive(*requests(4, prompt_len=10, max_tokens=40))
    held: dict[str, int] = {}
    for _ in range(60):
        before = dict(held)
        driver.step(num_accepted=2)
        running = driver.scheduler.state.running
        held = {name: seq.draft_capacity for name, seq in running.items()}
        lost = [name for name, size in before.items() if size and not held.get(name, size)]
        grown = [name for name in held if held[name] > before.get(name, 0)]
        for name in lost:
            at_limit = running[name].num_tokens + 2 > running[name].draft_limit
            assert at_limit or any(grower < name for grower in grown), (lost, grown)
    assert any(work.zero_draft[ZeroDraft.DRAFT_KV] for work in driver.verifies())


def test_a_prompt_that_can_never_fit_the_draft_pool_is_served_without_drafts() -> None:
    driver = Driver("sd", num_draft_blocks=2, block_size=4)
    driver.arrive(request("big", prompt_len=30, max_tokens=5))
    driver.drain()
    assert driver.outputs[0].num_output_tokens == 5
    assert all(k == 0 for work in driver.verifies() for k in work.num_draft)


def test_a_prompt_beyond_the_context_is_refused_with_the_reason() -> None:
    driver = Driver("ar", max_model_len=16)
    (output,) = driver.arrive(request("big", prompt_len=16))
    assert output.finish_reason is FinishReason.ERROR
    assert "max_model_len 16" in output.detail


# --- aborts, failures, the drafter's loss


@pytest.mark.parametrize("phase", list(BatchPhase))
def test_abort_in_every_phase(phase: BatchPhase) -> None:
    driver = Driver()
    driver.arrive(*requests(4, max_tokens=60))
    for _ in range(40):
        batch = next((b for b in driver.scheduler.state.batches.batches if b.phase is phase and b.members), None)
        if batch is not None:
            break
        if driver.verifying is not None and phase in (BatchPhase.IDLE,):
            driver.verify_done()
        else:
            driver.draft_done() if driver.drafting is not None else driver.verify_done()
    assert batch is not None
    for name in list(batch.members):
        (output,) = driver.abort(name)
        assert output.finish_reason is FinishReason.ABORT
    driver.drain()
    pool = driver.scheduler.state.target_pool
    assert pool.num_free_blocks == pool.num_blocks


def test_an_id_may_be_used_again_while_the_old_work_is_in_flight() -> None:
    driver = Driver("ar")
    driver.arrive(request("x", max_tokens=3))
    driver.abort("x")
    driver.arrive(request("x", prompt_len=7, max_tokens=5))
    driver.drain()
    assert [o.finish_reason for o in driver.outputs] == [FinishReason.ABORT, FinishReason.LENGTH]
    assert driver.outputs[1].num_output_tokens == 5


def test_a_failed_verification_is_tried_again_and_ends_in_an_error_at_the_limit() -> None:
    driver = Driver("sd", max_verify_failures=3)
    driver.arrive(*requests(2))
    driver.ingest_done()
    driver.verify_failed()
    driver.verify_done()
    driver.draft_done()
    driver.verify_failed()
    driver.draft_done()
    driver.verify_failed()
    driver.draft_done()
    driver.verify_failed()
    assert [o.finish_reason for o in driver.outputs] == [FinishReason.ERROR] * 2
    assert "3 times in a row" in driver.outputs[0].detail


def test_a_failed_draft_costs_a_round_of_drafts() -> None:
    driver = Driver("sd")
    driver.arrive(request("a"))
    driver.ingest_done()
    driver.verify_done()
    driver.draft_failed()
    assert driver.verifying is not None
    assert driver.verifying.zero_draft[ZeroDraft.DRAFT_FAILED] == 1
    driver.verify_done()
    driver.draft_done()
    assert driver.verifies()[-1].num_draft == (4,)


def test_e6_the_drafter_may_go_at_any_event_and_come_back() -> None:
    """Lost before event n, for every n: all requests finish; once it is back, drafting resumes."""
    for lost_at in range(24):
        driver = Driver()
        driver.arrive(*requests(4, max_tokens=25))
        for _ in range(lost_at):
            if driver.drafting is not None:
                driver.draft_done()
            elif driver.verifying is not None:
                driver.verify_done(1)
        if not driver.scheduler.num_unfinished:
            break
        driver.lose_drafter()
        for _ in range(3):
            if driver.verifying is not None:
                driver.verify_done(1)
        before = len(driver.verifies())
        driver.drafter_back()
        driver.drain(num_accepted=1)
        assert all(output.num_output_tokens == 25 for output in driver.outputs)
        late = driver.verifies()[before + 2 :]
        assert not late or any(any(work.num_draft) for work in late) or len(late) < 4


# --- under pressure


def test_a_batch_whose_members_all_give_way_leaves_the_incoming_a_round_of_their_own() -> None:
    """Every member of a DRAFTED batch is preempted while older requests wait to join it."""
    policies = load_policies({"admission": "priority", "preemption": "newest", "assignment": "least-tokens"})
    driver = Driver(policies=policies, block_size=1, max_model_len=18, num_target_blocks=30, kv_watermark=0.0)
    for i in range(24):
        driver.arrive(request(f"r{i}", prompt_len=1 + (7 * i) % 9, max_tokens=9, priority=-i))
        if i % 3 == 2:
            driver.step(num_accepted=i % 3)
    driver.drain(num_accepted=1)
    assert sum(output.num_preemptions for output in driver.outputs) > 0


def test_the_drafter_is_never_sent_beyond_its_context_after_a_preemption() -> None:
    driver = Driver("sd", draft_max_model_len=12, block_size=2, max_model_len=60, num_target_blocks=40)
    driver.arrive(*requests(3, prompt_len=8, max_tokens=40))
    driver.drain(num_accepted=1)  # `check_work` looks at every draft work
    assert sum(output.num_preemptions for output in driver.outputs) > 0


def test_who_joins_during_a_failing_verification_does_not_end_with_it() -> None:
    driver = Driver("ar", max_verify_failures=2)
    driver.arrive(request("unlucky"))
    driver.verify_failed()
    driver.arrive(request("newcomer"))
    (output,) = driver.verify_failed()
    assert output.request_id == "unlucky"
    driver.drain()
    assert driver.outputs[-1].request_id == "newcomer"
    assert driver.outputs[-1].finish_reason is FinishReason.LENGTH


def test_after_a_failed_draft_no_more_kv_is_claimed_than_the_work_kept() -> None:
    driver = Driver("sd")
    driver.arrive(request("a", prompt_len=6, max_tokens=60))
    driver.ingest_done()
    driver.verify_done()
    driver.draft_done()
    driver.verify_failed()
    assert driver.drafting is not None
    kept = driver.drafting.num_computed
    driver.draft_failed()
    driver.verify_done()
    assert driver.drafting is not None
    assert driver.drafting.num_computed <= kept


def test_a_drafter_that_is_replaced_unseen_is_taken_for_empty() -> None:
    driver = Driver("sd")
    driver.arrive(request("a", prompt_len=6, max_tokens=60))
    driver.verify_done()
    driver.draft_done()
    driver.drafter_back()
    driver.verify_done()
    assert driver.drafting is not None
    assert driver.drafting.num_computed == (0,)


def test_a_full_batch_is_drafted_at_the_smallest_legal_draft_budget() -> None:
    driver = Driver("sd", max_batch_size=4, max_num_draft_batched_tokens=8)
    driver.arrive(*requests(4, prompt_len=20, max_tokens=40))
    driver.drain(num_accepted=4)
    assert len(driver.verifies()) < 60
    assert sum(sum(work.num_draft) for work in driver.verifies()) > 50


def test_what_the_drafter_never_saw_it_is_not_told_to_forget() -> None:
    policies = load_policies({"draft_length": "fixed,k=0"})
    driver = Driver(policies=policies, draft_ingests_beside=False)
    for i in range(200):
        driver.arrive(request(f"r{i}", max_tokens=2))
        driver.step()
    driver.drain()
    assert not driver.scheduler.state.draft_freed
    driver = Driver("sd")
    driver.arrive(*requests(3, max_tokens=9))
    driver.drain()
    assert [key[0] for key in driver.scheduler.state.draft_freed] == ["r0", "r1", "r2"]
    driver.arrive(request("x"))
    driver.lose_drafter()
    assert not driver.scheduler.state.draft_freed


def test_a_short_draft_pool_holds_nobody_back_and_does_not_thrash() -> None:
    """Contexts are ingested about once, not over and over, and admission waits for the target's pool only."""
    driver = Driver("sd", block_size=4, num_draft_blocks=20, max_batch_size=8)
    driver.arrive(*requests(8, prompt_len=20, max_tokens=60))
    driver.step()
    assert driver.sizes() == (8,)
    driver.drain(num_accepted=2)
    bulk = sum(new for work in driver.works if not isinstance(work, VerifyWork) for new in work.num_new if new > 2)
    assert bulk <= 3 * 8 * 20
    assert sum(sum(work.num_draft) for work in driver.verifies()) > 0


def test_a_batch_for_which_the_policy_says_0_does_not_wait_for_the_drafter() -> None:
    class OnlyFirstBatch:
        def num_draft_tokens(self, seq: object, batch: object, load: object) -> int:
            return 4 if batch.index == 0 else 0  # type: ignore[attr-defined]

    driver = Driver(policies=replace(load_policies(), draft_length=OnlyFirstBatch()))
    driver.arrive(*requests(4, max_tokens=40))
    for _ in range(6):
        driver.verify_done() if driver.verifying is not None else driver.draft_done()
    assert driver.drafting is not None
    assert driver.drafting.batch == 0
    for _ in range(4):  # the drafter takes its time; the other batch goes on
        assert driver.verifying is not None
        assert driver.verifying.batch == 1
        driver.verify_done()


def test_short_token_budgets_take_turns() -> None:
    driver = Driver(
        "sd", max_batch_size=8, max_num_batched_tokens=10, max_num_draft_batched_tokens=64, num_speculative_tokens=4
    )
    driver.arrive(*requests(8, max_tokens=400))
    for _ in range(200):
        driver.step(num_accepted=4)
    written = [seq.num_tokens for seq in driver.scheduler.state.running.values()]
    assert max(written) - min(written) <= 0.2 * max(written)


def test_three_batches_are_served_in_the_order_in_which_they_became_ready() -> None:
    driver = Driver(num_batches=3, max_batch_size=2)
    driver.arrive(*requests(6, max_tokens=200))
    for _ in range(30):
        driver.step(num_accepted=1)
    order = [work.batch for work in driver.verifies()][9:]
    assert all(len(set(order[i : i + 3])) == 3 for i in range(len(order) - 2)), order


def test_admission_leaves_the_watermark_free_while_anything_runs() -> None:
    driver = Driver("ar", block_size=4, num_target_blocks=128, kv_watermark=0.1, max_batch_size=64)
    driver.arrive(*requests(40, prompt_len=16, max_tokens=200))
    assert driver.scheduler.state.target_pool.num_free_blocks >= 12


def test_a_dead_drafters_late_result_is_taken_once() -> None:
    driver = Driver("sd")
    driver.arrive(request("a", max_tokens=60))
    driver.verify_done()
    assert driver.drafting is not None
    late = WorkDone(driver.drafting.work_id, DraftResult((4,)), 0.0, 0.0)
    driver.lose_drafter()
    driver.feed(late)
    with pytest.raises(WorldError, match="not in flight"):
        driver.feed(late)


def test_time_that_goes_back_is_the_worlds_fault() -> None:
    driver = Driver("ar")
    driver.arrive(request("a"))
    with pytest.raises(WorldError, match="time went back"):
        driver.scheduler.schedule(driver.now_s - 1.0)


def test_a_world_that_ends_too_soon_is_told_so() -> None:
    class Dry:
        def __init__(self) -> None:
            self.events = [RequestArrived(request("a"))]

        def now(self) -> float:
            return 0.0

        def submit(self, work: Work) -> None:
            pass

        def next_event(self) -> Event | None:
            return self.events.pop() if self.events else None

        def ready(self) -> bool:
            return False

    with pytest.raises(WorldError, match="1 requests unfinished"):
        Engine(Driver("ar").scheduler, Dry()).run()


# --- the world's contract


def test_a_world_that_breaks_the_contract_is_told_so() -> None:
    driver = Driver("sd")
    driver.arrive(request("a", max_tokens=50))
    update = driver.scheduler.update
    work_id = driver.works[0].work_id
    with pytest.raises(WorldError, match="already alive"):
        update(RequestArrived(request("a")), 9.0)
    with pytest.raises(WorldError, match="not in flight"):
        update(WorkDone(99, VerifyResult((0,), (1,)), 0, 0), 9.0)
    with pytest.raises(WorldError, match="not in flight"):
        update(WorkFailed(99, ""), 9.0)
    with pytest.raises(WorldError, match="is a verification"):
        update(WorkDone(work_id, DraftResult((0,)), 0, 0), 9.0)
    with pytest.raises(WorldError, match="entries"):
        update(WorkDone(work_id, VerifyResult((0, 0), (1, 1)), 0, 0), 9.0)
    for accepted, committed in ((1, 2), (-1, 0), (0, 0), (0, 2)):
        with pytest.raises(WorldError, match="accepted"):
            update(WorkDone(work_id, VerifyResult((accepted,), (committed,)), 0, 0), 9.0)
    with pytest.raises(WorldError, match="num_draft_blocks"):
        Driver("ar").scheduler.update(DrafterReady(), 0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_batches": 0}, "num_batches is 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"kv_watermark": 1.0}, "kv_watermark is 1.0"),
        ({"max_batch_size": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens is 32"),
        ({"num_target_blocks": 4, "block_size": 16, "max_model_len": 100}, "num_target_blocks is 4"),
        ({"max_num_draft_batched_tokens": 8}, "max_num_draft_batched_tokens is 8"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_len": 0}, "prompt_len is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_draft_tokens": -1}, "max_draft_tokens is -1"),
    ],
)
def test_requests_that_make_no_sense_are_refused_by_name(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**{"request_id": "x", "prompt_len": 1, "max_tokens": 1, **fields})  # type: ignore[arg-type]

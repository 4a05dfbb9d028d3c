"""A Hypothesis state machine over the scheduler: any order of events, drawn limits and policies, I1–I20 and E1.

The world behind it (`toy_world`) has real tokens, so a wrong rewind or a reused draft fails there, and every request
that ends must have the target's own text.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check_state, check_work, is_ingestion
from toy_world import ToyDevices, ToyModel

from minedraft.batch import BatchPhase
from minedraft.drafting import wants_draft
from minedraft.policy import BUILTIN, Draft, LoadView, Mode, load_policies
from minedraft.request import FinishReason, Request, RequestOutput
from minedraft.scheduler import Scheduler, SchedulerConfig
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    RequestDisplaced,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
)

SLOTS = ("admission", "assignment", "rebalance", "draft_length", "preemption")


class SomeDrafts:
    """A selection policy that keeps a legal but whimsical number of each request's drafts."""

    keeps_all = False

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def select(self, drafts: Sequence[Draft], capacity: int) -> Sequence[int]:
        kept = []
        for draft in drafts:
            assert len(draft.probs) == draft.num_drafted
            whim = zlib.crc32(repr((self.seed, draft.seq.request_id, draft.seq.num_tokens)).encode())
            count = min(capacity, whim % (draft.num_drafted + 1))
            capacity -= count
            kept.append(count)
        return kept


class SwitchableMode:
    """A mode policy that the machine turns at will."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def choose_mode(self, load: LoadView) -> Mode:
        return self.mode


@st.composite
def configs(draw: Any) -> SchedulerConfig:
    max_batch_size = draw(st.integers(1, 4))
    block_size = draw(st.integers(1, 4))
    num_target_blocks = draw(st.integers(8, 24))
    model_len = draw(st.integers(6, min(32, num_target_blocks * block_size)))
    return SchedulerConfig(
        num_batches=draw(st.integers(2, 3)),
        max_batch_size=max_batch_size,
        max_num_seqs=draw(st.none() | st.integers(1, 8)),
        num_speculative_tokens=draw(st.integers(0, 5)),
        max_num_batched_tokens=draw(st.integers(max_batch_size, max_batch_size + 12)),
        max_num_draft_batched_tokens=draw(st.integers(2 * max_batch_size, 2 * max_batch_size + 12)),
        draft_capacity=draw(st.none() | st.integers(0, 10)),
        max_model_len=model_len,
        draft_max_model_len=draw(st.none() | st.integers(2, model_len)),
        block_size=block_size,
        num_target_blocks=num_target_blocks,
        num_draft_blocks=draw(st.integers(1, 24)),
        draft_keeps_kv=draw(st.sampled_from([True, True, True, False])),
        draft_follows_target=draw(st.booleans()),
        draft_ingests_beside=draw(st.sampled_from([True, True, False])),
        kv_watermark=draw(st.sampled_from([0.0, 0.1])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Events in any order; the scheduler answers each with works that the toy world checks."""

    @initialize(
        config=configs(),
        names=st.fixed_dictionaries({slot: st.sampled_from(sorted(BUILTIN[slot])) for slot in SLOTS}),
        mode=st.sampled_from(list(Mode)),
        model=st.builds(ToyModel, st.integers(0, 99), st.sampled_from([0, 60, 100]), st.booleans()),
        selection=st.none() | st.builds(SomeDrafts, st.integers(0, 99)),
    )
    def start(
        self,
        config: SchedulerConfig,
        names: dict[str, str],
        mode: Mode,
        model: ToyModel,
        selection: SomeDrafts | None,
    ) -> None:
        self.mode = SwitchableMode(mode)
        policies = replace(load_policies(names), mode=self.mode)
        if selection is not None:
            policies = replace(policies, selection=selection)
        self.scheduler = Scheduler(config, policies)
        self.devices = ToyDevices(model, config.model_len, gives_probs=selection is not None)
        self.now_s = 0.0
        self.num_ids = 0
        self.num_displaced = 0
        self.waits: dict[tuple[int, int], int] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.everybody: dict[str, Request] = {}
        self.in_flight: dict[type, tuple[Work, Any]] = {}
        self.late: list[tuple[Work, Any]] = []
        self.drafter_up = True
        self.verify_failures = 0

    # ------------------------------------------------------------------ plumbing

    def feed(self, event: Event) -> None:
        self.now_s += 1.0
        for output in self.tell(event):
            self.check_output(output)
        self.drive()
        for request_id, seq in self.scheduler.state.sequences.items():  # I5: the core counts what was written
            assert seq.num_tokens == len(self.devices.text[request_id])

    def tell(self, event: Event) -> list[RequestOutput]:
        return self.scheduler.update(event, self.now_s)

    def drive(self) -> None:
        self.take(self.scheduler.schedule(self.now_s))
        check_state(self.scheduler)
        self.take(self.scheduler.schedule(self.now_s))  # asking twice is allowed at any time
        check_state(self.scheduler)

    def take(self, works: list[Work]) -> None:
        for work in works:
            note(f"  -> {work}")
            kind = type(work)
            assert kind not in self.in_flight, "two works in flight for one device group"
            check_work(self.scheduler, work)
            drafting = self.in_flight[DraftWork][0] if DraftWork in self.in_flight else None
            if isinstance(work, VerifyWork) and drafting and not is_ingestion(self.scheduler, drafting):
                # I3 across the two groups
                pairs = set(zip(drafting.request_ids, drafting.incarnations, strict=True))
                assert not pairs & set(zip(work.request_ids, work.incarnations, strict=True))
            self.in_flight[kind] = (work, self.devices.execute(work))
            if isinstance(work, VerifyWork):
                self.count_waits(work)
            elif not is_ingestion(self.scheduler, work):  # who is drafted isn't waiting any more
                self.waits = {key: count for key, count in self.waits.items() if key[1] != work.batch}

    def count_waits(self, work: VerifyWork) -> None:
        """I16: who is ready for the target is served within a round of the others.

        Counted per stay of a request in a batch: one that is moved may wait a round more, and a batch whose members
        all left, and others came, waits anew.
        """
        batches = self.scheduler.state.batches.batches
        waits: dict[tuple[int, int], int] = {}
        for batch in batches:
            ready = batch.phase is BatchPhase.DRAFTED or (
                batch.phase is BatchPhase.IDLE and not wants_draft(self.scheduler.state, batch)
            )
            for seq in batch.members.values() if ready else ():
                key = (seq.incarnation, batch.index)
                waits[key] = self.waits.get(key, 0) + 1
                assert waits[key] <= len(batches), f"{seq.request_id} in batch {batch.index} starves"
        self.waits = waits

    def check_output(self, output: RequestOutput) -> None:
        request = self.everybody[output.request_id]
        self.ended[output.request_id] = output
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            text = self.devices.finished.pop(output.request_id)
            assert len(text) == output.num_output_tokens
            assert text == self.devices.model.plain_decode(request, self.devices.max_model_len)  # E1
        self.devices.forget(output.request_id)

    # --------------------------------------------------------------------- rules

    @rule(
        prompt_len=st.integers(1, 14),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        max_draft=st.none() | st.integers(0, 3),
        reuse=st.booleans(),
    )
    def arrive(self, prompt_len: int, max_tokens: int, priority: int, max_draft: int | None, reuse: bool) -> None:
        free = [request_id for request_id in self.ended if request_id not in self.devices.text]
        if reuse and free:
            request_id = free[-1]
        else:
            self.num_ids += 1
            request_id = f"r{self.num_ids}"
        request = Request(request_id, prompt_len, max_tokens, self.now_s, priority, max_draft)
        self.everybody[request_id] = request
        self.devices.arrive(request)
        self.feed(RequestArrived(request))

    @precondition(lambda self: self.devices.text)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.devices.text)))
        self.feed(RequestAborted(request_id))
        assert self.ended[request_id].finish_reason is FinishReason.ABORT

    @rule()
    def abort_unknown(self) -> None:
        self.feed(RequestAborted("nobody"))

    @precondition(lambda self: self.devices.text)
    @rule(data=st.data())
    def displace(self, data: st.DataObject) -> None:
        """The world drops a request's KV by itself; what a verification in flight says of it is void."""
        request_id = data.draw(st.sampled_from(sorted(self.devices.text)))
        self.devices.displace(request_id)
        self.num_displaced += 1
        self.feed(RequestDisplaced(request_id, len(self.devices.text[request_id])))

    @precondition(lambda self: DraftWork in self.in_flight)
    @rule()
    def complete_draft(self) -> None:
        work, result = self.in_flight.pop(DraftWork)
        self.feed(WorkDone(work.work_id, result, self.now_s, self.now_s))

    @precondition(lambda self: VerifyWork in self.in_flight)
    @rule()
    def complete_verify(self) -> None:
        work, result = self.in_flight.pop(VerifyWork)
        self.devices.deliver(work)
        self.verify_failures = 0
        self.feed(WorkDone(work.work_id, result, self.now_s, self.now_s))

    @precondition(lambda self: DraftWork in self.in_flight)
    @rule(half_done=st.booleans())
    def fail_draft(self, half_done: bool) -> None:
        work, _ = self.in_flight.pop(DraftWork)
        if half_done:
            self.devices.undo_ingestion(work)
        self.feed(WorkFailed(work.work_id, "drawn"))

    @precondition(lambda self: VerifyWork in self.in_flight)
    @rule()
    def fail_verify(self) -> None:
        work, _ = self.in_flight.pop(VerifyWork)
        self.devices.drop(work)
        self.feed(WorkFailed(work.work_id, "drawn"))

    @precondition(lambda self: self.drafter_up)
    @rule()
    def lose_drafter(self) -> None:
        self.drafter_up = False
        if DraftWork in self.in_flight:
            self.late.append(self.in_flight.pop(DraftWork))
        self.devices.lose_drafter()
        self.feed(DrafterLost("drawn"))

    @precondition(lambda self: not self.drafter_up)
    @rule()
    def drafter_back(self) -> None:
        self.drafter_up = True
        self.feed(DrafterReady())

    @precondition(lambda self: self.late)
    @rule()
    def late_result(self) -> None:
        """A result that the dead drafter still sent changes nothing (I4)."""
        work, result = self.late.pop()
        self.feed(WorkDone(work.work_id, result, self.now_s, self.now_s))

    @rule(mode=st.sampled_from(list(Mode)))
    def switch_mode(self, mode: Mode) -> None:
        self.mode.mode = mode
        self.now_s += 1.0
        self.drive()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "scheduler"):
            check_state(self.scheduler)

    def teardown(self) -> None:
        """I18, I19, I20: whatever happened, what is left drains when works complete."""
        if not hasattr(self, "scheduler"):
            return
        work_left = sum(r.prompt_len + r.max_tokens for r in self.everybody.values())
        num_alive = len(self.devices.text)
        for _ in range(20 + 8 * work_left * (1 + num_alive)):
            if VerifyWork in self.in_flight:
                self.complete_verify()
            elif DraftWork in self.in_flight:
                self.complete_draft()
            else:
                break
        assert not self.devices.text, "a finite load did not drain"
        assert set(self.ended) == set(self.everybody)
        bound = 4 * len(self.everybody) + 4 + self.num_displaced
        assert all(output.num_preemptions <= bound for output in self.ended.values())  # I19
        state = self.scheduler.state
        assert state.target_pool.num_free_blocks == state.target_pool.num_blocks
        assert state.draft_pool is not None
        assert state.draft_pool.num_free_blocks == state.draft_pool.num_blocks
        assert not state.batches.batches[0].num_tokens


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(settings.default, stateful_step_count=60)

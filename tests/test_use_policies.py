"""Policies that give way to others while requests run, at any moment and whatever they were asked when they failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from driver import Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from invariants import check_state
from test_scheduler_machine import SchedulerMachine, SomeDrafts, SwitchableMode, configs
from test_steady import TwinMachine, eager, long_run, roomy_configs
from toy_world import ToyModel

from minedraft import Request, load_policies
from minedraft.policies.draft_length import Fixed
from minedraft.policies.selection import All
from minedraft.policy import BUILTIN, SLOTS, Mode, PolicyError
from minedraft.request import RequestOutput
from minedraft.steady import DRAFTED, DRAFTING
from minedraft.work import DraftResult, Event, WorkDone

OTHERS = [slot for slot in SLOTS if slot not in ("selection", "mode")]


def _raise(error: Exception) -> Any:
    raise error


FAULTS: dict[str, Callable[[], Any]] = {
    "an answer of the wrong type": object,
    "an exception": lambda: _raise(RuntimeError("boom")),
    "the core's own exception": lambda: _raise(PolicyError("not I")),
}


class Spoiled:
    """A policy that fails from some question on, each time that the core asks it.

    Attributes:
        is_live: whether it is the core that asks, and no test that looks at it.
        num_failures: how often it has.
    """

    is_live: ClassVar[bool] = False

    def __init__(self, policy: Any, patience: int, fault: str) -> None:
        self.num_failures = 0
        self._policy = policy
        self._patience = patience
        self._fault = FAULTS[fault]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        if not callable(found):
            return found

        def answer(*args: Any) -> Any:
            if not Spoiled.is_live:
                return found(*args)
            self._patience -= 1
            if self._patience >= 0:
                return found(*args)
            self.num_failures += 1
            return self._fault()

        return answer


class ReplacingMachine(SchedulerMachine):
    """Any events, policies that fail in the middle, and others at any moment; nobody's text changes, nobody is lost."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        config=configs() | roomy_configs(),
        mode=st.sampled_from([Mode.SD, Mode.PSD]),
        model=st.builds(ToyModel, st.integers(0, 99), st.sampled_from([0, 60, 100]), st.booleans()),
        selection=st.none() | st.builds(SomeDrafts, st.integers(0, 99)),
    )
    def start(self, **kwargs: Any) -> None:
        super().start(names={}, **kwargs)
        self.num_failures = 0
        eager(self.scheduler)

    def replace(self, slot: str, policy: Any) -> None:
        self.scheduler.use_policies(replace(self.scheduler.policies, **{slot: policy}))

    def fresh(self, slot: str) -> Any:
        return SwitchableMode(self.mode.mode) if slot == "mode" else getattr(load_policies(), slot)

    def take_out(self, error: PolicyError) -> None:
        """The policy that has failed: the one that is in force, and no other is accused."""
        assert error.slot in SLOTS, str(error)
        assert getattr(self.scheduler.policies, error.slot).num_failures == 1, str(error)
        self.num_failures += 1
        self.seen[error.slot] += 1
        policy = self.fresh(error.slot)
        if error.slot == "mode":
            self.mode = policy
        self.replace(error.slot, policy)

    def tell(self, event: Event) -> list[RequestOutput]:
        return self.until_it_works(lambda: super(ReplacingMachine, self).tell(event))

    def drive(self) -> None:
        is_late = False
        while True:
            num_failures = self.num_failures
            works = self.until_it_works(lambda: self.scheduler.schedule(self.now_s))
            self.seen["late"] += is_late and self.num_failures > num_failures
            if not works:
                break
            is_late = True  # a policy that failed behind these decisions is known by the next call
            self.take(works)
        check_state(self.scheduler)

    def until_it_works(self, call: Callable[[], Any]) -> Any:
        while True:
            Spoiled.is_live = True
            try:
                return call()
            except PolicyError as error:
                self.take_out(error)
            finally:
                Spoiled.is_live = False

    @rule(
        slot=st.sampled_from(SLOTS),
        patience=st.sampled_from([0, 0, 1, 3, 10, 40]),
        fault=st.sampled_from(sorted(FAULTS)),
    )
    def spoil(self, slot: str, patience: int, fault: str) -> None:
        policy = getattr(self.scheduler.policies, slot)
        if not isinstance(policy, Spoiled):
            self.replace(slot, Spoiled(policy, patience, fault))

    @rule(slot_and_name=st.sampled_from([(slot, name) for slot in OTHERS for name in sorted(BUILTIN[slot])]))
    def use_another(self, slot_and_name: tuple[str, str]) -> None:
        slot, name = slot_and_name
        self.replace(slot, getattr(load_policies({slot: name}), slot))
        self.now_s += 1.0
        self.drive()

    @precondition(lambda self: self.num_ids > 12)  # no round is steady after it
    @rule(name=st.sampled_from(["tetris", "tetris-unbiased"]))
    def use_tetris(self, name: str) -> None:
        self.use_another(("selection", name))

    go_on = TwinMachine.go_on


def test_whatever_fails_and_whenever_others_come() -> None:
    ReplacingMachine.seen.clear()
    run_state_machine_as_test(ReplacingMachine, settings=settings(settings.default, stateful_step_count=60))
    seen = ReplacingMachine.seen
    assert len(set(SLOTS) & set(seen)) > 4, seen
    assert seen["late"], seen


def test_a_batch_keeps_its_turn_when_a_policy_fails_at_its_verification() -> None:
    """I16: somebody has to give way for the third token of batch 0, and the policy that chooses whom fails."""
    limits = {"num_batches": 3, "max_batch_size": 2, "num_speculative_tokens": 0, "max_model_len": 6}
    driver = Driver("psd", **limits, block_size=1, num_target_blocks=8, num_draft_blocks=1)
    good = driver.scheduler.policies
    driver.arrive(*[Request(f"r{number}", 1, 8) for number in range(4)])
    spoiled = Spoiled(good.preemption, 0, "an exception")
    driver.scheduler.use_policies(replace(good, preemption=spoiled))
    Spoiled.is_live = True
    try:
        while not spoiled.num_failures:
            with suppress(PolicyError):
                driver.verify_done()
    finally:
        Spoiled.is_live = False
    driver.scheduler.use_policies(good)
    driver.feed()
    while driver.verifying is not None:
        driver.verify_done()
    assert driver.scheduler.num_unfinished == 0
    order = [work.batch for work in driver.verifies()]
    assert order[:8] == [0, 1, 2, 0, 1, 2, 0, 1], "until a batch is empty, each is verified in turn"


@pytest.mark.parametrize("answer", [None, 0, 1, "yes"])
def test_a_selection_s_keeps_all_need_not_be_a_bool(answer: object) -> None:
    """Where the core is compiled its own flags must be."""
    selection = All()
    selection.keeps_all = answer  # type: ignore[assignment]
    driver = Driver("psd", replace(load_policies({"mode": "fixed,mode=psd"}), selection=selection))
    state = driver.scheduler.state
    assert (state.keeps_all_drafts, state.has_steady_rounds) == (bool(answer), bool(answer))
    assert type(state.keeps_all_drafts) is type(state.has_steady_rounds) is bool
    driver.arrive(Request("r", 5, 20))
    driver.drain(num_accepted=1)


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_others_may_come_at_every_stage_of_a_steady_round(mode: str) -> None:
    specs = {"mode": f"fixed,mode={mode}"}
    driver = Driver(mode, load_policies(specs))
    long_run(driver)
    state = driver.scheduler.state
    seen: Counter[int] = Counter()
    number = 0
    while driver.scheduler.num_unfinished:
        for complete, kind in ((driver.draft_done, "drafting"), (driver.verify_done, "verifying")):
            number += 1
            if getattr(driver, kind) is not None:
                complete(1) if kind == "verifying" else complete()
            if number % 7 == 0:
                seen.update([batch.columns.stage for batch in state.batches.batches if batch.columns.seqs])
                driver.scheduler.use_policies(load_policies(specs))
                assert not any(batch.columns.seqs for batch in state.batches.batches)
                check_state(driver.scheduler)
    assert seen[DRAFTING] > 5, seen
    assert seen[DRAFTED] > 5, seen
    assert [output.num_output_tokens for output in driver.outputs] == [200] * 6


def test_a_failure_behind_what_was_decided_is_forgotten_with_its_policy() -> None:
    """Else the next call would raise it, and blame the policy that has come."""
    driver = Driver("psd")
    driver.arrive(*[Request(f"r{number}", 5, 40) for number in range(4)])
    for _ in range(5):
        driver.step(num_accepted=1)
    if driver.verifying is not None:
        driver.verify_done()
    work, good = driver.drafting, driver.scheduler.policies
    assert work is not None
    assert driver.verifying is None
    driver.scheduler.use_policies(replace(good, draft_length=(spoiled := Spoiled(Fixed(), 1, "an exception"))))
    Spoiled.is_live = True
    try:
        done = WorkDone(work.work_id, DraftResult(work.num_draft), driver.now_s, driver.now_s)
        driver.feed(done, check=False)
    finally:
        Spoiled.is_live = False
    assert spoiled.num_failures == 1
    assert driver.verifying is not None, "nothing was decided before it failed"
    driver.drafting = None
    driver.scheduler.use_policies(good)
    driver.feed()
    driver.drain(num_accepted=1)

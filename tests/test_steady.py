"""Steady rounds change what a decision costs, never the decision: a core with columns beside one without."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from driver import Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from test_scheduler_machine import SLOTS, SchedulerMachine, configs
from toy_world import ToyModel

from minedraft import Request, Scheduler, SchedulerConfig, load_policies
from minedraft.batch import BatchView
from minedraft.policies.draft_length import Fixed
from minedraft.policy import BUILTIN, LoadView, Mode, PolicyError
from minedraft.sequence import SequenceState, SequenceView
from minedraft.steady import LAST_ROUNDS, LEAST_MEMBERS
from minedraft.work import DraftWork, Event, VerifyResult, VerifyWork, Work, WorkDone

FIELDS = tuple(
    [
        name
        for name, found in vars(SequenceState).items()
        if inspect.isdatadescriptor(found) and name not in ("columns", "view", "request", "probs")
    ]
)
ALIGNED = ("request_ids", "incarnations", "rounds", "num_computed", "num_new", "num_draft", "is_last")


def without_columns(scheduler: Scheduler) -> Scheduler:
    scheduler.state.has_steady_rounds = False
    scheduler.state.asks_once_per_batch = False  # the draft-length policy is asked about each request
    return scheduler


def eager(scheduler: Scheduler) -> Scheduler:
    """Columns for everybody, even where they don't pay."""
    for batch in scheduler.state.batches.batches:
        batch.columns.least_members = 1
        batch.columns.least_rounds = LAST_ROUNDS
    return scheduler


def rows(work: Work) -> list[tuple[Any, ...]]:
    """The entries of a work, whatever their order."""
    columns = [getattr(work, name) for name in ALIGNED if hasattr(work, name)]
    return sorted(zip(*columns, strict=True))


def same_work(work: Work, other: Work) -> bool:
    if type(work) is not type(other) or rows(work) != rows(other):
        return False
    rest = [{**each._asdict(), **dict.fromkeys(ALIGNED), "freed": sorted(each.freed)} for each in (work, other)]
    return rest[0] == rest[1]


def reordered(event: Event, work: Work, other: Work) -> Event:
    """The result of `work` for a world that was given `other`, the same in another order."""
    if not isinstance(event, WorkDone) or work.request_ids == other.request_ids:
        return event
    order = [work.request_ids.index(request_id) for request_id in other.request_ids]
    columns = [None if column is None else tuple([column[i] for i in order]) for column in event.result]
    return event._replace(result=type(event.result)(*columns))


@st.composite
def roomy_configs(draw: Any) -> SchedulerConfig:
    """Limits under which steady rounds are common, and are cut short now and then."""
    return replace(
        draw(configs()),
        num_speculative_tokens=draw(st.integers(1, 4)),
        draft_capacity=None,
        max_num_batched_tokens=draw(st.integers(16, 40)),
        max_model_len=64,
        num_target_blocks=draw(st.integers(64, 120)),
        num_draft_blocks=draw(st.integers(20, 120)),
    )


class TwinMachine(SchedulerMachine):
    """Any events, told to both cores; works and every field of every sequence must be the same."""

    @initialize(
        config=roomy_configs(),
        names=st.fixed_dictionaries({slot: st.sampled_from(sorted(BUILTIN[slot])) for slot in SLOTS}),
        mode=st.sampled_from([Mode.SD, Mode.PSD]),
        model=st.builds(ToyModel, st.integers(0, 99), st.sampled_from([0, 60, 100]), st.booleans()),
    )
    def start(self, **kwargs: Any) -> None:
        super().start(selection=None, **kwargs)
        eager(self.scheduler)
        self.twin = without_columns(Scheduler(self.scheduler.config, self.scheduler.policies))
        assert self.scheduler.state.has_steady_rounds
        self.pairs: dict[int, tuple[Work, Work]] = {}

    @rule(
        num_requests=st.integers(1, 6),
        prompt_len=st.integers(1, 6),
        max_tokens=st.integers(8, 40),
        rounds=st.integers(1, 12),
    )
    def go_on(self, num_requests: int, prompt_len: int, max_tokens: int, rounds: int) -> None:
        """Requests that live long enough for rounds to become steady."""
        for _ in range(num_requests):
            self.arrive(prompt_len, max_tokens, 0, None, reuse=False)
        for _ in range(rounds):
            for complete, kind in ((self.complete_draft, DraftWork), (self.complete_verify, VerifyWork)):
                if kind in self.in_flight:
                    complete()

    def feed(self, event: Event) -> None:
        work_id = getattr(event, "work_id", None)
        twins = event if work_id is None else reordered(event, *self.pairs[work_id])
        outputs = self.twin.update(twins, self.now_s + 1.0)
        super().feed(event)
        assert all(self.ended[output.request_id] == output for output in outputs)

    def take(self, works: list[Work]) -> None:
        others = self.twin.schedule(self.now_s)
        assert len(works) == len(others)
        for work, other in zip(works, others, strict=True):
            assert same_work(work, other), (work, other)
            self.pairs[work.work_id] = (work, other)
        super().take(works)

    @invariant()
    def twins(self) -> None:
        if not hasattr(self, "twin"):
            return
        state, other = self.scheduler.state, self.twin.state
        assert not any(batch.columns.seqs for batch in other.batches.batches)
        state.refresh()
        assert list(state.sequences) == list(other.sequences)
        for mine, theirs in zip(state.sequences.values(), other.sequences.values(), strict=True):
            for name in FIELDS:
                assert getattr(mine, name) == getattr(theirs, name), (mine.request_id, name)
        assert state.target_pool.num_free_blocks == other.target_pool.num_free_blocks
        assert state.num_accepted_tokens == other.num_accepted_tokens


TestTwinMachine = TwinMachine.TestCase
TestTwinMachine.settings = settings(settings.default, stateful_step_count=60)


# --- That steady rounds are what most rounds are: else all of this is for nothing.


def long_run(driver: Driver, num_requests: int = 6) -> None:
    eager(driver.scheduler)
    driver.arrive(*[Request(f"r{i}", 5, 200) for i in range(num_requests)])
    for _ in range(12):
        driver.step(num_accepted=1)


def num_steady(driver: Driver) -> int:
    return sum(len(batch.columns.seqs) for batch in driver.scheduler.state.batches.batches)


@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize("length", ["fixed", "fixed,k=2", "by-batch-size"])
def test_who_only_decodes_is_in_the_columns(mode: str, length: str) -> None:
    driver = Driver(mode, load_policies({"mode": f"fixed,mode={mode}", "draft_length": length}))
    long_run(driver)
    assert num_steady(driver) == 6
    driver.drain(num_accepted=1)
    assert num_steady(driver) == 0
    assert all(output.num_output_tokens == 200 for output in driver.outputs)


def test_works_name_the_same_objects_while_nobody_comes_or_goes() -> None:
    """Worlds tell by this that they know the requests of a work already."""
    driver = Driver("psd")
    long_run(driver)
    names: dict[int, set[int]] = {}
    for work in driver.works[-8:]:
        names.setdefault(work.batch, set()).update((id(work.request_ids), id(work.incarnations) << 1))
    assert sorted(names) == [0, 1]
    assert all(len(each) == 2 for each in names.values())


def test_a_newcomer_and_one_who_leaves_send_nobody_else_away() -> None:
    driver = Driver("psd")
    long_run(driver)
    driver.arrive(Request("late", 9, 200))
    driver.step(num_accepted=1)
    driver.step(num_accepted=1)
    assert num_steady(driver) == 6
    for _ in range(4):
        driver.step(num_accepted=1)
    assert num_steady(driver) == 7
    assert driver.verifying is not None
    aborted = next(iter(set(driver.scheduler.state.running) - set(driver.verifying.request_ids)))
    driver.abort(aborted)
    for _ in range(4):
        driver.step(num_accepted=1)
    assert num_steady(driver) == 6


@pytest.mark.parametrize(
    "policies",
    [{"draft_length": "test_steady:OneByOne"}, {"selection": "tetris"}],
    ids=["a policy that looks at each request", "a selection"],
)
def test_where_each_request_is_looked_at_nobody_is(policies: dict[str, str]) -> None:
    driver = Driver("psd", load_policies({"mode": "fixed,mode=psd", **policies}))
    long_run(driver)
    assert num_steady(driver) == 0


class OneByOne:
    def num_draft_tokens(self, seq: SequenceView, batch: BatchView, load: LoadView) -> int:
        return 1 + seq.arrival_index % 3


def test_views_show_the_truth_at_any_time() -> None:
    """A policy may keep a view, and look at it in the middle of a steady round."""
    driver = Driver("psd")
    long_run(driver)
    views = [seq.view for seq in driver.scheduler.state.running.values()]
    for _ in range(3):
        before = {view.request_id: (view.num_tokens, view.num_accepted_tokens, view.num_rounds) for view in views}
        assert driver.verifying is not None
        verified = driver.verifying.request_ids
        driver.verify_done(num_accepted=1)
        for view in views:
            gained = 1 if view.request_id in verified else 0
            tokens, accepted, rounds = before[view.request_id]
            assert (view.num_tokens, view.num_rounds) == (tokens + 2 * gained, rounds + gained)
            assert view.num_accepted_tokens == accepted + gained
        driver.draft_done()


@pytest.mark.parametrize("answer", [-1, 2.5, "two"])
def test_an_illegal_length_for_all_is_refused_in_one_line(answer: object) -> None:
    policy = Fixed()
    policy.num_draft_tokens_of_all = lambda batch, load: answer  # type: ignore[assignment,method-assign,return-value]
    driver = Driver("psd", replace(load_policies({"mode": "fixed,mode=psd"}), draft_length=policy))
    with pytest.raises(PolicyError, match=r"draft_length policy wants .* for batch 1"):
        long_run(driver)


class FailsOnce(Fixed):
    """Answers 3, but for one time."""

    def __init__(self) -> None:
        super().__init__(3)
        self.num_good = -1  # answers before the one that fails

    def num_draft_tokens_of_all(self, batch: BatchView, load: LoadView) -> int:
        self.num_good -= 1
        if self.num_good == -1:
            raise RuntimeError("not now")
        return super().num_draft_tokens_of_all(batch, load)


@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize("num_accepted", [0, 1])
def test_no_block_stays_behind_whatever_came_of_the_plan(mode: str, num_accepted: int) -> None:
    """After a round nobody holds an empty block, also if a policy failed when blocks were reserved already."""
    policy = FailsOnce()
    policies = replace(load_policies({"mode": f"fixed,mode={mode}"}), draft_length=policy)
    driver = Driver(mode, policies, block_size=2)
    driver.arrive(*[Request(f"short{i}", 5, 400, max_draft_tokens=1) for i in range(2)])  # never in the columns
    long_run(driver)
    num_failures = num_rounds = 0
    for number in range(60):
        if number % 5 == 0:
            policy.num_good = number // 5
        if driver.drafting is not None:
            num_failures += tolerant(driver, driver.draft_done)
        if (work := driver.verifying) is None:
            num_failures += tolerant(driver, driver.feed)
            continue
        driver.verifying = None
        accepted = tuple([min(k, num_accepted) for k in work.num_draft])
        result = VerifyResult(accepted, tuple([num + 1 for num in accepted]))
        driver.scheduler.update(WorkDone(work.work_id, result, driver.now_s, driver.now_s), driver.now_s)
        columns = driver.scheduler.state.batches.batches[work.batch].columns
        for room, valid in ((columns.target, columns.computed), (columns.draft, columns.starts)):
            assert all(capacity - num < 2 for capacity, num in zip(room.capacities, valid, strict=True))
            num_rounds += len(valid)
        num_failures += tolerant(driver, driver.feed)
    assert num_failures > 8
    assert num_rounds > 100


def tolerant(driver: Driver, call: Callable[[], object]) -> bool:
    """Whether a policy failed; then the core is asked once more."""
    try:
        call()
    except PolicyError:
        driver.feed()
        return True
    return False


def test_small_batches_and_short_stays_are_not_worth_it() -> None:
    few, many, short = (
        Driver("sd"),
        Driver("sd", max_batch_size=LEAST_MEMBERS),
        Driver("sd", max_batch_size=LEAST_MEMBERS),
    )
    few.arrive(*[Request(f"r{i}", 5, 200) for i in range(LEAST_MEMBERS - 1)])
    many.arrive(*[Request(f"r{i}", 5, 200) for i in range(LEAST_MEMBERS)])
    short.arrive(*[Request(f"r{i}", 5, 20) for i in range(LEAST_MEMBERS)])
    for driver, num in ((few, 0), (many, LEAST_MEMBERS), (short, 0)):
        for _ in range(6):
            driver.step()
        assert num_steady(driver) == num

"""What each shipped policy decides, how policies are found by name, and that illegal answers break nothing (I13)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from driver import Driver
from hypothesis import given
from hypothesis import strategies as st
from invariants import check_state

from minedraft import Mode, PolicyError, Request, load_policies, load_policy
from minedraft.batch import BatchManager, BatchPhase
from minedraft.policy import BUILTIN, SLOTS, Draft, KVNeed, Move, PreemptionMode, Victim, parse_spec
from minedraft.sequence import SequenceState, SequenceView


def make_sequence(name: str = "a", index: int = 0, **fields: Any) -> SequenceState:
    seq = SequenceState(Request(name, 10, 50, priority=fields.pop("priority", 0)), index, 60, 60, 4)
    if "num_computed" in fields:
        seq.num_tokens = fields.pop("num_computed") + 1
        seq.num_uncomputed = 1
    for key, value in fields.items():
        setattr(seq, key, value)
    return seq


def make_batches(*sizes: int, max_size: int = 8) -> BatchManager:
    manager = BatchManager(len(sizes), max_size)
    index = 0
    for batch, size in enumerate(sizes):
        for _ in range(size):
            manager.assign(make_sequence(f"s{index}", index), batch)
            index += 1
    return manager


# --- lookup


def test_every_shipped_policy_can_be_made_by_name() -> None:
    assert set(BUILTIN) == set(SLOTS)
    for slot, names in BUILTIN.items():
        for name in names:
            assert load_policy(slot, name)


def test_a_policy_by_dotted_path_and_with_options() -> None:
    policy = load_policy("draft_length", "minedraft.policies.draft_length:Fixed,k=2")
    assert policy.num_draft_tokens(None, None, None) == 2
    assert load_policy("mode", "fixed", {"mode": "sd"}).mode is Mode.SD


def test_a_policy_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    point = metadata.EntryPoint("preemption.mine", "minedraft.policies.preemption:Newest", "minedraft.policies")
    short = metadata.EntryPoint("other", "minedraft.policies.preemption:CostAware", "minedraft.policies")
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints([point, short]))
    assert type(load_policy("preemption", "mine")).__name__ == "Newest"
    assert type(load_policy("preemption", "other")).__name__ == "CostAware"
    with pytest.raises(ValueError, match="mine"):
        load_policy("preemption", "min")


@pytest.mark.parametrize(
    ("slot", "spec", "message"),
    [
        ("admision", "fcfs", "no policy slot 'admision'"),
        ("admission", "fcsf", "did you mean 'fcfs'"),
        ("admission", "qqq", "known are fcfs, priority"),
        ("admission", "no.such.module:Thing", "cannot load"),
        ("admission", "minedraft.policies.admission:Nothing", "cannot load"),
        ("admission", "minedraft.policies.mode:Fixed", "has no method 'rank'"),
        ("draft_length", "fixed,k", "key=value"),
        ("draft_length", "fixed,q=3", "^policy draft_length=fixed: no option 'q'; its options are k$"),
        ("admission", "fcfs,q=3", "^policy admission=fcfs: no option 'q'; it has none$"),
        ("draft_length", "fixed,k=abc", "^policy draft_length=fixed: k is 'abc', must be a whole number or left out$"),
        ("draft_length", "fixed,k=2.5", "k is 2.5, must be a whole number or left out$"),
        ("draft_length", "fixed,k=true", "k is True, must be a whole number or left out$"),
        ("rebalance", "keep-within,difference=x", "difference is 'x', must be a whole number$"),
        ("mode", "fixed,mode=3", "mode is 3, must be text$"),
        ("draft_length", "fixed,k=-1", "k is -1"),
        ("draft_length", "by-batch-size,table=8:5/8:3", "sizes must rise"),
        ("draft_length", "by-batch-size,table=8", "table"),
        ("draft_length", "by-batch-size,table=8:-1", "k is -1"),
        ("rebalance", "keep-within,difference=0", "difference is 0"),
        ("mode", "fixed,mode=fast", "must be one of ar, sd, psd"),
    ],
)
def test_what_cannot_be_found_or_made_is_one_clear_line(slot: str, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_policy(slot, spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("slot", "name"), [(slot, name) for slot in SLOTS for name in BUILTIN[slot]])
def test_no_shipped_policy_answers_a_bad_option_in_pythons_words(slot: str, name: str) -> None:
    options = inspect.signature(type(load_policy(slot, name))).parameters
    for option in ("nonsense", *options):
        for value in ("x", "1.5", "true", "-7"):
            try:
                load_policy(slot, f"{name},{option}={value}")
            except ValueError as error:
                text = str(error)
                assert text.startswith(f"policy {slot}={name}: ")
                assert option in text
                assert not any(words in text for words in ("__init__", "argument", "not supported", "object"))
            else:
                assert option != "nonsense"


class Anything:
    """Takes whatever it is given."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def choose_mode(self, load: Any) -> Mode:
        return Mode.AR


def test_a_policy_of_a_user_may_take_any_options() -> None:
    assert load_policy("mode", f"{__name__}:Anything,a=1,b=x").options == {"a": 1, "b": "x"}


@pytest.mark.parametrize("table", [[8, 5], [["8", 5]], [[8.0, 5]], [[8]], [], "8:5/16", "x"])
def test_a_table_of_batch_sizes_that_is_none_is_named(table: Any) -> None:
    with pytest.raises(ValueError, match=r"^policy draft_length=by-batch-size: table is "):
        load_policy("draft_length", "by-batch-size", {"table": table})


def test_parse_spec() -> None:
    assert parse_spec("x, a-b=1 ,c=2.5,d=true,e=text") == ("x", {"a_b": 1, "c": 2.5, "d": True, "e": "text"})


# --- decisions


def test_views_are_read_only_and_show_no_future() -> None:
    view = make_sequence().view
    for name in ("num_tokens", "batch", "anything"):
        with pytest.raises(AttributeError):
            setattr(view, name, 1)
    assert not [name for name in dir(SequenceView) if "true" in name or "future" in name]
    batch = make_batches(1, 0).views[0]
    with pytest.raises(AttributeError):
        batch.phase = BatchPhase.DRAFTED  # type: ignore[misc]


def test_assignment() -> None:
    seq = make_sequence("new", 99).view
    views = make_batches(3, 1, 2).views
    assert load_policy("assignment", "fewest-requests").choose_batch(seq, views) == 1
    manager = make_batches(2, 2)
    next(iter(manager.batches[0].members.values())).num_tokens += 100
    manager.batches[0].num_tokens += 100
    assert load_policy("assignment", "least-tokens").choose_batch(seq, manager.views) == 1
    assert load_policy("assignment", "fewest-requests").choose_batch(seq, make_batches(1, 2, max_size=1 + 1).views) == 0


SIZES_AND_PHASES = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(BatchPhase)), min_size=2, max_size=4)


def batches_of(sizes_and_phases: list[tuple[int, BatchPhase]], max_size: int = 4) -> BatchManager:
    manager = make_batches(*[size for size, _ in sizes_and_phases], max_size=max_size)
    for batch, (_, phase) in zip(manager.batches, sizes_and_phases, strict=True):
        batch.phase = phase
    return manager


@given(SIZES_AND_PHASES)
def test_fewest_requests_is_the_first_by_size_then_idle(found: list[tuple[int, BatchPhase]]) -> None:
    manager = batches_of(found)
    best = min(range(len(found)), key=lambda i: (found[i][0], found[i][1] is not BatchPhase.IDLE, i))
    if found[best][0] < 4:
        assert load_policy("assignment", "fewest-requests").choose_batch(make_sequence().view, manager.views) == best


@given(SIZES_AND_PHASES)
def test_split_on_empty_halves_the_largest_idle_batch(found: list[tuple[int, BatchPhase]]) -> None:
    manager = batches_of(found)
    sizes = [size for size, _ in found]
    idle = [i for i, (size, phase) in enumerate(found) if phase is BatchPhase.IDLE and size > 1]
    expected: list[Move] = []
    if 0 in sizes and idle:
        source = max(idle, key=sizes.__getitem__)
        members = list(manager.views[source].members())
        expected = [Move(seq, sizes.index(0)) for seq in members[::-1][: sizes[source] // 2]]
    assert list(load_policy("rebalance", "split-on-empty").moves(manager.views)) == expected


def test_in_phase_joins_the_batch_that_is_drafted_next() -> None:
    policy = load_policy("assignment", "in-phase")
    seq = make_sequence("new", 99).view
    manager = make_batches(5, 1)
    manager.set_phase(manager.batches[1], BatchPhase.DRAFTING)
    assert policy.choose_batch(seq, manager.views) == 0
    assert policy.choose_batch(seq, make_batches(2, 1).views) == 1


def test_rebalance() -> None:
    assert load_policy("rebalance", "never").moves(make_batches(8, 0).views) == ()
    split = load_policy("rebalance", "split-on-empty")
    assert [move.to_batch for move in split.moves(make_batches(5, 0).views)] == [1, 1]
    assert split.moves(make_batches(1, 0).views) == ()
    assert split.moves(make_batches(5, 1).views) == ()
    keep = load_policy("rebalance", "keep-within,difference=2")
    assert len(keep.moves(make_batches(7, 1).views)) == 3
    assert keep.moves(make_batches(3, 1).views) == ()
    assert len(keep.moves(make_batches(2, 0).views)) == 1
    busy = make_batches(4, 0)
    busy.set_phase(busy.batches[0], BatchPhase.DRAFTING)
    assert split.moves(busy.views) == ()


def test_by_batch_size() -> None:
    policy = load_policy("draft_length", "by-batch-size,table=2:5/4:1")
    for size, k in ((1, 5), (2, 5), (3, 1), (4, 1), (5, 0)):
        batch = make_batches(size, 0).views[0]
        assert policy.num_draft_tokens(make_sequence().view, batch, None) == k


def test_select_all_is_prefix_closed_within_the_capacity() -> None:
    drafts = [Draft(make_sequence(f"s{i}", i).view, n, ()) for i, n in enumerate((3, 0, 4, 2))]
    policy = load_policy("selection", "all")
    assert list(policy.select(drafts, 9)) == [3, 0, 4, 2]
    assert list(policy.select(drafts, 5)) == [2, 0, 2, 1]
    assert list(policy.select(drafts, 0)) == [0, 0, 0, 0]


def test_preemption() -> None:
    old = make_sequence("old", 0, target_capacity=64, num_computed=60, draft_capacity=16, num_draft_computed=3)
    mid = make_sequence("mid", 1, target_capacity=32, num_computed=10, draft_capacity=32, num_draft_computed=30)
    new = make_sequence("new", 2, target_capacity=16, num_computed=5, draft_capacity=16, num_draft_computed=12)
    views = [old.view, mid.view, new.view]
    newest, cheapest = load_policy("preemption", "newest"), load_policy("preemption", "cost-aware")
    target = KVNeed("target", 1, 16, old.view)
    assert newest.choose_victim(views, target) == Victim(new.view, PreemptionMode.RECOMPUTE)
    assert cheapest.choose_victim(views, target).seq is new.view
    assert cheapest.choose_victim(views, target._replace(num_blocks=2)).seq is mid.view
    assert cheapest.choose_victim(views, target._replace(num_blocks=9)).seq is old.view
    draft = KVNeed("draft", 1, 16, old.view)
    assert newest.choose_victim(views, draft).mode is PreemptionMode.DROP_DRAFT_KV
    assert cheapest.choose_victim(views, draft).seq is old.view


def test_preemption_by_priority() -> None:
    """Lower numbers are more urgent, as in admission; among equals the latest arrival gives way."""
    policy = load_policy("preemption", "least-urgent")
    urgent, early, late, last = (
        make_sequence(name, index, priority=priority).view
        for index, (name, priority) in enumerate([("urgent", -1), ("early", 5), ("late", 5), ("last", 0)])
    )
    need = KVNeed("target", 1, 16, urgent)
    assert policy.choose_victim([urgent, early, late, last], need) == Victim(late, PreemptionMode.RECOMPUTE)
    assert policy.choose_victim([urgent, last], need).seq is last
    assert policy.choose_victim([urgent, last], need._replace(pool="draft")).mode is PreemptionMode.DROP_DRAFT_KV


def test_admission_ranks() -> None:
    short, urgent = make_sequence("a", 0, num_tokens=5), make_sequence("b", 1, priority=-3)
    assert load_policy("admission", "fcfs").rank(short.view) == load_policy("admission", "fcfs").rank(urgent.view)
    assert load_policy("admission", "priority").rank(urgent.view) < load_policy("admission", "priority").rank(
        short.view
    )
    prompt = load_policy("admission", "shortest-prompt")
    assert prompt.rank(short.view) < prompt.rank(urgent.view)


# --- illegal answers

FOREIGN = make_sequence("foreign", 0).view


class Answer:
    """A policy for any slot that gives one answer, or raises it."""

    keeps_all = False

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _give(self, *args: Any) -> Any:
        answer = self.answer(*args) if callable(self.answer) else self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    rank = choose_batch = moves = num_draft_tokens = select = choose_victim = choose_mode = _give


def first_members(batches: Sequence[Any]) -> list[Any]:
    return [seq for batch in batches for seq in batch.members()]


ILLEGAL: list[tuple[str, Any, str]] = [
    *[(slot, RuntimeError("boom"), "boom") for slot in SLOTS],
    *[(slot, PolicyError("not I"), "not I") for slot in SLOTS],
    ("admission", float("nan"), "NaN"),
    ("admission", "first", "admission"),
    ("assignment", 7, "batch 7"),
    ("assignment", None, "None"),
    ("assignment", True, "True"),
    ("rebalance", [Move(FOREIGN, 0)], "not running"),
    ("rebalance", lambda b: [Move(s, 1 - s.batch) for s in first_members(b)[:1]] * 2, "twice"),
    ("rebalance", lambda b: [Move(s, 5) for s in first_members(b)[:1]], "to batch 5"),
    ("rebalance", lambda b: [Move(s, s.batch) for s in first_members(b)[:1]], "to batch"),
    (
        "rebalance",
        lambda b: [Move(s, 1 - s.batch) for s in first_members(b) if b[s.batch].phase],
        "IDLE",
    ),
    ("rebalance", 3, "rebalance"),
    ("draft_length", -1, "-1"),
    ("draft_length", 1.5, "1.5"),
    ("draft_length", None, "None"),
    ("selection", lambda drafts, capacity: [99] * len(drafts), "capacity|99"),
    ("selection", lambda drafts, capacity: [-1] * len(drafts), "-1"),
    ("selection", lambda drafts, capacity: [], "0 counts"),
    ("selection", lambda drafts, capacity: [0.5] * len(drafts), "selection"),
    ("preemption", Victim(FOREIGN, PreemptionMode.RECOMPUTE), "not among the candidates"),
    ("preemption", lambda candidates, need: Victim(candidates[0], PreemptionMode.DROP_DRAFT_KV), "recompute"),
    ("preemption", lambda candidates, need: Victim(candidates[0], "swap"), "swap"),
    ("preemption", lambda candidates, need: None, "preemption"),
    ("mode", "turbo", "mode"),
    ("mode", None, "mode"),
]


def serve(driver: Driver, count: int) -> None:
    driver.arrive(*[Request(f"r{i}", 6, 13) for i in range(count)])
    driver.drain(num_accepted=1, limit=300)
    raise AssertionError("the policy was never asked")


@pytest.mark.parametrize(("slot", "answer", "message"), ILLEGAL, ids=[f"{s}-{m}" for s, _, m in ILLEGAL])
def test_i13_an_illegal_answer_is_refused_and_breaks_no_invariant(slot: str, answer: Any, message: str) -> None:
    policies = replace(load_policies(), **{slot: Answer(answer)})
    driver = Driver(policies=policies, block_size=1, max_model_len=20, num_target_blocks=26, max_batch_size=3)
    with pytest.raises(PolicyError, match=message) as caught:
        serve(driver, 6)
    assert caught.value.slot == slot
    # Whatever was decided before stands, and a policy in its place finishes the job.
    state = driver.scheduler.state
    driver.scheduler.use_policies(load_policies())
    driver.outputs += driver.feed(check=False)
    while driver.scheduler.num_unfinished:
        driver.step(num_accepted=1)
    check_state(driver.scheduler)
    assert state.num_arrived == state.num_finished
    assert state.target_pool.num_free_blocks == state.target_pool.num_blocks


def test_i13_moves_may_not_overfill_a_batch() -> None:
    policies = replace(load_policies(), rebalance=Answer(lambda b: [Move(s, 1) for s in b[0].members()]))
    driver = Driver(policies=policies, max_batch_size=2)
    with pytest.raises(PolicyError, match="over 2"):
        serve(driver, 4)


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_a_mode_that_the_configuration_has_no_means_for(mode: str) -> None:
    driver = Driver("ar", policies=load_policies({"mode": f"fixed,mode={mode}"}))
    with pytest.raises(PolicyError, match=r"num_batches|num_draft_blocks"):
        driver.arrive(Request("a", 4, 4))

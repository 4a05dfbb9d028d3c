"""Links: bytes and seconds by hand, periods of rounds in closed form, and that no link changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import test_worlds
from hypothesis import given
from hypothesis import strategies as st

from minedraft.cli import run_cli
from minedraft.config import ConfigError, RunConfig, parse_config
from minedraft.engine import Engine
from minedraft.policy import load_policies
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig
from minedraft.sim.acceptance import ConstantRate
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import ConstantCost
from minedraft.sim.faults import DrafterOutage, Faults
from minedraft.sim.links import Lane, Link, Payload, Traffic, load_link
from minedraft.sim.presets import read_presets
from minedraft.sim.workload import SimRequest
from minedraft.work import (
    DrafterLost,
    DraftResult,
    DraftWork,
    Event,
    RequestArrived,
    VerifyResult,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
)

INSTANT = Link(0.0, math.inf)


def verify(num_seqs: int, k: int, *, new: int = 1, last: bool = True, work_id: int = 0) -> VerifyWork:
    n = num_seqs
    columns = (0,) * n, (0,) * n, (50,) * n, (new,) * n, (k,) * n, (last,) * n
    return VerifyWork(work_id, 0, tuple(f"r{i}" for i in range(n)), *columns, (0,) * 13, (n,), ())


def draft(num_seqs: int, k: int, *, new: int = 1, work_id: int = 0) -> DraftWork:
    n = num_seqs
    ids = tuple(f"r{i}" for i in range(n))
    return DraftWork(work_id, 0, ids, (0,) * n, (0,) * n, (50,) * n, (new,) * n, (k,) * n, ())


class Watch:
    """A run to its end whose works and events are kept, with the times at which the core saw them."""

    def __init__(self, backend: SimBackend, scheduler: Scheduler) -> None:
        self.backend = backend
        self.submitted: dict[int, tuple[float, Work]] = {}
        self.seen: list[tuple[float, Event]] = []
        Engine(scheduler, self).run()

    def now(self) -> float:
        return self.backend.now()

    def ready(self) -> bool:
        return self.backend.ready()

    def submit(self, work: Work) -> None:
        self.submitted[work.work_id] = self.now(), work
        self.backend.submit(work)

    def next_event(self) -> Event | None:
        event = self.backend.next_event()
        if event is not None:
            self.seen.append((self.now(), event))
        return event

    def starts(self, kind: type) -> list[float]:
        """When works of a kind started on their device."""
        done = [event for _, event in self.seen if isinstance(event, WorkDone)]
        return [event.started_s for event in done if isinstance(self.submitted[event.work_id][1], kind)]


def run(
    traffic: Traffic | None,
    *,
    mode: str = "psd",
    output_lens: tuple[int, ...] = (200, 200),
    m: int = 1,
    k: int = 3,
    verify_s: float = 0.05,
    draft_s: float = 0.05,
    alpha: float = 0.0,
    follows: bool = False,
    **world: Any,
) -> Watch:
    """Constant stage times, all requests there at once; nothing is accepted, so all rounds are alike."""
    requests = [SimRequest(f"r{i}", 0.0, 20, n, n) for i, n in enumerate(output_lens)]
    limits = SchedulerConfig(
        num_batches=2 if mode == "psd" else 1,
        max_batch_size=m,
        num_speculative_tokens=k,
        draft_follows_target=follows,
    )
    cost = ConstantCost(verify_base_s=verify_s, draft_base_s=draft_s, prefill_s=verify_s, draft_ingest_s=draft_s)
    backend = SimBackend(requests, cost, ConstantRate(alpha, seed=3), traffic=traffic, **world)
    return Watch(backend, Scheduler(limits, load_policies({"mode": f"fixed,mode={mode}"})))


def period_s(watch: Watch) -> float:
    """Mean time between two verifications, far from the run's ends, over as many rounds of either batch."""
    starts = watch.starts(VerifyWork)
    first, num_rounds = len(starts) // 4, len(starts) // 4 * 2
    return (starts[first + num_rounds] - starts[first]) / num_rounds


# --- one message


def test_a_lane_carries_one_message_at_a_time() -> None:
    lane = Lane(Link(latency_s=0.5, peak_bytes_per_s=200.0, efficiency=0.5))
    assert lane.send(10.0, 100.0) == pytest.approx(1.0 + 0.5)
    assert lane.send(10.25, 200.0) == pytest.approx(0.75 + 2.0 + 0.5)  # behind the first, which leaves it at 11
    assert lane.send(12.9, 0.0) == pytest.approx(0.1 + 0.5)
    assert lane.send(20.0, 100.0) == pytest.approx(1.5)  # the latency doesn't hold the lane
    assert (lane.num_messages, lane.num_bytes) == (4, 400.0)
    assert lane.busy_s == pytest.approx(4.0)


@given(
    link=st.builds(Link, st.floats(0.0, 1.0), st.floats(1.0, 1e12), st.floats(0.1, 1.0)),
    messages=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 1e9)), min_size=1, max_size=30),
)
def test_messages_arrive_in_order_and_no_faster_than_the_link(link: Link, messages: list[tuple[float, float]]) -> None:
    lane, now_s, arrivals = Lane(link), 0.0, []
    for wait_s, num_bytes in messages:
        now_s += wait_s
        delay_s = lane.send(now_s, num_bytes)
        assert delay_s >= link.transfer_s(num_bytes) * (1 - 1e-9)
        arrivals.append(now_s + delay_s)
    for before, after in pairwise(arrivals):
        assert after >= before - 1e-9 * before
    assert arrivals[-1] >= lane.busy_s * (1 - 1e-9)


def test_the_authors_payloads() -> None:
    """m (k + 1) |V| probabilities and as many log-probabilities, fp32 (arXiv 2603.18016 and its code)."""
    for m, k, vocab_size, megabytes in ((16, 3, 151_936, 78), (16, 5, 151_936, 117), (64, 5, 128_256, 394)):
        traffic = Traffic(load_link("pcie4-x16"), "target_probs", vocab_size)
        assert traffic.probs_bytes(verify(m, k)) / 1e6 == pytest.approx(megabytes, abs=0.5)
    assert load_link("pcie4-x16").transfer_s(78e6) == pytest.approx(0.003, rel=0.05)


def test_payloads_by_hand() -> None:
    ids = Traffic(INSTANT)
    assert ids.draft_work_bytes(draft(16, 3, new=2)) == 16 * 2 * 4
    assert ids.draft_bytes(draft(16, 3)) == 16 * 3 * 4
    probs = Traffic(INSTANT, "draft_probs", vocab_size=1000, draft_vocab_size=320)
    assert probs.draft_bytes(draft(16, 3)) == 16 * 3 * 4 * (1 + 320)
    assert Traffic(INSTANT, "draft_probs", 1000).draft_bytes(draft(2, 3)) == 2 * 3 * 4 * (1 + 1000)
    assert Traffic(INSTANT, "target_probs", 1000).verify_work_bytes(verify(4, 3)) == 4 * (1 + 3) * 4
    # A prompt chunk that isn't the last yields no token, so no probabilities.
    assert Traffic(INSTANT, "target_probs", 1000).probs_bytes(verify(4, 0, new=9, last=False)) == 0
    assert Traffic(INSTANT, "target_probs", 1000).probs_bytes(verify(4, 0, new=9)) == 4 * 1000 * 8


def test_hidden_states_by_hand() -> None:
    """Of EAGLE-3: three states of the accepted tokens and the one before, or of a whole prompt, 16 bits each."""
    traffic = Traffic(INSTANT, state_size=3 * 4096)
    result = VerifyResult((3, 0), (4, 1))
    assert traffic.states_bytes(verify(2, 3), result) == (4 + 1) * 3 * 4096 * 2
    assert traffic.states_bytes(verify(2, 0, new=700), VerifyResult((0, 0), (1, 1))) == 2 * 700 * 3 * 4096 * 2
    # Who judges at the drafter gets the states of all drafts with the probabilities.
    authors = Traffic(INSTANT, "target_probs", vocab_size=32000, state_size=6656)
    assert authors.probs_bytes(verify(16, 3)) == 16 * 4 * (32000 * 8 + 6656 * 2)


@pytest.mark.parametrize("name", read_presets("links.toml"))
def test_every_preset_link_has_a_source_and_figures_that_can_be(name: str) -> None:
    link = load_link(name)
    assert len(link.source) > 20
    assert 1e9 < link.bytes_per_s <= link.peak_bytes_per_s < 1e12
    assert 1e-7 < link.latency_s < 1e-3


def test_faster_generations_are_faster() -> None:
    for slow, fast in (("pcie4-x16", "pcie5-x16"), ("pcie5-x16", "nvlink3"), ("nvlink3", "nvlink4")):
        assert load_link(fast).bytes_per_s > load_link(slow).bytes_per_s
    assert load_link("ethernet-100g").transfer_s(1e6) > load_link("ib-ndr").transfer_s(1e6)


# --- rounds


@pytest.mark.parametrize(("verify_s", "draft_s"), [(0.05, 0.05), (0.05, 0.02), (0.02, 0.05), (0.05, 0.048)])
@pytest.mark.parametrize("latency_s", [0.0, 0.001, 0.01, 0.04])
@pytest.mark.parametrize("overhead_s", [0.0, 0.003])
def test_period_of_two_batches_whose_ids_travel(
    verify_s: float, draft_s: float, latency_s: float, overhead_s: float
) -> None:
    """A drafter is told what to do, and answers: max(V, t + 2 L) + o, as long as the host is free between."""
    watch = run(Traffic(Link(latency_s, math.inf)), verify_s=verify_s, draft_s=draft_s, round_overhead_s=overhead_s)
    assert period_s(watch) == pytest.approx(max(verify_s, draft_s + 2 * latency_s) + overhead_s, rel=1e-9)


@pytest.mark.parametrize("latency_s", [0.0, 0.004])
def test_period_of_one_batch_whose_ids_travel(latency_s: float) -> None:
    """Nothing overlaps: V + t + 2 L."""
    watch = run(Traffic(Link(latency_s, math.inf)), mode="sd", output_lens=(200,), verify_s=0.05, draft_s=0.02)
    assert period_s(watch) == pytest.approx(0.07 + 2 * latency_s, rel=1e-9)


@pytest.mark.parametrize(("verify_s", "draft_s"), [(0.05, 0.02), (0.05, 0.05), (0.02, 0.05)])
@pytest.mark.parametrize("probs_s", [0.003, 0.02, 0.06])
def test_period_of_two_batches_judged_at_the_drafter(verify_s: float, draft_s: float, probs_s: float) -> None:
    """The authors' design: the target's probabilities lie on the path of every verification, max(V + 2 L + P, t)."""
    num_bytes = 4 * 1000 * 8  # k + 1 rows of a vocabulary of 1000
    link = Link(0.001, num_bytes / probs_s)
    watch = run(Traffic(link, "target_probs", 1000), verify_s=verify_s, draft_s=draft_s)
    ids_s = 16 / link.bytes_per_s
    assert period_s(watch) == pytest.approx(max(verify_s + 0.002 + probs_s + ids_s, draft_s), rel=1e-9)


@pytest.mark.parametrize("probs_s", [0.003, 0.02, 0.06])
def test_period_of_two_batches_whose_drafts_bring_their_distributions(probs_s: float) -> None:
    """max(V, t + 2 L + Q): beside the verification of the other batch."""
    num_bytes = 3 * 4 * 1001
    link = Link(0.001, num_bytes / probs_s)
    watch = run(Traffic(link, "draft_probs", 1000), verify_s=0.05, draft_s=0.03)
    assert period_s(watch) == pytest.approx(max(0.05, 0.032 + probs_s + 4 / link.bytes_per_s), rel=1e-9)


@pytest.mark.parametrize(("verify_s", "draft_s"), [(0.05, 0.02), (0.05, 0.05), (0.02, 0.05), (0.03, 0.03)])
@pytest.mark.parametrize("states_s", [0.001, 0.015, 0.04, 0.1])
def test_period_of_two_batches_whose_head_waits_for_states(verify_s: float, draft_s: float, states_s: float) -> None:
    """The states of a batch, H, are sent when its verification ends, and the work for the drafter behind them.

    A batch's own cycle is two periods: V, H, the latency of the work's message, t, and that of the draft's. The
    drafter's is t + 2 L. So the period is max(V, t + 2 L, (V + H + t + 2 L) / 2), and at least H, which holds the lane.
    """
    state_size = 10_000_000  # so large that ids are nothing
    link = Link(0.001, 2 * state_size / states_s)
    watch = run(Traffic(link, state_size=state_size), verify_s=verify_s, draft_s=draft_s, follows=True)
    cycle_s = verify_s + states_s + draft_s + 0.002
    wanted = max(verify_s, draft_s + 0.002, cycle_s / 2, states_s)
    assert period_s(watch) == pytest.approx(wanted, rel=1e-4)


def test_spans_are_the_devices_and_messages_lie_between() -> None:
    link = Link(0.004, math.inf)
    for traffic in (Traffic(link), Traffic(link, "target_probs", 100), Traffic(link, state_size=10)):
        watch = run(traffic, verify_s=0.05, draft_s=0.02)
        for seen_s, event in watch.seen:
            if isinstance(event, RequestArrived):
                continue
            assert isinstance(event, WorkDone)
            submitted_s, work = watch.submitted[event.work_id]
            is_far = isinstance(work, VerifyWork) == traffic.at_drafter
            assert event.ended_s - event.started_s == pytest.approx(0.05 if isinstance(work, VerifyWork) else 0.02)
            assert seen_s - event.ended_s == pytest.approx(0.004 if is_far else 0.0, abs=1e-12)
            assert event.started_s - submitted_s >= (0.004 if is_far else 0.0) - 1e-12


def test_a_head_starts_when_the_states_of_its_prompts_are_there() -> None:
    """After a prefill of 20 tokens: its end, the states, the work's message."""
    link = Link(0.001, 20 * 2 * 1000 / 0.03)
    watch = run(Traffic(link, state_size=1000), mode="sd", output_lens=(9,), follows=True)
    ids_s = 4 * 21 / link.bytes_per_s
    assert watch.starts(DraftWork)[0] == pytest.approx(0.05 + 0.03 + ids_s + 0.001, rel=1e-9)


# --- what a link may never do

KINDS: list[Payload] = ["token_ids", "draft_probs", "target_probs"]
TIMES = st.integers(1, 40).map(lambda n: n / 1000)


@given(
    mode=st.sampled_from(["sd", "psd"]),
    m=st.integers(1, 4),
    output_lens=st.lists(st.integers(1, 15), min_size=1, max_size=8),
    verify_s=TIMES,
    draft_s=TIMES,
    alpha=st.floats(0.0, 1.0),
    payload=st.sampled_from(KINDS),
    state_size=st.sampled_from([0, 5000]),
    latencies=st.tuples(st.integers(0, 10), st.integers(0, 10)),
    slowdown=st.integers(1, 20),
)
def test_a_slower_link_never_shortens_a_run(
    mode: str,
    m: int,
    output_lens: list[int],
    payload: Payload,
    state_size: int,
    latencies: tuple[int, int],
    slowdown: int,
    **stages: float,
) -> None:
    """With stage times that don't depend on the batch, and everybody running from the start."""
    lens = tuple(output_lens[: m if mode == "sd" else 2 * m])
    ends = []
    for latency_ms, bytes_per_s in ((latencies[0], 1e9), (latencies[0] + latencies[1], 1e9 / slowdown)):
        traffic = Traffic(Link(latency_ms / 1000, bytes_per_s), payload, 1000, state_size=state_size)
        watch = run(traffic, mode=mode, m=m, output_lens=lens, follows=state_size > 0, **stages)  # type: ignore[arg-type]
        ends.append(watch.seen[-1][0])
    assert ends[1] >= ends[0] - 1e-9


@pytest.mark.parametrize("payload", KINDS)
@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_an_instant_link_is_no_link(mode: str, payload: Payload) -> None:
    """The same works at the same times, and the same results, as without one."""
    lens = tuple(5 + 7 * i for i in range(12))
    options: dict[str, Any] = {"mode": mode, "output_lens": lens, "m": 4, "alpha": 0.7, "draft_s": 0.03}
    plain = run(None, **options)
    linked = run(Traffic(INSTANT, payload, 1000, state_size=64), **options)
    assert list(plain.submitted.values()) == list(linked.submitted.values())
    assert plain.seen == linked.seen
    assert plain.backend.to_drafter is None
    assert linked.backend.to_drafter is not None
    assert linked.backend.to_drafter.num_bytes > 0


def linked(payload: Payload) -> Any:
    """A world for the contract's tests."""

    def make(_: Any) -> Iterator[SimBackend]:
        shapes = test_worlds.shapes()
        requests = [SimRequest(name, 0.01 * i, n, 12, 12) for i, (name, n) in enumerate(shapes)]
        cost = ConstantCost(verify_base_s=0.02, draft_base_s=0.02, prefill_s=0.03)
        traffic = Traffic(load_link("ethernet-100g"), payload, 151_936, state_size=4096)
        yield SimBackend(requests, cost, ConstantRate(0.6), traffic=traffic)

    return make


@pytest.mark.parametrize("payload", KINDS)
def test_the_contract_of_a_world(payload: Payload) -> None:
    for backend in linked(payload)(None):
        watch = test_worlds.Watch(backend)
        scheduler = test_worlds.make_scheduler()
        test_worlds.check(Engine(scheduler, watch).run())
        assert watch.next_event() is None


# --- a drafter that is lost


def lone(traffic: Traffic, **world: Any) -> SimBackend:
    cost = ConstantCost(verify_base_s=4.0, draft_base_s=3.0)
    backend = SimBackend([SimRequest("r0", 0.0, 10, 100, 100)], cost, ConstantRate(1.0), traffic=traffic, **world)
    assert isinstance(backend.next_event(), RequestArrived)
    return backend


@pytest.mark.parametrize("lost_s", [0.5, 2.0, 4.5])
def test_a_loss_ends_drafts_on_their_way_too(lost_s: float) -> None:
    """The work's message takes a second, the draft three, the answer one: it is lost in each of them."""
    faults = Faults(outages=(DrafterOutage(lost_s, 1.0),))
    backend = lone(Traffic(Link(1.0, math.inf)), faults=faults)
    backend.submit(draft(1, 2))
    assert isinstance(backend.next_event(), DrafterLost)
    backend.next_event()  # it is back
    backend.submit(draft(1, 2, work_id=1))
    events = list(iter(backend.next_event, None))
    assert [event.work_id for event in events if isinstance(event, WorkDone)] == [1]
    assert backend.now() == pytest.approx(lost_s + 1.0 + 5.0)


def test_works_that_fail_say_so_when_the_message_is_there() -> None:
    backend = lone(Traffic(Link(1.0, math.inf), state_size=9), faults=Faults(draft_failure_rate=1.0))
    backend.submit(draft(1, 2))
    assert backend.next_event() == WorkFailed(0, "injected draft failure")
    assert backend.now() == 5.0
    backend = lone(Traffic(Link(1.0, math.inf), state_size=9), faults=Faults(verify_failure_rate=1.0))
    backend.submit(verify(1, 2))
    assert backend.next_event() == WorkFailed(0, "injected verify failure")
    assert backend.to_drafter is not None
    assert backend.to_drafter.num_messages == 0, "a step that failed has no states"


def test_results_are_what_they_are_without_a_link() -> None:
    backend = lone(Traffic(Link(1.0, math.inf), "target_probs", 10))
    backend.submit(verify(1, 2))
    event = backend.next_event()
    assert isinstance(event, WorkDone)
    assert event == WorkDone(0, VerifyResult((2,), (3,)), 1.0, 5.0)
    assert backend.now() == 6.0
    backend.submit(draft(1, 2, work_id=1))
    event = backend.next_event()
    assert event == WorkDone(1, DraftResult((2,)), 6.0, 9.0)
    assert backend.now() == 9.0


# --- configurations

LOAD = {"workload": {"num_requests": 20, "output_lens": 40}}
EAGLE33 = {
    "kind": "roofline",
    "target": {"model": "vicuna-33b", "gpu": "l40", "tp": 4},
    "draft": {"model": "eagle-vicuna-33b", "gpu": "l40"},
}


def config(**tree: Any) -> RunConfig:
    return parse_config({**LOAD, **tree})


def test_sizes_come_from_the_models() -> None:
    traffic = config(cost=EAGLE33, link={"preset": "pcie4-x16", "payload": "target_probs"}).build_traffic()
    assert (traffic.vocab_size, traffic.state_size, traffic.at_drafter) == (32000, 6656, True)
    eagle3 = {
        "kind": "roofline",
        "target": {"model": "llama-3.3-70b", "gpu": "h100", "tp": 4},
        "draft": {"model": "eagle3-llama-3.3-70b", "gpu": "h100"},
    }
    traffic = config(cost=eagle3, link={"preset": "nvlink4", "payload": "draft_probs"}).build_traffic()
    assert (traffic.vocab_size, traffic.draft_vocab_size, traffic.state_size) == (128_256, 32_000, 3 * 8192)
    assert traffic.link == load_link("nvlink4")
    traffic = config(link={"preset": "pcie4-x16", "payload": "target_probs"}).build_traffic()
    assert (traffic.vocab_size, traffic.state_size) == (151_936, 0)


def test_a_link_by_its_name_or_its_figures() -> None:
    assert config(link="NVLink3").build_traffic().link == load_link("nvlink3")
    own = config(link={"latency_s": 1e-3, "bytes_per_s": 1e9}).build_traffic().link
    assert (own.latency_s, own.bytes_per_s) == (1e-3, 1e9)
    faster = config(link={"preset": "nvlink3", "latency_s": 1e-6}).build_traffic().link
    assert (faster.latency_s, faster.bytes_per_s) == (1e-6, load_link("nvlink3").bytes_per_s)


@pytest.mark.parametrize(
    "tree",
    [
        {"mode": "ar"},
        {"mode": "sd"},
        {"mode": "psd", "devices": {"colocated": True}},
        {"mode": "psd", "drafting": {"method": "ngram"}},
    ],
)
def test_there_is_no_link_within_one_group(tree: dict[str, Any]) -> None:
    """So that `compare` can give all modes the same tables."""
    run = config(link="pcie4-x16", **tree)
    assert run.build_traffic() is None
    assert run.build_world().to_drafter is None


def test_sd_with_devices_of_its_drafters_own_has_one() -> None:
    assert config(link="pcie4-x16", mode="sd", devices={"colocated": False}).build_world().to_drafter is not None


def test_replicas_that_share_a_drafter_have_links_of_their_own() -> None:
    star = config(link="pcie4-x16", devices={"num_replicas": 3}).build_star()
    first, *others = star.replicas
    assert all(other.drafter is first.drafter for other in others)
    assert len({id(replica.to_drafter) for replica in star.replicas}) == 3


def test_the_authors_payload_costs_what_its_bytes_take() -> None:
    """Qwen3-32B and 1.7B at k = 3, 16 + 16 requests, V = 49.3 and t = 49.5 ms: 78 MB over PCIe 4 take 2.9 ms."""
    speeds = {}
    for payload in (None, "token_ids", "target_probs"):
        link = {} if payload is None else {"link": {"preset": "pcie4-x16", "payload": payload}}
        run = parse_config({"workload": {"num_requests": 64, "output_lens": 64}, **link})
        watch = Watch(run.build_world(), Scheduler(run.scheduler_config(), run.build_policies()))
        speeds[payload] = period_s(watch)
    assert speeds["token_ids"] == pytest.approx(speeds[None], rel=0.001)
    assert speeds["target_probs"] - speeds[None] == pytest.approx(0.0493 + 0.0029 - 0.0495, rel=0.1)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"link": "pcie4"}, "link.preset: no link 'pcie4'; did you mean 'pcie4-x16'"),
        ({"link": "token-ring"}, "link.preset: no link 'token-ring'"),
        ({"link": {}}, 'link.preset: is missing; give a preset, or write link = "pcie4-x16"'),
        ({"link": {"latency_s": 1e-5}}, "link.bytes_per_s: is missing; add it"),
        ({"link": {"latency_s": 20.0, "bytes_per_s": 1e9}}, "link.latency_s: is 20.0, must be .* <= 10"),
        ({"link": {"preset": "nvlink4", "bytes_per_s": 0.0}}, "link.bytes_per_s: is 0, must be >= 1"),
        ({"link": {"preset": "nvlink4", "payload": "probs"}}, "link.payload: is 'probs'; did you mean 'draft_probs'"),
        ({"link": {"preset": "nvlink4", "bandwith": 1}}, "link.bandwith: unknown key"),
        (
            {
                "cost": {"verify_base_s": 0.05, "kind": "constant"},
                "link": {"preset": "nvlink4", "payload": "target_probs"},
            },
            'link.vocab_size: is missing; payload "target_probs" sends',
        ),
        ({"mode": "pearl", "link": "nvlink4"}, "link: isn't modelled in mode pearl"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_field(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(**tree)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1.0), "Link.latency_s is -1"),
        ((math.nan, 1.0), "Link.latency_s is nan"),
        ((0.0, 0.0), "Link.peak_bytes_per_s is 0"),
        ((0.0, 1.0, 1.5), "Link.efficiency is 1.5"),
    ],
)
def test_impossible_links(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(*arguments)


def test_impossible_traffic() -> None:
    with pytest.raises(ValueError, match="payload is 'prob'; did you mean"):
        Traffic(INSTANT, "prob")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='vocab_size is 0, but payload "draft_probs"'):
        Traffic(INSTANT, "draft_probs")
    with pytest.raises(ValueError, match="state_size is -1"):
        Traffic(INSTANT, state_size=-1)
    requests = [SimRequest("a", 0.0, 9, 9, 9)]
    with pytest.raises(ValueError, match="exclude each other"):
        SimBackend(requests, ConstantCost(1.0), ConstantRate(0.5), colocated=True, traffic=Traffic(INSTANT))


def test_the_command_line_takes_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "workload.num_requests=4", "--set", "link=ib-ndr", "--set", "link.payload=target_probs"]
    assert run_cli(["simulate", "--json", "-", *options[:4]]) == 0
    assert '"completed": 4' in capsys.readouterr().out
    assert run_cli(["simulate", "--set", "link=ib-ndx"]) == 2
    assert "did you mean 'ib-ndr'" in capsys.readouterr().err

"""Drafting methods: what they cost by hand, what they ask of devices and KV, what doesn't fit together."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.cli import run_cli
from minedraft.commands.simulate import new_collector, simulate
from minedraft.config import ConfigError, RunConfig, parse_config
from minedraft.config_drafting import DraftingTable
from minedraft.engine import Engine
from minedraft.kv_cache import NoPool
from minedraft.scheduler import Scheduler
from minedraft.sim import operator_tables
from minedraft.sim.cost import ConstantCost, LinearCost
from minedraft.sim.device_group import DeviceGroup
from minedraft.sim.gpus import load_gpu
from minedraft.sim.measured import Measured
from minedraft.sim.methods import METHODS, LookupCost, LookupMatches, check_drafter, heads_for, in_one_pass, method_of
from minedraft.sim.models import load_model
from minedraft.sim.presets import read_presets
from minedraft.sim.roofline import Roofline, RooflineSettings
from minedraft.sim.steps import StepCost
from minedraft.summary import Summary
from minedraft.work import DraftResult, DraftWork, Event, VerifyResult, VerifyWork, Work, WorkDone, ZeroDraft

BARE: dict[str, Any] = {"overhead_s": 0.0, "overhead_per_seq_s": 0.0}
HEADS = [name for name, entry in read_presets("models.toml").items() if entry.get("num_fused_inputs")]


def roofline(model: str, gpu: str, tp: int = 1, **settings: Any) -> Roofline:
    return Roofline(DeviceGroup(load_model(model), load_gpu(gpu), tp), RooflineSettings(**settings))


def verify(num_seqs: int, k: int, context: int) -> VerifyWork:
    n = num_seqs
    columns = (0,) * n, (0,) * n, (context,) * n, (1,) * n, (k,) * n, (True,) * n
    return VerifyWork(0, 0, tuple(f"r{i}" for i in range(n)), *columns, (0,) * 13, (n,), ())


def draft(k: tuple[int, ...], context: int = 100, new: int = 1) -> DraftWork:
    n = len(k)
    return DraftWork(0, 0, tuple(f"r{i}" for i in range(n)), (0,) * n, (0,) * n, (context,) * n, (new,) * n, k, ())


def roofline_table(target: str, drafter: str | None, gpu: str = "h100", tp: int = 1, **more: Any) -> dict[str, Any]:
    table: dict[str, Any] = {"kind": "roofline", "target": {"model": target, "gpu": gpu, "tp": tp, **more}}
    return table if drafter is None else {**table, "draft": {"model": drafter, "gpu": gpu, **more}}


def config(**tree: Any) -> RunConfig:
    return parse_config({"workload": {"num_requests": 24, "prompt_lens": 40, "output_lens": 30}, **tree})


def summary_of(run: RunConfig) -> Summary:
    outcome = simulate(run, new_collector(run))
    assert outcome.error is None
    return outcome.summary


class Watch:
    """A backend that keeps every work, and every result by the id of its work."""

    def __init__(self, run: RunConfig) -> None:
        self.backend = run.build_world()
        self.works: list[Work] = []
        self.results: dict[int, WorkDone] = {}
        self.scheduler = Scheduler(run.scheduler_config(), run.build_policies())
        Engine(self.scheduler, self).run()

    def now(self) -> float:
        return float(self.backend.now())

    def ready(self) -> bool:
        return bool(self.backend.ready())

    def submit(self, work: Work) -> None:
        self.works.append(work)
        self.backend.submit(work)

    def next_event(self) -> Event | None:
        event: Event | None = self.backend.next_event()
        if isinstance(event, WorkDone):
            self.results[event.work_id] = event
        return event


# --- the methods


def test_names_are_the_same_everywhere() -> None:
    annotation = DraftingTable.model_fields["method"].annotation
    assert set(METHODS) == set(get_args(get_args(annotation)[0]))
    assert all(name == method.name for name, method in METHODS.items())


@pytest.mark.parametrize("name", HEADS)
def test_every_preset_head_fits_a_preset_target(name: str) -> None:
    head = load_model(name)
    target = load_model(name.partition("-")[2])
    method = method_of(head)
    assert name in heads_for(target, method)
    check_drafter(method, target, head)
    assert head.num_params < target.num_params / 3
    assert head.state_size == method.num_states * target.hidden_size


def test_heads_are_found_for_variants_of_a_target() -> None:
    assert heads_for(load_model("llama-3.3-70b-awq"), METHODS["eagle3"]) == ("eagle3-llama-3.3-70b",)
    assert heads_for(load_model("qwen3-32b-fp8"), METHODS["eagle3"]) == ("eagle3-qwen3-32b",)
    assert heads_for(load_model("qwen3-14b"), METHODS["eagle3"]) == ()


# --- what they cost


def test_an_eagle_head_on_l40_drafts_far_faster_than_its_target_verifies() -> None:
    """The paper's setting (arXiv 2603.18016): Vicuna-33B on four L40, its EAGLE head on a fifth, eager mode."""
    for model, least in (("vicuna-33b", 4.0), ("vicuna-13b", 3.0)):
        eager = {"cuda_graph": False}
        cost = StepCost(roofline(model, "l40", 4, **eager), roofline(f"eagle-{model}", "l40", **eager))
        assert cost.verify_s(verify(16, 3, 400)) > least * cost.draft_s(draft((3,) * 16, 400))


def test_an_eagle_pass_by_hand() -> None:
    """One layer, the projection of two inputs and the target's output head are read once per pass."""
    shape, gpu = load_model("eagle-vicuna-33b"), load_gpu("l40")
    layer = 4 * 6656 * 6656 + 3 * 6656 * 17920
    read_s = 2 * (layer + 2 * 6656 * 6656 + 32000 * 6656) / (gpu.memory_bytes_per_s * gpu.bandwidth_efficiency)
    free = Roofline(DeviceGroup(shape, replace(gpu, compute_exposed=0.0)), RooflineSettings(kernel_gap_s=0.0, **BARE))
    cost = StepCost(free, free)
    for k in (1, 2, 5):
        assert cost.draft_s(draft((k,), context=0)) == pytest.approx(k * read_s, rel=2e-3)


def test_an_eagle3_head_joins_states_in_its_first_pass_only() -> None:
    run = config(cost=roofline_table("llama-3.1-8b", "eagle3-llama-3.1-8b", **BARE), mode="psd")
    cost = run.build_cost()
    head = load_model("eagle3-llama-3.1-8b")
    first = Roofline(DeviceGroup(head, load_gpu("h100")), RooflineSettings(**BARE))
    later = Roofline(DeviceGroup(replace(head, num_fused_inputs=0), load_gpu("h100")), RooflineSettings(**BARE))
    wanted = first.step_s(8, 8, 800, 808, 8) + sum(later.step_s(8, 8, 808 + 8 * i, 816 + 8 * i, 8) for i in range(3))
    assert cost.draft_s(draft((4,) * 8)) == pytest.approx(wanted, rel=1e-12)
    assert later.step_s(8, 8, 800, 808, 8) < 0.95 * first.step_s(8, 8, 800, 808, 8)


def test_one_pass_of_a_constant_cost() -> None:
    sequential = ConstantCost(verify_base_s=0.05, draft_base_s=0.001, draft_per_token_s=0.004, draft_ingest_s=0.002)
    parallel = in_one_pass(sequential)
    assert [parallel.draft_s(draft((k,))) for k in (0, 1, 3, 9)] == pytest.approx([0.002, 0.005, 0.005, 0.005])
    assert parallel.draft_s(draft((1,))) == sequential.draft_s(draft((1,)))
    assert parallel.verify_s(verify(2, 3, 9)) == sequential.verify_s(verify(2, 3, 9))


def test_one_pass_of_a_linear_cost() -> None:
    sequential = LinearCost(
        draft_base_s=1.0,
        draft_per_seq_s=0.1,
        draft_per_token_s=0.01,
        draft_per_context_token_s=0.0001,
        draft_prefill_base_s=7.0,
        draft_prefill_per_seq_s=0.5,
        draft_prefill_per_token_s=0.05,
    )
    parallel = in_one_pass(sequential)
    # A base, 3 + 2 tokens, two contexts of 100, and one entry that ingests two tokens; drafting ones ingest one each.
    wanted = 1.0 + 5 * 0.11 + 200 * 0.0001 + 0.5 + 4 * 0.05
    assert parallel.draft_s(draft((3, 2, 0), new=2)) == pytest.approx(wanted)
    for alike in ((1, 1, 0), (0, 0)):
        assert parallel.draft_s(draft(alike, new=2)) == pytest.approx(sequential.draft_s(draft(alike, new=2)))


def test_one_pass_of_a_step_cost_by_hand() -> None:
    """An entry with n new tokens and k drafts has n + k - 1 rows and k logits; one that ingests has n and none."""
    calls: list[tuple[Any, ...]] = []

    class Steps:
        def step_s(self, *arguments: Any) -> float:
            calls.append(arguments)
            return 1.0

    cost = in_one_pass(StepCost(Steps(), Steps()))
    assert cost.draft_s(draft((4, 1, 0), context=10, new=2)) == 1.0
    pairs = (5 * 10 + 5 * 6 / 2) + 2 * (2 * 10 + 2 * 3 / 2)
    assert calls == [(3, 5 + 2 + 2, 30, pairs, 5)]


def test_parallel_drafting_does_not_depend_on_k_until_it_computes() -> None:
    cost = in_one_pass(StepCost(roofline("qwen3-8b", "h100"), roofline("qwen3-0.6b", "h100")))
    times = {k: cost.draft_s(draft((k,) * 16, 400)) for k in (1, 2, 8, 64)}
    assert times[8] < 1.05 * times[1]
    assert times[64] > 1.5 * times[1]


@given(
    drafter=st.sampled_from(["qwen3-0.6b", "eagle3-qwen3-8b", "peagle-qwen3-8b"]),
    drafts=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    context=st.integers(0, 5000),
    new=st.integers(1, 3),
    cuda_graph=st.booleans(),
)
def test_one_pass_never_takes_longer_than_k(
    drafter: str, drafts: list[int], context: int, new: int, cuda_graph: bool
) -> None:
    steps = roofline(drafter, "h100", cuda_graph=cuda_graph)
    sequential = StepCost(steps, steps)
    work = draft(tuple(drafts), context, new)
    parallel_s, sequential_s = in_one_pass(sequential).draft_s(work), sequential.draft_s(work)
    assert parallel_s <= sequential_s * (1 + 1e-9)
    if max(drafts) < 2:
        assert parallel_s == pytest.approx(sequential_s, rel=1e-12)


def test_costs_that_can_not_be_told_to_draft_in_one_pass() -> None:
    with pytest.raises(ValueError, match="a LookupCost can't draft in one pass"):
        in_one_pass(LookupCost(ConstantCost(1.0)))


def test_lookups_by_hand() -> None:
    """One after another on the host: the two that draft, behind 100 + 1 tokens each."""
    cost = LookupCost(ConstantCost(verify_base_s=0.05), lookup_s=1e-3, lookup_per_context_token_s=1e-5)
    assert cost.draft_s(draft((4, 0, 4))) == pytest.approx(2 * 1e-3 + 202 * 1e-5)
    assert cost.verify_s(verify(2, 3, 9)) == 0.05
    assert LookupCost(ConstantCost(0.05)).draft_s(draft((4,) * 64, 4096)) < 5e-4


@pytest.mark.parametrize("field", ["lookup_s", "lookup_per_context_token_s"])
def test_impossible_lookup_times(field: str) -> None:
    with pytest.raises(ValueError, match=f"LookupCost.{field} is -1"):
        LookupCost(ConstantCost(1.0), **{field: -1.0})


needs_tables = pytest.mark.skipif(
    importlib.util.find_spec(operator_tables.PACKAGE) is None, reason="the extra timing isn't installed"
)


@needs_tables
@pytest.mark.parametrize("name", ["eagle3-llama-3.1-8b", "eagle3-qwen3-8b"])
def test_heads_from_measured_operators(name: str) -> None:
    """They agree with the roofline, and cost more than their layer without what makes a head of it."""
    group = DeviceGroup(load_model(name), load_gpu("h100"))
    plain = replace(group, shape=replace(group.shape, num_fused_inputs=0, attention_input_size=0))
    for rows in (1, 16, 64):
        arguments = (rows, rows, 500.0 * rows, 501.0 * rows, rows)
        seconds = Measured(group, "h100").step_s(*arguments)
        assert seconds == pytest.approx(Roofline(group).step_s(*arguments), rel=0.3)
        extra = Measured(group, "h100").step_s(*arguments) - Measured(plain, "h100").step_s(*arguments)
        weights = 3 * 4096 * 4096 + 4096 * 48 * 128
        assert extra == pytest.approx(2 * weights / (3.35e12 * 0.8), rel=0.5)


def test_profiles_price_all_methods_but_know_no_shapes(tmp_path: Path) -> None:
    axes = {"num_seqs": [1, 64], "num_new_tokens": [1, 200], "context": [0, 400]}
    table = {"format": "minedraft-profile/1", **axes, "seconds": [[[0.01, 0.01]] * 2] * 2}
    file = tmp_path / "times.json"
    file.write_text(json.dumps(table))
    cost = {"kind": "profile", "target": {"path": str(file)}, "draft": {"path": str(file)}}
    tables: list[dict[str, Any]] = [{}, {"method": "eagle"}, {"parallel_drafting": True}, {"method": "ngram"}]
    passes = [config(cost=cost, drafting=table).build_cost().draft_s(draft((3, 3))) for table in tables]
    assert passes == pytest.approx([0.03, 0.03, 0.01, 0.0], abs=1e-5)
    with pytest.raises(ConfigError, match=r"link.hidden_size: is missing; 'eagle' reads hidden states"):
        config(cost=cost, drafting={"method": "eagle"}, link="nvlink4")


# --- what they ask of the core and the devices


@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_a_head_takes_in_nothing_that_the_target_has_not_computed(mode: str, method: str) -> None:
    """A draft model ingests prompts before the target does; a head would have no states for them."""
    table = {"kind": "constant", "verify_base_s": 0.03, "draft_base_s": 0.01, "prefill_s": 0.03}
    scheduler = {"max_num_batched_tokens": 64, "max_batch_size": 4}
    watch = Watch(config(mode=mode, cost=table, drafting={"method": method}, scheduler=scheduler))
    computed: dict[str, int] = {}
    ahead = 0
    done = set()
    for work in watch.works:
        if isinstance(work, DraftWork):
            for name, kept, new in zip(work.request_ids, work.num_computed, work.num_new, strict=True):
                # The last committed token comes out of the states before it: it is embedded, not computed.
                ahead += kept + new > computed.get(name, 0) + 1
        else:
            result = watch.results[work.work_id].result
            assert isinstance(result, VerifyResult)
            columns = zip(work.request_ids, work.num_computed, work.num_new, result.num_accepted, strict=True)
            computed |= {name: kept + new + accepted for name, kept, new, accepted in columns}
            done.add(work.work_id)
    assert done
    assert bool(ahead) == (method == "draft_model")
    assert watch.scheduler.config.draft_follows_target == (method != "draft_model")


@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize(
    "cost", [{"kind": "paper"}, roofline_table("qwen3-8b", "qwen3-0.6b"), roofline_table("qwen3-8b", None)]
)
def test_lookups_need_no_device_and_no_kv(mode: str, cost: dict[str, Any]) -> None:
    run = config(mode=mode, cost=cost, drafting={"method": "ngram"}, devices={"round_overhead_s": 0.001})
    assert run.num_draft_devices == 0
    world = run.build_world()
    assert world.drafter is world.host
    watch = Watch(run)
    state = watch.scheduler.state
    assert isinstance(state.draft_pool, NoPool)
    drafts = [work for work in watch.works if isinstance(work, DraftWork)]
    assert sum(sum(work.num_draft) for work in drafts) > 500
    assert all(0 not in work.num_draft for work in drafts), "a lookup has nothing to ingest"
    spans = [watch.results[work.work_id] for work in watch.works if isinstance(work, VerifyWork)]
    for before, after in pairwise(sorted((event.started_s, event.ended_s) for event in spans)):
        assert before[1] <= after[0]
    figures = summary_of(run)
    assert figures.num_draft_devices == 0
    assert figures.total_output_tokens == 24 * 30


def test_lookups_leave_the_target_all_its_memory() -> None:
    cost = roofline_table("qwen3-8b", "qwen3-0.6b")
    blocks = [
        config(mode=mode, cost=cost, drafting=table).scheduler_config().num_target_blocks
        for mode, table in (("ar", {}), ("sd", {"method": "ngram"}), ("sd", {}))
    ]
    # Plain decoding with a drafter configured holds none of it either.
    assert blocks[0] == blocks[1] > blocks[2]


def test_lookups_take_host_time() -> None:
    """One batch in sd: a round is the lookups, then the host's own time, then the target's."""
    cost = {"kind": "constant", "verify_base_s": 0.05}
    drafting = {"method": "ngram", "lookup_s": 0.002, "lookup_per_context_token_s": 0.0}
    watch = Watch(
        parse_config(
            {
                "mode": "sd",
                "cost": cost,
                "drafting": drafting,
                "devices": {"round_overhead_s": 0.003},
                "workload": {"num_requests": 4, "prompt_lens": 40, "output_lens": 30},
            }
        )
    )
    starts = [watch.results[work.work_id].started_s for work in watch.works if isinstance(work, VerifyWork)]
    assert starts[2] - starts[1] == pytest.approx(4 * 0.002 + 0.003 + 0.05)


def test_lookups_survive_what_would_end_a_drafter() -> None:
    faults = {"outages": [{"at_s": 0.1}], "pauses": [{"device": "drafter", "at_s": 0.0, "duration_s": 100.0}]}
    plain, faulty = (summary_of(config(drafting={"method": "ngram"}, faults=table)) for table in ({}, faults))
    assert plain.makespan == faulty.makespan


def test_the_same_luck_whoever_drafts() -> None:
    """Acceptance is the acceptance model's: with the same one, methods differ in time alone."""
    cost = roofline_table("qwen3-8b", "qwen3-0.6b")
    tables: list[dict[str, Any]] = [{}, {"parallel_drafting": True}, {"method": "ngram"}]
    runs = [summary_of(config(mode="sd", cost=cost, drafting=table)) for table in tables]
    assert len({(run.spec_decode_draft_tokens, run.spec_decode_accepted_tokens) for run in runs}) == 1
    assert runs[0].makespan > runs[1].makespan > runs[2].makespan


# --- lookups that find nothing


def matches(rate: float, seed: int = 0) -> Iterator[bool]:
    model = LookupMatches(rate, seed)
    for i in range(4000):
        yield model(draft((3, 0), context=i)) == (3, 0)


def test_matches_are_as_frequent_as_asked_and_repeat() -> None:
    assert list(matches(0.54)) == list(matches(0.54))
    assert list(matches(0.54)) != list(matches(0.54, seed=1))
    assert sum(matches(0.54)) == pytest.approx(0.54 * 4000, abs=4 * (0.54 * 0.46 * 4000) ** 0.5)
    assert all(matches(1.0))
    assert not any(matches(0.0))
    assert all(more >= less for less, more in zip(matches(0.3), matches(0.6), strict=True))


def test_lookups_without_a_match_verify_nothing() -> None:
    watch = Watch(config(mode="sd", drafting={"method": "ngram", "match_rate": 0.5}, workload={"num_requests": 100}))
    drafts = [work for work in watch.works if isinstance(work, DraftWork)]
    asked = found = failed = 0
    for work in drafts:
        result = watch.results[work.work_id].result
        assert isinstance(result, DraftResult)
        asked += sum(work.num_draft)
        found += sum(result.num_drafted)
        assert all(count in (0, k) for count, k in zip(result.num_drafted, work.num_draft, strict=True))
    for step in watch.works:
        if isinstance(step, VerifyWork):
            failed += step.zero_draft[ZeroDraft.DRAFT_FAILED]
    assert found / asked == pytest.approx(0.5, abs=0.03)
    assert failed == sum(watch.results[work.work_id].result[0].count(0) for work in drafts)


# --- configurations


def test_the_method_follows_from_the_model() -> None:
    for target, drafter, tp, name in (
        ("vicuna-13b", "eagle-vicuna-13b", 4, "eagle"),
        ("llama-3.1-8b", "eagle3-llama-3.1-8b", 1, "eagle3"),
        ("llama-3.1-70b", "llama-3.1-8b", 4, "draft_model"),
    ):
        run = config(cost=roofline_table(target, drafter, tp=tp))
        assert run.drafting.build(run.cost) == METHODS[name]
        assert run.scheduler_config().draft_follows_target == METHODS[name].is_head


def test_an_eagle3_head_from_its_config_json(tmp_path: Path) -> None:
    """Fields as public EAGLE-3 heads have them; one for Llama-3.3-70B is narrower than its target."""
    file = tmp_path / "config.json"
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 6144,
        "target_hidden_size": 8192,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "intermediate_size": 16384,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    file.write_text(json.dumps(fields))
    head = load_model(str(file))
    assert (head.num_fused_inputs, head.state_size, head.head_vocab_size) == (3, 3 * 8192, 32000)
    layer = 2 * 6144 * (48 + 16) * 128 + 6144 * 6144 + 3 * 6144 * 16384
    assert head.always_read_params == layer + 3 * 8192 * 6144
    check_drafter(METHODS["eagle3"], load_model("llama-3.3-70b"), head)
    with pytest.raises(ValueError, match=r"reads states of 8192 numbers, but 'llama-3.1-8b' has 4096"):
        check_drafter(METHODS["eagle3"], load_model("llama-3.1-8b"), head)


def test_an_eagle_head_from_its_config_json(tmp_path: Path) -> None:
    """An EAGLE head's file looks like a model of one layer; `num_fused_inputs = 2` says what it is."""
    fields = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drafter = {"path": str(tmp_path), "gpu": "l40", "num_fused_inputs": 2}
    cost = roofline_table("vicuna-13b", "eagle-vicuna-13b", "l40", 4)
    preset, from_file = (config(cost=table).build_cost() for table in (cost, {**cost, "draft": drafter}))
    assert preset.draft_s(draft((3, 3))) == from_file.draft_s(draft((3, 3)))
    with pytest.raises(ConfigError, match=r"a whole model, but drafting.method is 'eagle'"):
        config(cost={**cost, "draft": {"path": str(tmp_path), "gpu": "l40"}}, drafting={"method": "eagle"})


def test_a_deeper_head_reads_wider_in_its_first_layer_only() -> None:
    """P-EAGLE: four layers, the first of which attends to [embedding, joined states]."""
    head = load_model("peagle-qwen3-8b")
    layer = 4096 * (32 + 16) * 128 + 4096 * 4096 + 3 * 4096 * 12288
    assert head.always_read_params == 4 * layer + 4096 * 48 * 128 + 3 * 4096 * 4096


EAGLE33 = roofline_table("vicuna-33b", "eagle-vicuna-33b", "l40", 4)
MODEL8 = roofline_table("qwen3-8b", "qwen3-0.6b")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"drafting": {"method": "eagel3"}}, "drafting.method: is 'eagel3'; did you mean 'eagle3'"),
        ({"drafting": {"method": "medusa"}}, "drafting.method: is 'medusa'; .*ngram"),
        ({"drafting": {"metod": "eagle"}}, "drafting.metod: unknown key; did you mean 'method'"),
        (
            {"cost": MODEL8, "drafting": {"method": "eagle3"}},
            "cost.draft.model: is 'qwen3-0.6b', a whole model, but drafting.method is 'eagle3'; take 'eagle3-qwen3-8b'",
        ),
        (
            {"cost": EAGLE33, "drafting": {"method": "draft_model"}},
            "cost.draft.model: is 'eagle-vicuna-33b', a head of the kind 'eagle', .*; set drafting.method = 'eagle'",
        ),
        ({"cost": EAGLE33, "drafting": {"method": "eagle3"}}, "a head of the kind 'eagle', but"),
        (
            {"cost": roofline_table("vicuna-33b", "eagle-vicuna-13b", "l40", 4)},
            "reads states of 5120 numbers, but 'vicuna-33b' has 6656; take .* such as 'eagle-vicuna-33b'",
        ),
        ({"drafting": {"method": "eagle"}}, "drafting.method: is 'eagle', but cost kind \"paper\" has times of draft"),
        ({"drafting": {"parallel_drafting": True}}, 'drafting.parallel_drafting: is true, but cost kind "paper"'),
        (
            {"drafting": {"method": "ngram", "parallel_drafting": True}},
            'drafting.parallel_drafting: is true, but method "ngram" has no passes',
        ),
        ({"drafting": {"lookup_s": 1e-5}}, "drafting.lookup_s: is given, but method is 'draft_model'"),
        ({"drafting": {"match_rate": 0.5}}, "drafting.match_rate: is given, but method is 'draft_model'"),
        ({"drafting": {"method": "ngram", "match_rate": 1.5}}, r"drafting.match_rate: is 1.5, must be in \[0, 1\]"),
        ({"drafting": {"method": "ngram", "lookup_s": 20}}, "drafting.lookup_s: is 20"),
        ({"cost": roofline_table("qwen3-8b", None)}, "cost.draft: is missing"),
        ({"mode": "pearl", "drafting": {"method": "ngram"}}, "drafting.method: is 'ngram', which can't draft during"),
        ({"mode": "pearl", "cost": EAGLE33}, "drafting.method: is 'eagle', which can't draft during"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_field(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(**tree)
    assert "\n" not in str(caught.value)


def test_real_worlds_refuse_tables_of_the_simulated_one() -> None:
    for table in ({"drafting": {"method": "ngram"}}, {"link": "nvlink4"}):
        with pytest.raises(ConfigError, match="is of the simulated world only"):
            parse_config(table, world=False)


def test_the_command_line_runs_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[workload]\nnum_requests = 4\noutput_lens = 20\n[cost]\nkind = "roofline"\n'
        'target = {model = "qwen3-8b", gpu = "h100"}\ndraft = {model = "eagle3-qwen3-8b", gpu = "h100"}\n'
    )
    for options in (
        ["drafting.method=eagle3"],
        ["drafting.method=ngram", "drafting.match_rate=0.5"],
        ["cost.draft.model=peagle-qwen3-8b", "drafting.parallel_drafting=true"],
        ["cost.draft.model=qwen3-0.6b"],
    ):
        arguments = [part for option in options for part in ("--set", option)]
        assert run_cli(["simulate", str(file), "--json", "-", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["completed"] == 4
    assert run_cli(["simulate", str(file), "--set", "drafting.method=mpt"]) == 2
    assert "did you mean 'mtp'" in capsys.readouterr().err

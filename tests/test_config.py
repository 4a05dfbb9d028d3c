"""Configurations: defaults, what may be left out, and the one line for everything that is wrong."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BeforeValidator

from minedraft.commands.example_config import EXAMPLE
from minedraft.commands.variants import Axes, make_variants
from minedraft.config import (
    SET_BY_GPUS,
    ConfigError,
    RunConfig,
    load_config,
    named_variants,
    parse_config,
    read_tree,
)
from minedraft.config_base import Table
from minedraft.config_cost import ConstantCostTable, LinearCostTable
from minedraft.config_shorthands import TEXTS, as_table
from minedraft.config_tables import PoliciesTable, SchedulerTable
from minedraft.config_tree import Override, merged, parse_assignment, parse_values, put
from minedraft.config_workload import NamedWorkloadTable, guess_trace_format
from minedraft.policy import SLOTS
from minedraft.scheduler_config import SchedulerConfig
from minedraft.sim.cost import ConstantCost, LinearCost, paper_cost
from minedraft.sim.workload import NAMED_WORKLOADS


def fault(tree: dict[str, Any], **options: Any) -> str:
    """The line that a tree earns."""
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, source="run.toml", **options)
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- defaults and shorthands


def test_the_defaults_are_the_papers_setting() -> None:
    config = parse_config({})
    assert config.mode == "psd"
    assert config.build_cost() == paper_cost("qwen3-1.7b")
    assert config.scheduler_config() == SchedulerConfig(num_speculative_tokens=3)
    assert (config.devices.num_target_devices, config.num_draft_devices) == (4, 1)


def test_the_example_file_says_what_holds_by_default() -> None:
    example = parse_config(tomllib.loads(EXAMPLE))
    assert example.policy_specs() == parse_config({}).policy_specs()
    assert example.model_copy(update={"policies": PoliciesTable()}) == parse_config({})


@pytest.mark.parametrize(
    ("mode", "num_batches", "has_draft_pool", "num_draft_devices", "colocated"),
    [("ar", 1, False, 0, False), ("sd", 1, True, 0, True), ("psd", 2, True, 1, False)],
)
def test_a_mode_sets_batches_pools_and_devices(
    mode: str, num_batches: int, has_draft_pool: bool, num_draft_devices: int, colocated: bool
) -> None:
    config = parse_config({"mode": mode})
    limits = config.scheduler_config()
    assert (limits.num_batches, limits.num_draft_blocks > 0) == (num_batches, has_draft_pool)
    assert (config.num_draft_devices, config.colocated) == (num_draft_devices, colocated)
    assert config.policy_specs()["mode"] == {"name": "fixed", "mode": mode}


def test_sd_may_have_devices_for_its_drafter() -> None:
    config = parse_config({"mode": "sd", "devices": {"colocated": False, "num_draft_devices": 2}})
    assert config.num_draft_devices == 2
    world = config.build_world()
    assert world.drafter is not world.target


def test_tables_have_the_fields_and_defaults_of_what_they_build() -> None:
    def defaults(cls: Any) -> dict[str, Any]:
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}

    def table_defaults(table: type[Table]) -> dict[str, Any]:
        return {
            name: dataclasses.MISSING if field.is_required() else field.default
            for name, field in table.model_fields.items()
            if name != "kind"
        }

    ours, theirs = table_defaults(SchedulerTable), defaults(SchedulerConfig)
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"num_batches", "num_speculative_tokens"}
    assert table_defaults(ConstantCostTable) == defaults(ConstantCost)
    assert table_defaults(LinearCostTable) == defaults(LinearCost)
    assert tuple(PoliciesTable.model_fields) == SLOTS
    assert set(NamedWorkloadTable.model_fields["kind"].annotation.__args__) == set(NAMED_WORKLOADS)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ({"workload": {"output_lens": 9}}, {"workload": {"output_lens": {"kind": "fixed", "tokens": 9}}}),
        ({"workload": {"arrivals": "at-once"}}, {"workload": {"arrivals": {"kind": "at-once"}}}),
        (
            {"workload": {"arrivals": {"concurrency": 8}}},
            {"workload": {"arrivals": {"kind": "closed-loop", "concurrency": 8}}},
        ),
        (
            {"workload": {"arrivals": {"rate": 2, "cv": 3}}},
            {"workload": {"arrivals": {"kind": "gamma", "rate": 2, "cv": 3}}},
        ),
        ({"acceptance": {"alpha": 0.3}}, {"acceptance": {"kind": "constant", "alpha": 0.3}}),
        (
            {"acceptance": {"synthetic_acceptance_length": 2}},
            {"acceptance": {"kind": "synthetic", "synthetic_acceptance_length": 2.0}},
        ),
        ({"cost": {"drafter": "qwen3-4b"}}, {"cost": {"kind": "paper", "drafter": "qwen3-4b"}}),
        ({"policies": {"draft_length": "fixed,k=2"}}, {"policies": {"draft_length": "fixed,k=2"}}),
    ],
)
def test_what_the_other_keys_tell_may_be_left_out(short: dict[str, Any], whole: dict[str, Any]) -> None:
    assert parse_config(short) == parse_config(whole)


def test_a_policy_may_be_text_or_a_table() -> None:
    text = parse_config({"policies": {"draft_length": "fixed,k=2"}})
    table = parse_config({"policies": {"draft_length": {"name": "fixed", "k": 2}}})
    assert text.policy_specs() == table.policy_specs()
    assert text.policy_specs()["draft_length"] == {"name": "fixed", "k": 2}


def test_a_configuration_survives_json() -> None:
    config = parse_config(
        {
            "mode": "sd",
            "workload": {
                "arrivals": {"kind": "gamma", "rate": 3, "cv": 2.0},
                "aborts": {"probability": 0.1, "mean_patience_s": 1},
            },
            "acceptance": {"synthetic_acceptance_rates": [0.9, 0.5, 0.1]},
            "faults": {"outages": [{"at_s": 1.0}], "pauses": [{"device": "target", "at_s": 1.0, "duration_s": 2.0}]},
            "slo": {"ttft_ms": 100.0},
        }
    )
    assert parse_config(config.to_dict()) == config


def test_scheduler_fields_make_the_same_limits() -> None:
    config = parse_config({"mode": "ar", "scheduler": {"max_model_len": 512}}).scheduler_config()
    assert SchedulerConfig(**config.given()) == config


@pytest.mark.parametrize(
    "workload",
    [
        {"arrivals": {"kind": "poisson", "rate": 4.0}, "prompt_lens": {"mean": 30, "p50": 20}},
        {"arrivals": {"kind": "closed-loop", "concurrency": 3}},
        {"kind": "azure-conv-like", "num_requests": 5, "rate": 2.0},
        {"kind": "azure-code-like", "num_requests": 5},
        {"aborts": {"probability": 0.5, "mean_patience_s": 1.0}, "max_tokens": 7, "max_draft_tokens": 1},
    ],
)
def test_workloads_are_built(workload: dict[str, Any]) -> None:
    config = parse_config({"workload": workload})
    assert len(list(config.build_workload())) == config.workload.num_requests


# --- faults

MEANT_MS = "times are in seconds: if milliseconds were meant, write"
CONSTANT = {"kind": "constant", "verify_base_s": 0.05}


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"mod": "sd"}, "mod: unknown key; did you mean 'mode'?"),
        ({"max_batch_size": 3}, "max_batch_size: unknown key; did you mean scheduler.max_batch_size?"),
        ({"scheduler": {"max_batchsize": 3}}, "scheduler.max_batchsize: unknown key; did you mean 'max_batch_size'?"),
        ({"slo": {"zzz": 1.0}}, "slo.zzz: unknown key; known are ttft_ms, tpot_ms, e2el_ms"),
        ({"mode": "sdd"}, "mode: is 'sdd'; did you mean 'sd'?"),
        ({"scheduler": 3}, "scheduler: is 3, must be a table"),
        ({"scheduler": {"block_size": 1.5}}, "scheduler.block_size: is 1.5, must be a whole number"),
        ({"scheduler": {"num_speculative_tokens": -1}}, "scheduler.num_speculative_tokens: is -1, must be >= 0"),
        ({"devices": {"colocated": 1}}, "devices.colocated: is 1, must be true or false"),
        ({"seed": -1}, "seed: is -1, must be >= 0"),
        (  # a key that has the name of the kind
            {"acceptance": {"kind": "preset", "preset": "x"}},
            "acceptance.preset: unknown key; known are draft_probs, kind, name",
        ),
        ({"workload": {"num_requests": 10**20}}, f"workload.num_requests: is {10**20}, must be in [0, {10**15}]"),
        (
            {"workload": {"max_draft_tokens": -1}},
            "workload.max_draft_tokens: is -1, must be >= 0, which opts out of speculation",
        ),
        ({"scheduler": {"num_batches": 10**8}}, "scheduler.num_batches: is 100000000, must be <= 1024"),
        (
            {"scheduler": {"num_draft_blocks": 0}},
            'scheduler.num_draft_blocks: is 0, but mode psd drafts; give it blocks, or set mode = "ar"',
        ),
        (
            {"workload": {"arrivals": {"kind": "on-off", "rate": 1, "on_s": 1e-300, "off_s": 1e300}}},
            "workload.arrivals.on_s: is 1e-300, must be from 1e-06 to 1e+09 seconds",
        ),
        ({"link": {"latency_s": 0, "bytes_per_s": 1e-300}}, "link.bytes_per_s: is 1e-300, must be >= 1, such as 25e9"),
        ({"cost": {**CONSTANT, "verify_base_s": -1}}, "cost.verify_base_s: is -1, must be a number of seconds >= 0"),
        (
            {"cost": {**CONSTANT, "draft_base_ms": 49}},
            "cost.draft_base_ms: unknown key; times are in seconds: write draft_base_s = 0.049",
        ),
        (
            {"cost": {**CONSTANT, "draft_base_s": 49.5}},
            f"cost.draft_base_s: is 49.5, must be a number of seconds <= 10; {MEANT_MS} 0.0495",
        ),
        (
            {"cost": {**CONSTANT, "draft_base_s": "50ms"}},
            "cost.draft_base_s: is '50ms', must be a plain number of seconds, such as 0.05",
        ),
        ({"cost": {**CONSTANT, "draft_base_s": float("nan")}}, "cost.draft_base_s: is nan, must be a finite number"),
        ({"cost": {"kind": "constant"}}, "cost.verify_base_s: is missing; add verify_base_s = ..."),
        (
            {"cost": {"verify_base_s": 0.1}},
            "cost: has no kind; add one of "
            + ", ".join(
                f"kind = '{kind}'" for kind in ("constant", "linear", "paper", "roofline", "measured", "profile")
            ),
        ),
        ({"cost": {"kind": "liner"}}, "cost: kind is 'liner'; did you mean 'linear'?"),
        ({"devices": {"round_overhead_s": -1}}, "devices.round_overhead_s: is -1, must be a number of seconds >= 0"),
        (
            {"workload": {"arrivals": {"kind": "poisson", "rate": -3.0}}},
            "workload.arrivals.rate: is -3.0, must be finite and > 0",
        ),
        (
            {"workload": {"arrivals": {"kind": "poisson", "rat": 3}}},
            "workload.arrivals.rat: unknown key; did you mean 'rate'?",
        ),
        ({"workload": {"arrivals": "poison"}}, "workload.arrivals: kind is 'poison'; did you mean 'poisson'?"),
        ({"workload": {"prompt_lens": 0}}, "workload.prompt_lens.tokens: is 0, must be >= 1"),
        ({"workload": {"prompt_lens": "long"}}, "workload.prompt_lens: is 'long', must be a table"),
        ({"workload": {"path": "nope.csv"}}, "workload.path: no file 'nope.csv'; check the path"),
        (
            {"workload": {"output_lens": {"mean": 3, "p50": 5}}},
            "workload.output_lens.p50: is 5.0, must be in (0, mean = 3.0]",
        ),
        ({"acceptance": {"alpha": 2.0}}, "acceptance.alpha: is 2.0, must be in [0, 1]"),
        (
            {"acceptance": {"synthetic_acceptance_rates": [0.5, "x"]}},
            "acceptance.synthetic_acceptance_rates[1]: is 'x', must be a number",
        ),
        (
            {"acceptance": {"kind": "synthetic"}},
            "acceptance: give exactly one of synthetic_acceptance_rates and synthetic_acceptance_length",
        ),
        ({"policies": {"admision": "fcfs"}}, "policies.admision: unknown key; did you mean 'admission'?"),
        ({"policies": {"admission": "fcf"}}, "policies.admission: no admission policy 'fcf': did you mean 'fcfs'?"),
        (
            {"policies": {"draft_length": {"k": 1}}},
            'policies.draft_length: has no name; write draft_length = { name = "fixed", ... }',
        ),
        (
            {"policies": {"draft_length": "fixed,k=-1"}},
            "policies.draft_length: policy draft_length=fixed: k is -1, must be >= 0",
        ),
        ({"faults": {"outages": [{"at_s": -1}]}}, "faults.outages[0].at_s: is -1, must be a number of seconds >= 0"),
        (
            {"faults": {"outages": [{"at_s": 1, "duraton_s": 3}]}},
            "faults.outages[0].duraton_s: unknown key; did you mean 'duration_s'?",
        ),
    ],
)
def test_a_fault_is_one_line_with_field_and_remedy(tree: dict[str, Any], line: str) -> None:
    assert fault(tree) == f"run.toml: {line}"


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        (
            {"acceptance": {"synthetic_acceptance_rates": [0.5, 0.7, 0.1]}},
            ["acceptance.synthetic_acceptance_rates[1]: is 0.7, above 0.5", "cannot rise"],
        ),
        (
            {"acceptance": {"synthetic_acceptance_rates": [0.5, 0.2]}},
            ["acceptance.synthetic_acceptance_rates", "num_speculative_tokens = 3", "give one rate per"],
        ),
        (
            {"acceptance": {"synthetic_acceptance_length": 9.0}},
            ["acceptance.synthetic_acceptance_length: is 9.0", "[1, 4]"],
        ),
        ({"scheduler": {"num_batches": 1}}, ["scheduler.num_batches: is 1", ">= 2 in psd mode", 'mode = "sd"']),
        ({"scheduler": {"num_target_blocks": 4}}, ["scheduler.num_target_blocks: is 4", "needs 320", "make it >= 20"]),
        ({"scheduler": {"num_draft_blocks": 4}}, ["scheduler.num_draft_blocks: is 4", "needs 320", "make it >= 20"]),
        ({"scheduler": {"max_model_len": 100}}, ["scheduler.max_model_len: is 100", "needs 320", "make it >= 320"]),
        (
            {"scheduler": {"num_target_blocks": 4, "max_model_len": 100}},
            ["scheduler.num_target_blocks: is 4", "raise num_target_blocks"],
        ),
        ({"cost": {"drafter": "gpt"}}, ["cost: ", "'gpt'", "qwen3-0.6b"]),
        ({"policies": {"mode": "no.such.module:Mode"}}, ["policies.mode: ", "no.such.module"]),
        ({"scheduler": {"block_size": 1.5, "num_target_blocks": "x"}}, ["scheduler.block_size", "(and 1 more)"]),
    ],
)
def test_parts_that_do_not_fit_together_are_found(tree: dict[str, Any], parts: list[str]) -> None:
    line = fault(tree)
    assert line.startswith("run.toml: ")
    for part in parts:
        assert part in line


def test_the_world_is_not_checked_for_a_run_on_models() -> None:
    assert parse_config({"scheduler": {"num_target_blocks": 4}}, world=False).scheduler.num_target_blocks == 4


class Unmakable:
    """A policy whose constructor has a bug."""

    def __init__(self) -> None:
        raise KeyError("colour")


def test_a_policy_that_cannot_be_made_is_one_line() -> None:
    line = fault({"policies": {"mode": f"{__name__}:Unmakable"}})
    assert re.fullmatch(r"run.toml: policies.mode: policy mode=\S+:Unmakable: KeyError: 'colour'", line)


# --- files and overrides


def test_a_file_is_named_in_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[scheduler]\nmax_batch_size = 'x'\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: scheduler.max_batch_size: is 'x', must be a whole")):
        load_config(path)
    path.write_text("[scheduler\n")
    with pytest.raises(ConfigError, match=r"not TOML: .*line 1"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"No such file.*check the path"):
        load_config(tmp_path / "other.toml")


def test_an_override_is_named_in_its_faults() -> None:
    override = parse_assignment("scheduler.max_batch_size=-2", "--set")
    assert fault({}, overrides=[override]).startswith("--set scheduler.max_batch_size=-2: scheduler.max_batch_size: ")
    assert fault({"seed": -1}, overrides=[Override("mode", "sd", "--mode sd")]).startswith("run.toml: seed")


def test_paths_in_a_file_are_meant_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"arrival_s": 0, "prompt_len": 3, "output_len": 4}\n')
    path = tmp_path / "run.toml"
    path.write_text('workload = { path = "trace.jsonl" }\n')
    assert [request.output_len for request in load_config(path).build_workload()] == [4]


def test_a_trace_format_is_told_from_the_file(tmp_path: Path) -> None:
    plain, mooncake = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_text('{"arrival_s": 0, "prompt_len": 3, "output_len": 4}\n')
    mooncake.write_text('{"timestamp": 0, "input_length": 3, "output_length": 4}\n')
    names = [plain, mooncake, Path("x.csv"), Path("x.json")]
    assert [guess_trace_format(path) for path in names] == ["jsonl", "mooncake", "azure", "sharegpt"]


@pytest.mark.parametrize("name", ["c.toml", "notes.txt", "trace.csv.gz", "data"])
@pytest.mark.parametrize("content", [b"seed = 3\n", b"", b"\x1f\x8b\x00\xff"])
def test_a_file_that_is_no_trace_is_told_so(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"workload.format: is missing, .* is no trace by its name: known are .csv"):
        parse_config({"workload": {"path": str(tmp_path / name)}})


def test_json_lines_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text('{"timestamp": 0, "input_length": 3, "output_length": 4}\n')
    assert guess_trace_format(tmp_path / "data.txt") == "mooncake"


def test_variants_are_merged_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "mode = 'sd'\n[scheduler]\nmax_batch_size = 8\nblock_size = 8\n"
        "[[variants]]\nname = 'wide'\nscheduler = { max_batch_size = 32 }\n"
        "[[variants]]\nname = 'other cost'\ncost = { kind = 'constant', verify_base_s = 0.1 }\n"
    )
    variants = {name: parse_config(tree) for name, tree in named_variants(read_tree(path), str(path))}
    assert list(variants) == ["wide", "other cost"]
    assert variants["wide"].scheduler.max_batch_size == 32
    assert variants["wide"].scheduler.block_size == 8
    assert variants["other cost"].cost.kind == "constant"
    assert load_config(path).mode == "sd"  # a file with variants is a run too
    path.write_text("[[variants]]\nmode = 'sd'\n")
    with pytest.raises(ConfigError, match=r"variants\[0\]: has no name"):
        named_variants(read_tree(path), str(path))


def test_trees() -> None:
    assert put({"a": {"b": 1, "c": 2}}, "a.b", 3) == {"a": {"b": 3, "c": 2}}
    assert put({"a": 1}, "a.b", 3) == {"a": {"b": 3}}
    assert merged({"a": {"kind": "x", "p": 1}}, {"a": {"kind": "y"}}) == {"a": {"kind": "y"}}
    assert parse_values("16,32") == [16, 32]
    assert parse_values("psd,sd") == ["psd", "sd"]
    assert parse_values("[1, 2],[3]") == [[1, 2], [3]]
    assert parse_assignment("a.b={c = 1}", "--set").value == {"c": 1}
    with pytest.raises(ValueError, match="write it as"):
        parse_assignment("a.b", "--set")


SHORT_AND_KEY = [
    ("link", "pcie4-x16", "payload", "target_probs", {"preset": "pcie4-x16"}),
    ("link", "pcie4-x16", "latency_s", 0.001, {"preset": "pcie4-x16"}),
    ("workload.arrivals", "poisson", "rate", 4.0, {"kind": "poisson"}),
    ("workload.arrivals", "closed-loop", "concurrency", 3, {"kind": "closed-loop"}),
    ("policies.draft_length", "fixed", "k", 2, {"name": "fixed"}),
    ("policies.draft_length", "by-batch-size,table=2:3/9:1", "table", "2:2/9:1", {"name": "by-batch-size"}),
    ("workload.output_lens", 256, "parts", [{"weight": 1.0, "length": 9}], {"kind": "mixture"}),
    ("workload.prompt_lens", 256, "tokens", 30, {"kind": "fixed"}),
]


@pytest.mark.parametrize(("place", "short", "key", "value", "kept"), SHORT_AND_KEY)
def test_a_key_set_after_a_shorthand_keeps_what_it_said(
    tmp_path: Path, place: str, short: Any, key: str, value: Any, kept: dict[str, Any]
) -> None:
    """By two overrides, by a file and an override, and by a variant of the file."""
    world = {"cost": {"kind": "paper"}} if place != "link" else {}
    first, then = Override(place, short, "--set a"), Override(f"{place}.{key}", value, "--set b")
    whole = put(world, place, short)
    (variant,) = named_variants({**whole, "variants": [put({"name": "v"}, f"{place}.{key}", value)]}, "file")
    found = [
        parse_config(world, overrides=[first, then]),
        parse_config(whole, overrides=[then]),
        parse_config(variant[1]),
    ]
    want: Any = parse_config(put(world, place, {**kept, key: value}))
    assert [config.to_dict()[place.partition(".")[0]] for config in found] == [
        want.to_dict()[place.partition(".")[0]]
    ] * 3


def test_a_key_that_holds_in_all_variants_does_so_in_a_varied_table() -> None:
    payload = Override("link.payload", "draft_probs", "--set")
    axes = Axes(vary=["link=pcie4-x16,pcie5-x16"])
    configs = [variant.config for variant in make_variants(None, axes, [payload])]
    links = [config.link for config in configs]
    assert [(link.preset, link.payload) for link in links if link is not None] == [
        ("pcie4-x16", "draft_probs"),
        ("pcie5-x16", "draft_probs"),
    ]
    k = Override("policies.draft_length.k", 2, "--set")
    policies = [Override("policies.draft_length", f"fixed,k={number}", "--policy") for number in (1, 3)]
    for variant in make_variants(None, Axes(policies=policies), [k]):
        assert variant.config.policy_specs()["draft_length"] == {"name": "fixed", "k": 2}


def test_another_kind_set_after_a_shorthand_replaces_it() -> None:
    for place, short, key, value in (
        ("workload.arrivals", "closed-loop", "kind", "at-once"),
        ("policies.draft_length", "fixed,k=2", "name", "adaptive"),
    ):
        tree = put(put({}, place, short), f"{place}.{key}", value)
        assert tree == put({}, place, {key: value})


def test_every_text_shorthand_is_known_to_the_trees() -> None:
    """What `shorthand` takes for a table, dotted keys must expand; numbers give way, see `as_table`."""
    found: dict[str, str] = {}
    deepest = 5

    def walk(annotation: Any, place: str) -> None:
        for item in getattr(annotation, "__metadata__", ()):
            note(item, place)
        for argument in get_args(annotation):
            walk(argument, place)
        if place.count(".") > deepest:  # lengths hold lengths
            return
        for name, field in getattr(annotation, "model_fields", {}).items():
            below = f"{place}.{name}" if place else name
            for item in field.metadata:
                note(item, below)
            walk(field.annotation, below)

    def note(item: Any, place: str) -> None:
        expanded = item.func("text") if isinstance(item, BeforeValidator) else "text"
        if isinstance(expanded, dict):
            (found[place],) = [key for key, value in expanded.items() if value == "text"]

    walk(RunConfig, "")
    assert found == TEXTS
    assert all(as_table(f"policies.{slot}", "x,k=1") == {"name": "x", "k": 1} for slot in PoliciesTable.model_fields)


def test_run_config_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().mode = "sd"


ROOFLINE = {"cost": {"kind": "roofline", "target": {"model": "qwen3-32b", "gpu": "h100", "tp": 2}}}
WITH_DRAFT = {"cost": {**ROOFLINE["cost"], "draft": {"model": "qwen3-1.7b", "gpu": "h100"}}}


def test_gpus_set_the_pools_and_the_devices() -> None:
    """Unless they are given: a cost model that knows the GPUs knows their memory and their number."""
    psd = parse_config(WITH_DRAFT)
    pools = psd.scheduler_config()
    assert 10_000 < pools.num_target_blocks < 65_536 != pools.num_draft_blocks > 10_000
    assert (psd.num_target_devices, psd.num_draft_devices) == (2, 1)
    given = {"scheduler": {"num_target_blocks": 900}, "devices": {"num_target_devices": 2}}
    config = parse_config({**WITH_DRAFT, **given})
    assert config.scheduler_config().num_target_blocks == 900
    assert config.scheduler_config().num_draft_blocks == pools.num_draft_blocks
    assert (config.num_target_devices, config.num_draft_devices) == (2, 1)
    both = parse_config({**WITH_DRAFT, "mode": "sd"})  # on the same two devices
    assert both.scheduler_config().num_target_blocks < pools.num_target_blocks
    assert both.num_draft_devices == 0


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_the_example_file_overrides_nothing_that_follows_from_the_gpus(mode: str) -> None:
    example = tomllib.loads(EXAMPLE)
    assert not any(name in example[section] for section, names in SET_BY_GPUS.items() for name in names)
    for name in (name for names in SET_BY_GPUS.values() for name in names):
        assert re.search(rf"^# {name} = .*follows from the cost model's GPUs unless given", EXAMPLE, re.MULTILINE)
    started_from, plain = (
        parse_config({**example, **WITH_DRAFT, "mode": mode}),
        parse_config({**WITH_DRAFT, "mode": mode}),
    )
    assert started_from.scheduler_config() == plain.scheduler_config()
    assert started_from.num_target_devices == plain.num_target_devices == 2
    assert started_from.num_draft_devices == plain.num_draft_devices


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_what_follows_from_the_gpus_still_does_when_a_dumped_configuration_is_read(num_replicas: int) -> None:
    config = parse_config({**WITH_DRAFT, "devices": {"num_replicas": num_replicas}})
    again = parse_config(config.to_dict())
    assert again.scheduler_config() == config.scheduler_config()
    assert again.num_target_devices == config.num_target_devices == 2 * num_replicas
    assert again.to_dict() == config.to_dict()
    limits = {"scheduler": {"num_target_blocks": 900}, "devices": {"num_target_devices": 2}}
    given = parse_config(parse_config({**WITH_DRAFT, **limits}).to_dict())
    assert given.scheduler_config().num_target_blocks == 900
    assert given.devices.num_target_devices == 2


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("group", "num_priced"), [("target", 2), ("draft", 1)])
def test_a_number_of_devices_that_contradicts_tp_is_refused(group: str, num_priced: int, num_replicas: int) -> None:
    name = f"num_{group}_devices"
    for number in (1, 2, 3, 4):
        tree = {**WITH_DRAFT, "devices": {name: number, "num_replicas": num_replicas}}
        if number == num_priced:
            assert parse_config(tree).num_target_devices == 2 * num_replicas
            continue
        line = fault(tree)
        assert line.startswith(f"run.toml: devices.{name}: is {number}, but cost.{group}.tp is {num_priced}, ")
        assert line.endswith(f"remove {name}, or set cost.{group}.tp = {number}")
    assert parse_config({"devices": {name: 3}}).cost.kind == "paper", "who knows no GPUs contradicts nobody"


@pytest.mark.parametrize("mode", ["ar", "sd", "psd", "pearl", "pearl-minedraft"])
@pytest.mark.parametrize("spec", ["fixed", {"name": "fixed"}])
def test_a_fixed_mode_policy_has_the_runs_mode(mode: str, spec: str | dict[str, str]) -> None:
    config = parse_config({"mode": mode, "policies": {"mode": spec}})
    assert config.policy_specs() == parse_config({"mode": mode}).policy_specs()
    assert config.policy_specs()["mode"] == {"name": "fixed", "mode": config.core_mode}


def test_a_fixed_mode_policy_keeps_the_mode_it_is_given() -> None:
    config = parse_config({"policies": {"mode": "fixed,mode=sd"}})
    assert config.policy_specs()["mode"] == {"name": "fixed", "mode": "sd"}


def test_the_number_of_replicas_has_an_end() -> None:
    assert parse_config({"devices": {"num_replicas": 1024}}).num_target_devices == 4096
    assert fault({"devices": {"num_replicas": 1025}}) == "run.toml: devices.num_replicas: is 1025, must be <= 1024"


def test_speculation_needs_the_price_of_a_drafter() -> None:
    assert fault(ROOFLINE) == 'run.toml: cost.draft: is missing; add [cost.draft], or set mode = "ar"'
    parse_config({**ROOFLINE, "mode": "ar"})


def test_outages_of_a_drafter_that_is_not_there() -> None:
    """One file serves all modes: in ar nobody can be lost."""
    tree = {"faults": {"outages": [{"at_s": 0.5, "duration_s": 1.0}], "verify_failure_rate": 0.1}}
    assert len(parse_config({**tree, "mode": "sd"}).build_faults().outages) == 1
    faults = parse_config({**tree, "mode": "ar"}).build_faults()
    assert (faults.outages, faults.verify_failure_rate) == ((), 0.1)

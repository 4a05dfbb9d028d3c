"""What the front doors make of options and vLLM's arguments. Pure; needs no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minedraft.backends.vllm.device_facts import CPU, Device, DeviceFacts
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.launch import NULL_PROPOSER, SCHEDULER_CLS, Launch, LaunchOptions, plan_launch
from minedraft.backends.vllm.memory_fit import GIB
from minedraft.backends.vllm.placement import OMP_BIND
from minedraft.backends.vllm.settings import parse_settings

TWO_CORES = DeviceFacts(CPU, (Device("0"), Device("1")), "", 32 * GIB, 24 * GIB)
THREE_GPUS = DeviceFacts(
    "cuda", tuple([Device(str(i), 80 * GIB, 79 * GIB) for i in range(3)]), "CUDA_VISIBLE_DEVICES", 512 * GIB, 400 * GIB
)


def planned(
    facts: DeviceFacts = TWO_CORES,
    given: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **options: Any,
) -> Launch:
    return plan_launch(LaunchOptions(**{"draft": "D", **options}), {"model": "T", **(given or {})}, facts, env or {})


def refusal(given: dict[str, Any] | None = None, facts: DeviceFacts = TWO_CORES, **options: Any) -> str:
    with pytest.raises(VllmWorldError) as caught:
        planned(facts, given, **options)
    return str(caught.value)


def test_an_engine_with_the_core_in_it() -> None:
    launch = planned(k=3)
    assert launch.engine["scheduler_cls"] == SCHEDULER_CLS
    assert launch.engine["async_scheduling"] is False
    assert launch.engine["speculative_config"] == {
        "method": "custom_class",
        "model": NULL_PROPOSER,
        "num_speculative_tokens": 3,
    }
    drafter = launch.engine["additional_config"]["minedraft"]["drafter"]
    assert drafter["engine"]["model"] == "D"
    assert drafter["cpus"] == [1]
    assert drafter["env"] == {"OMP_NUM_THREADS": "1", OMP_BIND: "nobind"}
    assert launch.env == {OMP_BIND: "0"}
    assert launch.settings.mode == "psd"
    assert launch.settings.drafter is not None
    assert launch.settings.drafter.cpus == (1,)
    json.dumps(launch.engine["additional_config"])  # vLLM hashes it and sends it to its processes


def test_named_classes_exist() -> None:
    """The texts that vLLM resolves name files and classes of ours (without importing vLLM)."""
    root = Path(__file__).parent.parent
    for name in (SCHEDULER_CLS, NULL_PROPOSER):
        module, _, cls = name.rpartition(".")
        source = root / f"{module.replace('.', '/')}.py"
        assert f"class {cls}" in source.read_text()


def test_gpus() -> None:
    launch = planned(THREE_GPUS, {"tensor_parallel_size": 2})
    assert launch.env == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert launch.engine["tensor_parallel_size"] == 2
    assert "kv_cache_memory_bytes" not in launch.engine  # left to gpu_memory_utilization
    drafter = launch.settings.drafter
    assert drafter is not None
    assert (dict(drafter.env), drafter.cpus) == ({"CUDA_VISIBLE_DEVICES": "2"}, ())
    launch = planned(THREE_GPUS, target_devices="0", draft_devices="1,2")
    assert launch.settings.drafter is not None
    assert launch.settings.drafter.engine["tensor_parallel_size"] == 2


def test_additional_config_is_merged() -> None:
    """What the user gave stays, and options win over it."""
    own = {
        "other": {"x": 1},
        "minedraft": {
            "mode": "sd",
            "max_wait_s": 0.5,
            "policies": {"admission": "priority"},
            "drafter": {"deadline_s": 9.0, "env": {"A": "b"}, "engine": {"model": "own", "max_num_seqs": 4}},
        },
    }
    launch = planned(
        given={"additional_config": own},
        draft="D",
        mode="psd",
        policies={"draft_length": "by-batch-size"},
        settings={"drafter": {"hang_timeout_s": 7.0}, "max_wait_s": 0.25},
        draft_args={"dtype": "float32"},
    )
    assert launch.engine["additional_config"]["other"] == {"x": 1}
    settings, drafter = launch.settings, launch.settings.drafter
    assert drafter is not None
    assert (settings.mode, settings.max_wait_s) == ("psd", 0.25)
    assert dict(settings.policies) == {"admission": "priority", "draft_length": "by-batch-size"}
    assert (drafter.deadline_s, drafter.hang_timeout_s, drafter.env["A"]) == (9.0, 7.0, "b")
    assert {**drafter.engine, "kv_cache_memory_bytes": 0} == {
        "model": "D",
        "max_num_seqs": 4,
        "dtype": "float32",
        "kv_cache_memory_bytes": 0,
    }
    assert own["minedraft"]["mode"] == "sd"  # nothing is changed in place


def test_the_drafter_of_additional_config_is_enough() -> None:
    launch = planned(draft=None, given={"additional_config": {"minedraft": {"drafter": {"engine": {"model": "own"}}}}})
    assert launch.settings.drafter is not None
    assert launch.settings.drafter.engine["model"] == "own"


def test_devices_in_the_users_own_settings() -> None:
    """A drafter placed by hand is placed there, and not twice."""
    by_core = {"additional_config": {"minedraft": {"drafter": {"cpus": [0]}}}}
    assert planned(given=by_core).placement.draft == ("0",)
    assert planned(given=by_core).placement.target == ("1",)
    by_gpu = {"additional_config": {"minedraft": {"drafter": {"env": {"CUDA_VISIBLE_DEVICES": "0"}}}}}
    assert planned(THREE_GPUS, by_gpu).env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert "keep one" in refusal(by_core, draft_devices="1")


def test_a_drafters_environment_means_what_cuda_takes_it_for() -> None:
    """Not positions, as `--draft-devices` does: in a shell that shows 5 and 1, device 1 is the second."""
    gpus = replace(THREE_GPUS, devices=tuple([Device(name) for name in ("5", "1", "GPU-a1")]))
    for value, draft in (("1", "1"), (1, "1"), ("5", "5"), ("1,5", "1,5"), ("GPU-a1", "GPU-a1")):
        settings = {"drafter": {"env": {"CUDA_VISIBLE_DEVICES": value}}}
        drafter = planned(gpus, settings=settings).settings.drafter
        assert drafter is not None
        assert drafter.env == {"CUDA_VISIBLE_DEVICES": draft}
    for value in ("0", "2"):
        assert f"device {value}, which is not visible here (5,1,GPU-a1 is)" in refusal(
            facts=gpus, settings={"drafter": {"env": {"CUDA_VISIBLE_DEVICES": value}}}
        )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"drafter": 3}, "minedraft.drafter is 3, must be an object or null"),
        ({"drafter": {"cpus": 3}}, "drafter.cpus is 3, must be a list"),
        ({"drafter": {"env": "A=1"}}, "drafter.env is 'A=1', must be an object"),
        ({"drafter": {"env": {"A": [1]}}}, "drafter.env.A is [1], must be a string"),
        ({"drafter": {"log": 3}}, "drafter.log is 3, must be a string"),
        ({"drafter": {"deadline_s": "2"}}, "drafter.deadline_s is '2', must be a number"),
        ({"drafter": {"deadline_s": True}}, "drafter.deadline_s is True, must be a number"),
        ({"drafter": {"require_drafter": "false"}}, "drafter.require_drafter is 'false', must be true or false"),
        ({"num_batches": 2.5}, "minedraft.num_batches is 2.5, must be a whole number"),
        ({"max_batch_size": "4"}, "max_batch_size is '4', must be a whole number or null"),
        ({"policies": "fixed"}, "minedraft.policies is 'fixed', must be an object"),
        ({"policies": {"mode": 3}}, "policies.mode is 3, must be a string, as in 'fixed,k=2'"),
        ({"on_policy_error": "stop"}, "use 'replace' or 'raise'"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(settings: dict[str, Any], says: str) -> None:
    """With the setting's name, and before models are loaded; the engine reads them by the same code."""
    assert says in refusal(settings=settings)
    assert says in refusal(given={"additional_config": {"minedraft": settings}})


@pytest.mark.parametrize("drafter", [None, {}, {"env": {"A": "b"}}], ids=str)
def test_a_drafter_that_has_no_model(drafter: dict[str, Any] | None) -> None:
    """`null` is as good as nothing; the plain form of the settings says what is missing, too."""
    settings = {"drafter": drafter}
    assert "name one with --draft" in refusal(draft=None, given={"additional_config": {"minedraft": settings}})
    assert planned(given={"additional_config": {"minedraft": settings}}).settings.drafter is not None
    with pytest.raises(VllmWorldError, match=r"which needs minedraft\.drafter|drafter\.engine lacks 'model'"):
        parse_settings({"minedraft": settings})


def test_values_that_json_or_toml_make_of_a_text() -> None:
    drafter = planned(settings={"drafter": {"deadline_s": 2, "env": {"A": 1}}, "max_batch_size": None}).settings.drafter
    assert drafter is not None
    assert (drafter.deadline_s, drafter.env["A"]) == (2, "1")


def test_plain_decoding_has_no_drafter() -> None:
    launch = planned(mode="ar")
    assert "speculative_config" not in launch.engine
    assert launch.settings.drafter is None
    assert launch.placement.target == ("0", "1")
    assert "the drafter is not started" in launch.notes[0]
    assert planned(mode="ar", draft=None).notes[0].startswith("target T")  # size unknown, nothing else to say


def test_a_mode_policy_keeps_the_drafter() -> None:
    launch = planned(mode="ar", policies={"mode": "fixed,mode=ar"})
    assert launch.settings.drafter is not None


def test_pools_on_a_cpu() -> None:
    """Left alone, vLLM gives nearly all memory to one engine; what the user says holds."""
    launch = planned()
    drafter = launch.settings.drafter
    assert drafter is not None
    assert launch.engine["kv_cache_memory_bytes"] == drafter.engine["kv_cache_memory_bytes"] == 4 * GIB
    launch = planned(given={"kv_cache_memory_bytes": GIB}, draft_args={"kv_cache_memory_bytes": 2 * GIB})
    drafter = launch.settings.drafter
    assert drafter is not None
    assert launch.engine["kv_cache_memory_bytes"] == GIB
    assert drafter.engine["kv_cache_memory_bytes"] == 2 * GIB
    launch = planned(env={"VLLM_CPU_KVCACHE_SPACE": "3"})
    assert "kv_cache_memory_bytes" not in launch.engine
    with pytest.raises(VllmWorldError, match="main memory"):
        planned(env={"VLLM_CPU_KVCACHE_SPACE": "13"})
    with pytest.raises(VllmWorldError, match="whole number"):
        planned(env={"VLLM_CPU_KVCACHE_SPACE": "a"})


def test_sizes_are_checked_for_both(tmp_path: Path) -> None:
    """The drafter follows the target in dtype and context unless it has its own."""
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 1024, "max_position_embeddings": 1 << 20}
    for name in ("t", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
        (tmp_path / name / "pytorch_model.bin").write_bytes(bytes(1000))
    given = {"model": str(tmp_path / "t"), "max_model_len": 1 << 14, "kv_cache_memory_bytes": GIB}
    arguments: dict[str, Any] = {"draft": str(tmp_path / "d"), "given": given}
    assert planned(**arguments, draft_args={"kv_cache_memory_bytes": GIB}).notes == ()
    with pytest.raises(VllmWorldError, match=r"drafter .*/d: one sequence of max_model_len 1048576 needs 16\.00 GiB"):
        planned(**arguments, draft_args={"kv_cache_memory_bytes": GIB, "max_model_len": 1 << 20})
    # What it doesn't follow is the type of the KV: a target's of one byte a number doesn't halve the drafter's.
    arguments["given"] = {**given, "kv_cache_dtype": "fp8"}
    with pytest.raises(VllmWorldError, match=r"drafter .*/d: one sequence of max_model_len 1048576 needs 16\.00 GiB"):
        planned(**arguments, draft_args={"kv_cache_memory_bytes": GIB, "max_model_len": 1 << 20})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config can't be given.*--draft and -k"),
        ({"spec_model": "x"}, "--spec-model.*--draft"),
        ({"spec_tokens": 3}, "--spec-tokens.*-k"),
        ({"scheduler_cls": "a.B"}, "--scheduler-cls can't be given.*remove it"),
        ({"async_scheduling": True}, "--async-scheduling.*remove it"),
        ({"headless": True}, "--headless.*remove it"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is 2.*--tensor-parallel-size"),
        ({"data_parallel_size": 2}, "--data-parallel-size is 2.*for each replica"),
        ({"additional_config": {"minedraft": 3}}, "must be an object of settings"),
        ({"additional_config": {"minedraft": {"mod": "sd"}}}, "did you mean 'mode'"),
        ({"tensor_parallel_size": 2}, "the target needs 2"),
    ],
)
def test_conflicts_are_refused(given: dict[str, Any], says: str) -> None:
    import re

    assert re.search(says, refusal(given))


def test_what_vllm_sets_by_default_is_no_conflict() -> None:
    given = {"speculative_config": None, "spec_model": None, "scheduler_cls": None, "async_scheduling": None}
    planned(given={**given, "headless": False, "pipeline_parallel_size": 1, "additional_config": {}})
    planned(given={"scheduler_cls": SCHEDULER_CLS, "async_scheduling": False})


def test_bad_options_are_refused() -> None:
    assert "name one with --draft, or use --mode ar" in refusal(draft=None)
    assert "must be at least 1" in refusal(k=0)
    assert "psdd" in refusal(mode="psdd")
    assert "use --draft" in refusal(draft_args={"model": "x"})
    assert "minedraft sets it" in refusal(draft_args={"scheduler_cls": "x"})
    assert "draft_capacity is missing" in refusal(policies={"selection": "tetris"})
    planned(policies={"selection": "tetris"}, settings={"draft_capacity": 32})
    planned(policies={"selection": "tetris"}, mode="ar")
    for ranks in ("2", 1.5, True, -1):
        engine = {"tensor_parallel_size": ranks}
        assert "engine.tensor_parallel_size is" in refusal(settings={"drafter": {"engine": engine}})
    assert "did you mean 'deadline_s'" in refusal(settings={"drafter": {"deadline": 1}})
    assert "policies: " in refusal(policies={"draft_length": "fixt"})
    assert "policies: " in refusal(policies={"draft_lenght": "fixed"})

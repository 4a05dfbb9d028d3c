"""How `minedraft run --backend vllm` translates a configuration, and how names of models are found. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minedraft.commands.errors import CommandError
from minedraft.commands.vllm_extra import find_model, nested
from minedraft.commands.vllm_run import DRAFT_FIELDS, ENGINE_FIELDS, POOLS, SETTINGS, device_names, spec_text, translate
from minedraft.config import RunConfig, parse_config
from minedraft.policy import load_policies, parse_spec


def config(mode: str = "psd", **scheduler: Any) -> RunConfig:
    return parse_config({"mode": mode, "scheduler": scheduler}, world=False)


def test_what_is_left_open_is_vllms_to_decide() -> None:
    assert translate(config()) == ({}, {})


def test_limits_go_to_the_engine_that_has_them() -> None:
    engine, settings = translate(
        config(
            max_batch_size=4,
            num_batches=3,
            max_num_batched_tokens=64,
            max_num_draft_batched_tokens=128,
            max_model_len=256,
            draft_max_model_len=200,
            block_size=32,
            num_target_blocks=40,
            num_draft_blocks=50,
            draft_capacity=9,
        )
    )
    assert engine == {
        "max_num_seqs": 12,  # all batches full
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "block_size": 32,
        "num_gpu_blocks_override": 41,
    }
    assert settings == {
        "num_batches": 3,
        "max_batch_size": 4,
        "draft_capacity": 9,
        "drafter": {"engine": {"max_num_batched_tokens": 128, "max_model_len": 200, "num_gpu_blocks_override": 51}},
    }
    assert translate(config(max_batch_size=4, max_num_seqs=5))[0] == {"max_num_seqs": 5}
    assert translate(config("sd", max_batch_size=4))[0] == {"max_num_seqs": 4}
    assert translate(config("ar", draft_max_model_len=99)) == ({}, {})


def test_every_field_is_translated_or_refused() -> None:
    """A field that is added to the configuration must not be dropped in silence."""
    known = {*ENGINE_FIELDS, *DRAFT_FIELDS, *POOLS, *SETTINGS, "num_speculative_tokens"}
    fields = type(config().scheduler).model_fields
    assert known <= set(fields)
    for name in set(fields) - known:
        with pytest.raises(CommandError, match=f"scheduler.{name}: has no meaning"):
            translate(config(**{name: fields[name].default}))


@pytest.mark.parametrize(
    "spec",
    ["fixed", "by-batch-size,table=8:5/16:3", {"name": "fixed", "k": 2}, {"name": "by-batch-size", "table": "8:2"}],
)
def test_specs_of_policies_stay_the_same(spec: Any) -> None:
    name, options = parse_spec(spec_text(spec))
    given = {"name": name, **options}
    assert given == (
        spec if isinstance(spec, dict) else dict([("name", spec.split(",")[0]), *parse_spec(spec)[1].items()])
    )
    load_policies({"draft_length": spec_text(spec)})


def test_names_of_devices() -> None:
    assert device_names(None, "cuda", "--target-device") is None
    assert device_names("cpu", "cpu", "--target-device") is None
    assert device_names("cuda:0,1", "cuda", "--target-device") == "0,1"
    for text in ("cuda:0", "0", ":0"):
        with pytest.raises(CommandError, match=r"--target-device .*write cpu:0 or cpu:0,1"):
            device_names(text, "cpu", "--target-device")


def test_nested_settings() -> None:
    texts = ["drafter.deadline-s=5", "drafter.env.A=b-c=d", "max_wait_s=0.5", "drafter.cpus=[1, 2]", "x=true"]
    assert nested(texts, "--set") == {
        "drafter": {"deadline_s": 5, "env": {"A": "b-c=d"}, "cpus": [1, 2]},
        "max_wait_s": 0.5,
        "x": True,
    }


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedded names and folders are ours; what vLLM may know is left to it."""
    monkeypatch.setenv("MINEDRAFT_CACHE", str(tmp_path))
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert find_model("smollm2") == str(tmp_path / "smollm2")
    for name in (str(tmp_path / "model"), str(tmp_path / "model.gguf"), "owner/model", "gpt2", "s3://bucket/model"):
        assert find_model(name) == name
    for name, part in (
        ("smolm2", "did you mean 'smollm2'"),
        (str(tmp_path), "has no config.json"),
        ("./nowhere", "no such folder"),
    ):
        with pytest.raises(CommandError, match=part):
            find_model(name)

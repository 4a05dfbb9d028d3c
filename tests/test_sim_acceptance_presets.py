"""Published acceptance: every preset says what its source says, and what isn't published is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from minedraft import Mode
from minedraft.config import ConfigError, parse_config
from minedraft.sim.acceptance_presets import load_acceptance
from minedraft.sim.presets import read_presets

PRESETS: dict[str, Any] = dict(read_presets("acceptance.toml"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_yields_what_was_published(name: str) -> None:
    entry, preset = PRESETS[name], load_acceptance(name)
    assert preset.name == name
    assert len(preset.source) > 10
    assert len(preset.setting) > 10
    k = len(preset.rates)
    model = preset.build(k, seed=1)
    published = {
        "rates": lambda: model.rates == tuple(entry["rates"]),
        "conditional": lambda: model.conditional_rates("r", k) == pytest.approx(tuple(entry["conditional"])),
        "lengths": lambda: [model.expected_tokens(i + 1) for i in range(k)] == pytest.approx(entry["lengths"]),
        "length": lambda: k == entry["num_draft"] and model.expected_tokens(k) == pytest.approx(entry["length"]),
    }
    forms = [form for form in published if form in entry]
    assert len(forms) == 1
    assert published[forms[0]]()


def test_lengths_that_vllm_publishes_with_its_rates() -> None:
    for target, length in (("llama-3.1-8b", 2.60), ("qwen3-8b", 2.26), ("gpt-oss-20b", 2.56)):
        model = load_acceptance(f"{target}-eagle3-redhat-mt-bench").build(3)
        assert model.expected_tokens(3) == pytest.approx(length, abs=0.006)


def test_one_length_is_fitted_by_a_constant_rate() -> None:
    rates = load_acceptance("llama-3.3-70b-eagle3-nebius-gsm8k").rates
    alpha = rates[0]
    assert [after / before for before, after in pairwise(rates)] == pytest.approx([alpha] * 6)
    fitted = load_acceptance("llama-3-8b-eagle-mt-bench").build(4)
    assert fitted.expected_tokens(2) == pytest.approx(1.89, rel=0.05)  # published too, and not used


def test_names_may_be_written_in_capitals() -> None:
    assert load_acceptance("Qwen3-8B-EAGLE3-math") == load_acceptance("qwen3-8b-eagle3-math")


def test_a_preset_from_a_configuration() -> None:
    config = parse_config({"acceptance": {"name": "qwen3-8b-eagle3-math"}, "scheduler": {"num_speculative_tokens": 5}})
    assert config.acceptance.kind == "preset"
    assert config.build_acceptance().expected_tokens(5) == pytest.approx(3.45)
    assert Mode(config.mode) is Mode.PSD


@pytest.mark.parametrize(
    ("acceptance", "k", "parts"),
    [
        ({"name": "qwen3-8b-eagle3-mat"}, 3, ["acceptance.name: is 'qwen3-8b-eagle3-mat'", "'qwen3-8b-eagle3-math'"]),
        ({"name": "zzz"}, 3, ["no acceptance preset; known are llama-3.1-8b-eagle3-redhat-mt-bench, "]),
        (
            {"name": "qwen3-8b-eagle3-redhat-mt-bench"},
            4,
            ["acceptance.name: is", "up to 3 speculative tokens, not 4", "lower scheduler.num_speculative_tokens"],
        ),
        ({"kind": "preset"}, 3, ["acceptance.name: is missing"]),
        ({"kind": "preset", "nme": "x"}, 3, ["acceptance.nme: unknown key; did you mean 'name'"]),
    ],
)
def test_refusals(acceptance: dict[str, Any], k: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"acceptance": acceptance, "scheduler": {"num_speculative_tokens": k}})
    for part in parts:
        assert part in str(caught.value)

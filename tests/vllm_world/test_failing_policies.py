"""A policy that fails while requests are served costs none of them: the default of its slot takes its place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_kit import Engine, make_requests, minedraft_options, plain_ids, renamed, replay_report

from minedraft.policy import SLOTS, PolicyError

FAILING = {
    "admission": "failing_policies:Admission",
    "assignment": "failing_policies:Assignment",
    "rebalance": "failing_policies:Rebalance",
    "draft_length": "failing_policies:DraftLength",
    "draft_length ": "failing_policies:DraftLengthOfAll",
    "selection": "failing_policies:Selection",
    "preemption": "failing_policies:Preemption,patience=0",
    "mode": "failing_policies:ChoosesMode",
}


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Engine]:
    # 11 usable blocks: some requests must be preempted.
    options = minedraft_options(models / "noisy", mode="psd")
    with Engine(models / "target", num_gpu_blocks_override=12, **options) as engine:
        yield engine


def test_every_slot_is_tried() -> None:
    assert {slot.strip() for slot in FAILING} == set(SLOTS)


@pytest.mark.parametrize("slot", FAILING)
def test_requests_go_on_without_it(
    engine: Engine,
    reference: dict[str, list[int]],
    slot: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    conductor, spec = engine.conductor, FAILING[slot]
    prefix, slot = f"{spec}-", slot.strip()
    settings = replace(conductor._settings, policies={slot: spec}, journal=str(tmp_path / "j"))
    conductor.restart(settings)
    before = replace(conductor.counters)
    with caplog.at_level(logging.ERROR, "minedraft"):
        texts = engine.run(renamed(make_requests(), prefix), on_step=lambda _: engine.check_blocks())
    assert plain_ids(texts, prefix) == {job.request_id: reference[job.request_id] for job in make_requests()}
    engine.check_rest()
    assert conductor.counters.strays == before.strays
    assert conductor.counters.policies_replaced == before.policies_replaced + 1
    messages = [record.getMessage() for record in caplog.records]
    assert [message.startswith(f"{slot} policy") for message in messages] == [True, False]
    # What comes after it can't be replayed, so the journal ends; what came before can.
    assert conductor.counters.journals_lost == before.journals_lost + 1
    conductor.restart(replace(settings, policies={}, journal=""))
    with pytest.raises(PolicyError, match=f"{slot} policy"):
        replay_report(tmp_path / "j")


def test_a_journal_that_can_t_be_begun_leaves_the_core_and_its_journal(engine: Engine, tmp_path: Path) -> None:
    """Also when a policy fails later, and the journal that goes on has to end there."""
    conductor = engine.conductor
    settings = replace(
        conductor._settings,
        policies={"draft_length": FAILING["draft_length"]},
        journal=str(tmp_path / "j"),
        on_policy_error="replace",
    )
    conductor.restart(settings)
    core = conductor.core
    with pytest.raises(OSError, match="none"):
        conductor.restart(replace(settings, journal=str(tmp_path / "none" / "j")))
    assert conductor.core is core
    lost = conductor.counters.journals_lost
    engine.run(renamed(make_requests(), "begun-"))
    assert conductor.counters.journals_lost == lost + 1
    conductor.restart(replace(settings, policies={}, journal=""))


def test_who_tries_a_policy_out_sees_it_fail(engine: Engine) -> None:
    conductor = engine.conductor
    settings = replace(conductor._settings, policies={"draft_length": FAILING["draft_length"]})
    conductor.restart(replace(settings, on_policy_error="raise"))
    with pytest.raises(PolicyError, match=r"draft_length policy failed on .*: boom"):
        engine.run(renamed(make_requests(), "raise-"))

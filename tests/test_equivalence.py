"""E1, E3, E5, E7 on toy tokens: no mode, policy, limit or order of completion changes text; same seed, same bytes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_world import ToyBackend, ToyDevices, ToyModel

from minedraft import Engine, Request, Scheduler, SchedulerConfig, load_policies
from minedraft.journal import JournalHeader, JournalWriter, Recorder, read_journal
from minedraft.policy import BUILTIN
from minedraft.replay import replay
from minedraft.request import FinishReason
from minedraft.work import DraftWork, VerifyWork

MODEL_LEN = 40


def make_requests(count: int = 9) -> list[tuple[int, Request]]:
    shapes = [(1, 12), (7, 5), (3, 20), (12, 1), (5, 9), (20, 30), (2, 2), (9, 14), (4, 11)]
    return [
        (3 * i, Request(f"r{i}", *shapes[i % len(shapes)], max_draft_tokens=(None, None, 2, 0)[i % 4]))
        for i in range(count)
    ]


def make_scheduler(mode: str, names: dict[str, str] | None = None, **limits: int) -> Scheduler:
    config = SchedulerConfig(
        **{
            "num_batches": 2 if mode == "psd" else 1,
            "max_batch_size": 3,
            "num_speculative_tokens": 4,
            "max_num_batched_tokens": 24,
            "max_model_len": MODEL_LEN,
            "block_size": 4,
            "num_target_blocks": 40,
            "num_draft_blocks": 0 if mode == "ar" else 40,
            **limits,
        }
    )
    return Scheduler(config, load_policies({**(names or {}), "mode": f"fixed,mode={mode}"}))


def texts(
    scheduler: Scheduler, model: ToyModel, requests: list[tuple[int, Request]], seed: int = 0
) -> dict[str, list[int]]:
    devices = ToyDevices(model, MODEL_LEN, gives_probs=not scheduler.state.keeps_all_drafts)
    outputs = Engine(scheduler, ToyBackend(requests, devices, seed)).run()
    assert {output.request_id for output in outputs} == {request.request_id for _, request in requests}
    assert all(output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for output in outputs)
    return devices.finished


def expected(model: ToyModel, requests: list[tuple[int, Request]]) -> dict[str, list[int]]:
    return {request.request_id: model.plain_decode(request, MODEL_LEN) for _, request in requests}


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@pytest.mark.parametrize("agreement", [0, 60, 100])
def test_e1_every_mode_writes_the_targets_own_text(mode: str, agreement: int) -> None:
    model = ToyModel(seed=3, agreement=agreement)
    requests = make_requests()
    assert texts(make_scheduler(mode), model, requests) == expected(model, requests)


NAMES = [dict(zip(BUILTIN, names, strict=True)) for names in product(*(sorted(BUILTIN[slot]) for slot in BUILTIN))]


@pytest.mark.parametrize("names", NAMES, ids=["-".join(names.values()) for names in NAMES])
def test_e1_every_combination_of_shipped_policies(names: dict[str, str]) -> None:
    model = ToyModel(seed=5, agreement=70)
    requests = make_requests()
    scheduler = make_scheduler("psd", names, num_target_blocks=14, num_draft_blocks=11)
    assert texts(scheduler, model, requests) == expected(model, requests)


@given(
    k=st.integers(0, 6),
    num_batches=st.integers(2, 4),
    max_batch_size=st.integers(1, 4),
    budget=st.integers(4, 30),
    block_size=st.integers(1, 5),
    extra_blocks=st.integers(0, 20),
    num_draft_blocks=st.integers(1, 40),
    capacity=st.none() | st.integers(0, 9),
    seed=st.integers(0, 50),
    order=st.permutations(list(range(6))),
)
def test_e3_limits_and_order_never_change_text(
    k: int,
    num_batches: int,
    max_batch_size: int,
    budget: int,
    block_size: int,
    extra_blocks: int,
    num_draft_blocks: int,
    capacity: int | None,
    seed: int,
    order: list[int],
) -> None:
    model = ToyModel(seed=seed % 5, agreement=60)
    requests = make_requests(6)
    arranged = [(0, requests[i][1]) for i in order]
    scheduler = make_scheduler(
        "psd",
        num_speculative_tokens=k,
        num_batches=num_batches,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=budget,
        max_num_draft_batched_tokens=max(8, budget),
        block_size=block_size,
        num_target_blocks=-(-MODEL_LEN // block_size) + extra_blocks,
        num_draft_blocks=num_draft_blocks,
        draft_capacity=capacity,
    )
    assert texts(scheduler, model, arranged, seed) == expected(model, requests)


def record(path: Path, seed: int) -> list[object]:
    backend = ToyBackend(make_requests(), ToyDevices(ToyModel(seed=2), MODEL_LEN), seed)
    with Recorder(backend, JournalWriter(path, JournalHeader("test", seed=seed))) as recorder:
        Engine(make_scheduler("psd", num_target_blocks=14), recorder).run()
    return list(backend.works)


def test_e5_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    record(first, 7)
    record(second, 7)
    record(other, 8)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_e7_a_journal_replays_to_the_same_decisions(tmp_path: Path) -> None:
    works = record(tmp_path / "run", 11)
    report = replay(read_journal(tmp_path / "run"), make_scheduler("psd", num_target_blocks=14))
    assert report.first_difference is None
    assert report.num_decisions == len(works)
    assert any(isinstance(work, DraftWork) for work in works)
    assert any(isinstance(work, VerifyWork) and any(work.num_draft) for work in works)

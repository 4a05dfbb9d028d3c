"""E1 and E3 on real models: schedule, drafter, k, preemption and faults never change a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_kit import VOCAB, ThreadWorker, make_requests, reference, run, set_eos

from minedraft.backends.torch import worker
from minedraft.backends.torch.backend import TorchBackend
from minedraft.backends.torch.errors import TorchWorldError
from minedraft.backends.torch.messages import Done, DraftJob, Failed, Job
from minedraft.backends.torch.request import TorchRequest
from minedraft.backends.torch.run import TorchRunResult
from minedraft.backends.torch.surgery import make_noisy_copy, make_tiny_llama
from minedraft.request import FinishReason
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftResult,
    Event,
    RequestAborted,
    VerifyResult,
    WorkDone,
    WorkFailed,
)

pytestmark = pytest.mark.slow

LENGTHS = (3, 9, 17, 30, 5, 12)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafters that agree with it always, mostly, now and then, and hardly ever."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "target", seed=1, vocab_size=VOCAB)
    make_noisy_copy(folder / "target", folder / "same", 0.0)
    make_noisy_copy(folder / "target", folder / "near", 0.03)
    make_noisy_copy(folder / "target", folder / "medium", 0.15)
    make_tiny_llama(folder / "far", seed=2, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def texts(models: Path) -> dict[str, tuple[int, ...]]:
    return {request.request_id: reference(models / "target", request) for request in make_requests(LENGTHS)}


class Watch:
    """Counts what a run did."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event, backend: TorchBackend) -> None:
        self.events.append(event)

    def results(self, kind: type) -> list[Any]:
        return [event.result for event in self.events if isinstance(event, WorkDone) and isinstance(event.result, kind)]

    @property
    def acceptance(self) -> float:
        drafted = sum(sum(result.num_drafted) for result in self.results(DraftResult))
        return sum(sum(result.num_accepted) for result in self.results(VerifyResult)) / drafted

    def num(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def check_whole(result: TorchRunResult, texts: dict[str, tuple[int, ...]]) -> None:
    assert dict(result.token_ids) == texts
    assert sorted(output.request_id for output in result.outputs) == sorted(texts)
    for output in result.outputs:
        assert output.num_output_tokens == len(texts[output.request_id])


def test_ar_is_plain_generation(models: Path, texts: dict[str, tuple[int, ...]]) -> None:
    check_whole(run(models / "target", None, make_requests(LENGTHS), "ar"), texts)


@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize(
    ("draft", "least", "most"),
    [("same", 0.95, 1.0), ("near", 0.4, 0.95), ("medium", 0.05, 0.4), ("far", 0.0, 0.05)],
)
def test_greedy_is_plain_generation(
    models: Path, texts: dict[str, tuple[int, ...]], draft: str, least: float, most: float, mode: str
) -> None:
    watch = Watch()
    check_whole(run(models / "target", models / draft, make_requests(LENGTHS), mode, on_event=watch), texts)
    assert least <= watch.acceptance <= most
    assert not watch.num(WorkFailed)


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@pytest.mark.parametrize(
    "limits",
    [
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 7},
        {"max_num_batched_tokens": 9},  # prompts in chunks of a few tokens
        {"max_num_draft_batched_tokens": 9},  # the drafter catches up in pieces
        {"num_batches": 3, "max_batch_size": 2},
        {"max_batch_size": 1},
        {"num_target_blocks": 22, "max_model_len": 88},  # recompute preemption
        {"num_draft_blocks": 14},  # the drafter's pool is short
    ],
    ids=lambda limits: ",".join(f"{key}={value}" for key, value in limits.items()),
)
def test_limits_never_change_text(
    models: Path, texts: dict[str, tuple[int, ...]], limits: dict[str, int], mode: str
) -> None:
    watch = Watch()
    requests = make_requests(LENGTHS)
    result = run(models / "target", models / "near", requests, mode, limits=limits, on_event=watch)
    check_whole(result, texts)
    assert not watch.num(WorkFailed)
    if limits.get("num_target_blocks") == 22:
        assert sum(output.num_preemptions for output in result.outputs)


@pytest.mark.parametrize("draft", ["same", "near"])
def test_limits_of_length_and_opting_out(models: Path, draft: str) -> None:
    requests = [
        TorchRequest("one", (5, 9, 12), 1),
        TorchRequest("two", (5, 9, 12), 2),
        TorchRequest("plain", (7, 9, 12, 30), 20, max_draft_tokens=0),
        TorchRequest("short", (7, 9, 12, 31), 20, max_draft_tokens=1),
        TorchRequest("late", (8, 9), 20, arrival_s=0.2),
    ]
    texts = {request.request_id: reference(models / "target", request) for request in requests}
    for mode in ("sd", "psd"):
        check_whole(run(models / "target", models / draft, requests, mode), texts)


@pytest.mark.parametrize("draft", ["same", "near"])
def test_eos_inside_an_accepted_block(models: Path, tmp_path: Path, draft: str) -> None:
    """The second EOS of a list, met in the middle of accepted drafts; drafts behind it are no output."""
    target = tmp_path / "target"
    make_noisy_copy(models / "target", target, 0.0)
    requests = make_requests(LENGTHS, max_tokens=40)
    # Token 47 is common in this model's texts.
    set_eos(target, [2, 47])
    texts = {request.request_id: reference(target, request) for request in requests}
    assert sum(text[-1] == 47 for text in texts.values()) >= 3
    for mode in ("ar", "sd", "psd"):
        watch = Watch()
        result = run(target, models / draft, requests, mode, on_event=watch)
        check_whole(result, texts)
        for output in result.outputs:
            stopped = texts[output.request_id][-1] in (2, 47)
            assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if mode == "psd" and draft == "same":
            assert any(
                committed <= accepted
                for verified in watch.results(VerifyResult)
                for accepted, committed in zip(verified.num_accepted, verified.num_committed, strict=True)
                if accepted
            )


def test_ignoring_eos_and_stopping_on_other_tokens(models: Path) -> None:
    long = {r.request_id: r for r in make_requests(LENGTHS, ignore_eos=True)}
    texts = run(models / "target", models / "near", list(long.values()), "psd").token_ids
    assert {len(text) for text in texts.values()} == {24}
    stops = make_requests(LENGTHS, ignore_eos=True, stop_token_ids=(47,))
    stopped = run(models / "target", models / "near", stops, "psd").token_ids
    for request_id, text in texts.items():
        end = text.index(47) + 1 if 47 in text else len(text)
        assert stopped[request_id] == text[:end]


def test_the_context_limit_ends_a_request(models: Path, texts: dict[str, tuple[int, ...]]) -> None:
    limits = {"max_model_len": 40}
    for mode in ("ar", "psd"):
        result = run(models / "target", models / "near", make_requests(LENGTHS), mode, limits=limits)
        assert result.token_ids["r3"] == texts["r3"][:10]
        assert result.token_ids["r0"] == texts["r0"]


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}])
def test_coupled_sampling_gives_one_text(models: Path, params: dict[str, Any]) -> None:
    requests = make_requests(LENGTHS, **params)
    plain = run(models / "target", None, requests, "ar", acceptance="coupled").token_ids
    assert plain != run(models / "target", None, make_requests(LENGTHS), "ar").token_ids
    for mode, draft, limits in (
        ("sd", "near", {}),
        ("psd", "near", {"num_speculative_tokens": 5}),
        ("psd", "far", {}),
        ("psd", "same", {}),
        ("psd", "near", {"num_target_blocks": 22, "max_model_len": 88}),
    ):
        watch = Watch()
        result = run(
            models / "target", models / draft, requests, mode, limits=limits, acceptance="coupled", on_event=watch
        )
        assert result.token_ids == plain
        if draft == "same":
            assert watch.acceptance > 0.95


def test_rejection_sampling_accepts_and_leaves_greedy_neighbours_alone(models: Path) -> None:
    requests = make_requests(LENGTHS, temperature=1.0, top_k=30)
    requests[0] = TorchRequest("greedy", requests[0].prompt_token_ids, 24)
    greedy = reference(models / "target", requests[0])
    for draft, least in (("same", 0.95), ("near", 0.3)):
        watch = Watch()
        result = run(models / "target", models / draft, requests, "sd", on_event=watch)
        assert watch.acceptance >= least
        assert result.token_ids["greedy"] == greedy


def test_sampled_text_repeats_with_its_seed(models: Path) -> None:
    texts = [
        run(models / "target", None, make_requests([5, 9], temperature=1.0, seed=seed), "ar").token_ids
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_an_abort_leaves_a_prefix_and_the_others_alone(models: Path, texts: dict[str, tuple[int, ...]]) -> None:
    events: list[Event] = []

    def abort(event: Event, backend: TorchBackend) -> None:
        events.append(event)
        if len(backend.output_token_ids("r1")) >= 5:
            backend.abort("r1")
        backend.abort("nobody")

    result = run(models / "target", models / "near", make_requests(LENGTHS), "psd", on_event=abort)
    assert events.count(RequestAborted("r1")) == 1
    (output,) = [output for output in result.outputs if output.request_id == "r1"]
    assert output.finish_reason is FinishReason.ABORT
    assert 5 <= len(result.token_ids["r1"]) < 24
    for request_id, text in result.token_ids.items():
        assert text == texts[request_id][: len(text)]
        assert request_id == "r1" or text == texts[request_id]


def test_an_abort_before_the_arrival_takes_effect_after_it(models: Path) -> None:
    requests = [*make_requests([4]), TorchRequest("late", (5, 6), 8, arrival_s=0.3)]

    def abort(event: Event, backend: TorchBackend) -> None:
        if not aborted:
            backend.abort("late")
            aborted.append(True)

    aborted: list[bool] = []
    result = run(models / "target", models / "near", requests, "psd", on_event=abort)
    assert {output.request_id: output.finish_reason for output in result.outputs}["late"] is FinishReason.ABORT
    assert result.token_ids["late"] == ()


@pytest.mark.parametrize("job_kind", [DraftJob, None])
def test_a_failed_work_costs_no_token(
    models: Path, texts: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, job_kind: type | None
) -> None:
    real, seen = worker._answer, []

    def answer(model: Any, job: Job, *rest: Any) -> Done | Failed:
        if isinstance(job, DraftJob) == (job_kind is DraftJob):
            seen.append(job.work_id)
            if len(seen) in (2, 3, 7):
                return Failed(job.work_id, "made to fail")
        return real(model, job, *rest)

    monkeypatch.setattr(worker, "_answer", answer)
    limits = {"max_verify_failures": 5}
    watch = Watch()
    result = run(models / "target", models / "near", make_requests(LENGTHS), "psd", limits=limits, on_event=watch)
    check_whole(result, texts)
    assert watch.num(WorkFailed) == 3


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lost_drafter_costs_no_token(
    models: Path, texts: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """E6, and catching up after a restart."""
    real, seen = worker._answer, []

    def answer(model: Any, job: Job, *rest: Any) -> Done | Failed:
        if isinstance(job, DraftJob):
            seen.append(job.work_id)
            if len(seen) == 4:
                raise EOFError
        return real(model, job, *rest)

    monkeypatch.setattr(worker, "_answer", answer)
    watch = Watch()
    result = run(
        models / "target",
        models / "near",
        make_requests(LENGTHS),
        "psd",
        max_drafter_restarts=restarts,
        on_event=watch,
    )
    check_whole(result, texts)
    assert (watch.num(DrafterLost), watch.num(DrafterReady)) == (1, restarts)
    assert (len(seen) > 4) == bool(restarts)


def test_a_model_that_does_not_load_is_one_line(models: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    make_noisy_copy(models / "target", broken, 0.0)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(TorchWorldError, match=r"drafter .* cannot be loaded") as caught:
        run(models / "target", broken, make_requests([3]), "psd")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is unknown"),
        ({"acceptance": "typical"}, "acceptance 'typical' is unknown"),
        ({"target_device": "gpu"}, "device 'gpu' is unknown"),
        ({"draft_device": "cpu:100000"}, "may run on cores"),
        ({"requests": [TorchRequest("r", (VOCAB,), 1)]}, r"must lie in \[0, 64\)"),
        ({"requests": [TorchRequest("r", (5,), 1)] * 2}, "is there twice"),
    ],
)
def test_what_a_user_gets_wrong_is_named(models: Path, fields: dict[str, Any], message: str) -> None:
    arguments = {"requests": make_requests([3]), "target_device": "cpu", "draft_device": "cpu"} | fields
    with pytest.raises(TorchWorldError, match=message) as caught:
        TorchBackend(models / "target", models / "near", **arguments)
    assert "\n" not in str(caught.value)


def test_cuda_that_is_not_there_is_named(models: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(TorchWorldError, match="no CUDA device is visible"):
        run(models / "target", None, make_requests([3]), "ar", target_device="cuda:0")


def test_requests_that_arrive_together_are_told_together(models: Path) -> None:
    requests = [*make_requests([3, 4, 5]), TorchRequest("late", (5, 6), 8, arrival_s=60.0)]
    devices = {"target_device": "cpu", "draft_device": "cpu"}
    with TorchBackend(models / "target", None, requests, launch=ThreadWorker, **devices) as backend:
        told = [backend.next_event()]
        while backend.ready():
            assert backend.now() == backend.now()
            told.append(backend.next_event())
        backend.abort("r1")
        assert backend.ready()
        assert backend.next_event() == RequestAborted("r1")
        assert not backend.ready()
    assert [event.request.request_id for event in told] == ["r0", "r1", "r2"]

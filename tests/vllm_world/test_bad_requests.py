"""Requests, options and draft models that do not fit: refused, or served without drafts; others are not hurt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import Engine, Job, make_requests, minedraft_options, plain_ids, renamed


@pytest.fixture(scope="module")
def engine(models: Path, reference: dict[str, list[int]]) -> Iterator[Engine]:
    assert reference  # stock vLLM has run: one engine at a time
    with Engine(models / "target", **minedraft_options(models / "noisy", mode="psd")) as engine:
        yield engine


def finish_reasons(engine: Engine, number: int = 0) -> dict[str, Any]:
    reasons = {}
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.finished:
                reasons[output.request_id] = output.outputs[0].finish_reason
        number += 1
        assert number < 5000, "the engine makes no progress"
    return reasons


@pytest.mark.parametrize("value", ["abc", [1], 1.5, True, -1, float("inf")], ids=str)
def test_a_bound_on_drafts_that_is_none(engine: Engine, value: object) -> None:
    """vLLM's front end lets any value through; only this request ends."""
    from vllm import SamplingParams

    for i, bound in enumerate((value, 2)):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, extra_args={"max_draft_tokens": bound})
        engine.engine.add_request(f"{value}-{i}", {"prompt_token_ids": [5, 6, 7]}, params)
    assert finish_reasons(engine) == {f"{value}-0": "error", f"{value}-1": "length"}
    engine.check_rest()


def test_refused_streams_leave_nothing_behind(engine: Engine) -> None:
    """Of most refused streaming inputs the last piece never comes, since the client hears of the error before."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from minedraft.backends.vllm.conductor import _MAX_STREAMS

    core, number = engine.engine.engine_core.engine_core, 2 * _MAX_STREAMS

    def send(request_id: str, *, resumable: bool) -> None:
        core.add_request(Request(request_id, [5, 6], SamplingParams(max_tokens=4), None, resumable=resumable))
        reasons = []
        while core.scheduler.requests:
            reasons += [one.finish_reason for each in core.step_fn()[0].values() for one in each.outputs]
        assert [str(reason) for reason in reasons] == ["error"]

    for i in range(number):
        send(f"stream{i}", resumable=True)
    assert len(engine.conductor._streams) == _MAX_STREAMS
    for i in range(number - _MAX_STREAMS, number):  # a last piece looks like a request of its own
        send(f"stream{i}", resumable=False)
    assert not engine.conductor._streams
    engine.check_rest()


def test_a_livelock_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM does otherwise than planned again and again, the request is given up; others are served."""
    config = engine.scheduler.scheduler_config
    monkeypatch.setattr(config, "long_prefill_token_threshold", 16)  # would be refused at start
    for job in (Job("long0", [7] * 60, 5), Job("long1", [9] * 60, 5), Job("short", [3, 4], 40)):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        engine.engine.add_request(job.request_id, {"prompt_token_ids": job.prompt}, params)
    reasons = finish_reasons(engine)
    assert reasons["short"] == "length"
    assert "error" in (reasons["long0"], reasons["long1"])
    engine.check_rest()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"long_prefill_token_threshold": 16}, "long_prefill_token_threshold"),
        ({"additional_config": {"minedraft": {"mode": "psd", "max_wait_s": 0}}}, "needs minedraft.drafter"),
        ({"additional_config": {"minedraft": {"mode": "ar", "max_wait_s": 0}}}, "max_wait_s is 0"),
        ({"additional_config": {"minedraft": {"mode": "ar", "on_policy_error": "stop"}}}, "use 'replace' or 'raise'"),
    ],
)
def test_options_that_it_would_serve_wrongly(models: Path, options: dict[str, Any], words: str) -> None:
    from minedraft.backends.vllm.errors import VllmWorldError

    with pytest.raises(VllmWorldError, match=words):
        Engine(models / "target", **{**minedraft_options(None, mode="ar"), **options})


@pytest.mark.parametrize("vocab_size", [512, 64])
def test_vocabularies_that_differ(
    models: Path, reference: dict[str, list[int]], tmp_path: Path, vocab_size: int
) -> None:
    """Drafts that the target doesn't know are cut, and tokens that the drafter doesn't know cost drafts, no more."""
    import torch

    from minedraft.backends.torch.surgery import make_tiny_llama

    shape = {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "dtype": torch.float32}
    make_tiny_llama(tmp_path / "draft", seed=3, vocab_size=vocab_size, **shape)
    jobs = make_requests()
    with Engine(models / "target", **minedraft_options(tmp_path / "draft", mode="psd")) as engine:
        pid = engine.conductor.drafter_pid
        texts = plain_ids(engine.run(renamed(jobs, "v")), "v")
        assert texts == {job.request_id: reference[job.request_id] for job in jobs}
        assert engine.conductor.drafter_pid == pid
        assert engine.conductor.core.state.num_draft_tokens > 0
        engine.check_rest()


def test_no_later_than_stock(models: Path) -> None:
    """Without a drafter a request that arrives while another runs is in the very next step, as in stock vLLM."""
    from vllm import SamplingParams

    with Engine(models / "target", **minedraft_options(None, mode="ar")) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.engine.add_request("first", {"prompt_token_ids": [5, 6, 7]}, params)
        for _ in range(4):
            engine.engine.step()
        engine.engine.add_request("second", {"prompt_token_ids": [5, 6]}, params)
        assert "second" in {output.request_id for output in engine.engine.step()}

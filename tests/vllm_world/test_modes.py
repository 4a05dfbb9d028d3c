"""Greedy texts equal stock vLLM's in every mode, whatever the drafter is worth; sampled ones have its distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from vllm_kit import Engine, make_requests, minedraft_options, replay_report


def check(engine: Engine, reference: dict[str, list[int]]) -> None:
    texts = engine.run(make_requests(), on_step=lambda _: engine.check_blocks())
    assert texts == {request_id: reference[request_id] for request_id in texts}
    assert len(texts) == len(make_requests())
    engine.check_rest()
    assert engine.conductor.counters.strays == 0


def check_journal(journal: Path) -> None:
    report = replay_report(journal)
    assert report.first_difference is None, str(report.first_difference)
    assert report.num_decisions > 50


def check_counters(engine: Engine) -> float:
    """vLLM's own speculative counters agree with the core's; returns the share of accepted drafts."""
    state = engine.conductor.core.state
    metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == state.num_draft_tokens  # type: ignore[attr-defined]
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == state.num_accepted_tokens  # type: ignore[attr-defined]
    assert state.num_draft_tokens > 0
    return state.num_accepted_tokens / state.num_draft_tokens


def test_ar(models: Path, reference: dict[str, list[int]], tmp_path: Path) -> None:
    with Engine(models / "target", **minedraft_options(None, mode="ar", journal=str(tmp_path / "j"))) as engine:
        check(engine, reference)
        assert engine.conductor.core.state.num_draft_tokens == 0
    check_journal(tmp_path / "j")


def test_sd_with_a_useless_drafter_and_a_selection_policy(
    models: Path, reference: dict[str, list[int]], tmp_path: Path
) -> None:
    options = minedraft_options(
        models / "other",
        mode="sd",
        journal=str(tmp_path / "j"),
        policies={"selection": "vllm_kit:KeepTwo"},
        draft_capacity=8,
    )
    with Engine(models / "target", **options) as engine:
        check(engine, reference)
        assert check_counters(engine) < 0.2
    check_journal(tmp_path / "j")


def test_psd_with_a_perfect_drafter(models: Path, reference: dict[str, list[int]], tmp_path: Path) -> None:
    options = minedraft_options(models / "target", mode="psd", journal=str(tmp_path / "j"))
    with Engine(models / "target", **options) as engine:
        check(engine, reference)
        assert check_counters(engine) == 1.0
        check_stop_tokens(engine, reference)
        check_distribution(engine)
    check_journal(tmp_path / "j")


def check_stop_tokens(engine: Engine, reference: dict[str, list[int]]) -> None:
    """A stop token inside an accepted block: nothing after it is kept, at every offset within a block of drafts."""
    from vllm import SamplingParams

    expected = {}
    for job in make_requests():
        text = reference[job.request_id]
        stop = text[len(text) // 2]
        expected[f"s{job.request_id}"] = text[: text.index(stop) + 1]
        params = SamplingParams(
            temperature=0.0, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos, stop_token_ids=[stop]
        )
        engine.engine.add_request(f"s{job.request_id}", {"prompt_token_ids": job.prompt}, params)
    assert engine.run([]) == expected
    engine.check_rest()


def check_distribution(engine: Engine, num_requests: int = 600) -> None:
    """Tokens sampled with drafts (tokens 2 to 4) are distributed as those of runs that opt out of drafts.

    The drafts are the target's own greedy tokens: accepted often, and wrong often. Also with pure top_k.
    """
    from vllm import SamplingParams

    for options in ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 6}):
        counts: list[list[Counter[int]]] = []
        for drafts in (None, 0):
            extra = None if drafts is None else {"max_draft_tokens": drafts}
            params = SamplingParams(max_tokens=4, ignore_eos=True, extra_args=extra, **options)  # type: ignore[arg-type]
            for i in range(num_requests):
                engine.engine.add_request(f"{options}{drafts}-{i}", {"prompt_token_ids": [5, 9, 30]}, params)
            texts = engine.run([]).values()
            counts.append([Counter(text[position] for text in texts) for position in range(4)])
        for with_drafts, without in zip(*counts, strict=True):
            assert deviation(with_drafts, without) < 7.0
    engine.check_rest()


def deviation(one: Counter[int], other: Counter[int]) -> float:
    """How many standard deviations the chi-square of two samples of equal size is off; rare tokens are pooled.

    Two runs without drafts give -2 to 3; with drafts and without `cpu_sampling`, some position gives 20.
    """
    rare = {token for token in one | other if one[token] + other[token] < 20}
    cells = [(one[token], other[token]) for token in sorted((one | other).keys() - rare)]
    cells.append((sum(one[token] for token in rare), sum(other[token] for token in rare)))
    cells = [cell for cell in cells if sum(cell)]
    freedom = max(1, len(cells) - 1)
    return float((sum((a - b) ** 2 / (a + b) for a, b in cells) - freedom) / (2 * freedom) ** 0.5)

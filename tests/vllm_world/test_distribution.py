"""Sampled text is distributed as stock vLLM's own: an engine without speculation, in the same process, same requests.

The drafts are the target's greedy tokens: accepted often, and wrong often.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from test_modes import deviation
from vllm_kit import Engine, minedraft_options

NUM_REQUESTS = 700
LENGTH = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cool_top_p": {"temperature": 0.8, "top_p": 0.9},
    "hot_top_k": {"temperature": 1.2, "top_k": 6},
    "top_k_and_top_p": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_tokens": 3},
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.6,
    },
}

Counts = list[Counter[Any]]


def sample(engine: Engine) -> dict[str, Counter[tuple[int, ...]]]:
    """How often each text of `LENGTH` tokens was written, by setting; the settings run side by side."""
    from vllm import SamplingParams

    for name, options in SETTINGS.items():
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **options)
        for i in range(NUM_REQUESTS):
            engine.engine.add_request(f"{name}.{i}", {"prompt_token_ids": [5, 9, 30]}, params)
    counts: dict[str, Counter[tuple[int, ...]]] = {name: Counter() for name in SETTINGS}
    for request_id, text in engine.run([]).items():
        counts[request_id.partition(".")[0]][tuple(text)] += 1
    return counts


def marginals(texts: Counter[tuple[int, ...]]) -> Counts:
    """Counts of single tokens by position, then of pairs of neighbours by position."""
    counts: Counts = []
    for width in (1, 2):
        for start in range(LENGTH - width + 1):
            count: Counter[Any] = Counter()
            for text, number in texts.items():
                count[text[start : start + width]] += number
            counts.append(count)
    return counts


def test_sampled_text_has_stock_vllms_distribution(models: Path) -> None:
    rows = {"max_num_seqs": 32, "max_num_batched_tokens": 128}
    with Engine(models / "target", **rows) as engine:
        stock = sample(engine)
    with Engine(models / "target", **rows, **minedraft_options(models / "target", mode="psd")) as engine:
        ours = sample(engine)
        state = engine.conductor.core.state
        assert 0.1 < state.num_accepted_tokens / state.num_draft_tokens < 0.9
        engine.check_rest()
        assert engine.conductor.counters.strays == 0
    for name in SETTINGS:
        assert sum(ours[name].values()) == sum(stock[name].values()) == NUM_REQUESTS
        off = [deviation(one, other) for one, other in zip(marginals(ours[name]), marginals(stock[name]), strict=True)]
        assert max(off) < 7.0, (name, off)
    # The measure tells these settings from each other, so it would tell a wrong distribution from the right one.
    for name in list(SETTINGS)[1:]:
        pairs = zip(marginals(ours[name]), marginals(stock["plain"]), strict=True)
        assert max(deviation(one, other) for one, other in pairs) > 10.0, name

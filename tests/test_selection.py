"""Which drafts are verified: what every selector owes, that TETRIS is optimal, that the unbiased one is unbiased."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from minedraft import Request, load_policy
from minedraft.cli import run_cli
from minedraft.policy import BUILTIN, Draft
from minedraft.sequence import SequenceState

NAMES = sorted(BUILTIN["selection"])
# Few different values, so that ties are frequent; 0 and 1 are extremes, and 1 + 1e-7 is what rounding makes of 1.
probs = st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0, 1.0 + 1e-7])
batches = st.lists(st.lists(probs, min_size=1, max_size=5), min_size=1, max_size=6)
distinct = st.lists(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=5), min_size=1, max_size=6)


def make_draft(row: Sequence[float], index: int = 0, num_accepted: int = 0, num_rounds: int = 0) -> Draft:
    seq = SequenceState(Request(f"r{index}", 4, 50), index, 60, 60, 8)
    seq.num_accepted_tokens, seq.num_rounds = num_accepted, num_rounds
    return Draft(seq.view, len(row), tuple(row))


def make_drafts(rows: Sequence[Sequence[float]]) -> list[Draft]:
    """With histories that differ."""
    return [make_draft(row, i, num_accepted=i % 3, num_rounds=2 * (i % 2)) for i, row in enumerate(rows)]


def select(name: str, drafts: Sequence[Draft], capacity: int) -> list[int]:
    return list(load_policy("selection", name).select(drafts, capacity))


def expected_accepted(rows: Sequence[Sequence[float]], kept: Sequence[int]) -> float:
    """If the probabilities are the chances, independent of each other."""
    return sum(math.prod(row[: j + 1]) for row, count in zip(rows, kept, strict=True) for j in range(count))


# --- what every selector owes


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches, capacity=st.integers(0, 32))
def test_within_the_capacity_and_never_less_than_it(name: str, rows: list[list[float]], capacity: int) -> None:
    total = sum(map(len, rows))
    kept = select(name, make_drafts(rows), min(capacity, total))
    assert all(0 <= count <= len(row) for count, row in zip(kept, rows, strict=True))
    assert sum(kept) == min(capacity, total)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches, capacity=st.integers(0, 31))
def test_a_larger_capacity_keeps_what_a_smaller_one_kept(name: str, rows: list[list[float]], capacity: int) -> None:
    drafts = make_drafts(rows)
    capacity = min(capacity, sum(map(len, rows)) - 1)
    grown = [more - less for less, more in zip(*(select(name, drafts, capacity + i) for i in (0, 1)), strict=True)]
    assert sorted(grown) == [0] * (len(rows) - 1) + [1]


@pytest.mark.parametrize("name", NAMES)
def test_ties_go_to_the_earlier_position_and_then_to_the_earlier_request(name: str) -> None:
    drafts = [make_draft([1.0] * 3, i) for i in range(3)]
    assert [select(name, drafts, capacity) for capacity in range(10)][:5] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
    ]


@pytest.mark.parametrize("name", ["tetris", "tetris-unbiased"])
@given(data=st.data(), rows=distinct, capacity=st.integers(0, 30))
def test_the_order_of_the_requests_matters_to_ties_only(
    name: str, data: st.DataObject, rows: list[list[float]], capacity: int
) -> None:
    past = [(7 * i, 5) for i in range(len(rows))]  # histories without ties too
    for with_own in (True, False):
        rates = [1.0 if with_own else (accepted + 1) / (accepted + rounds + 2) for accepted, rounds in past]
        scores = [
            r * math.prod(row[: j + with_own]) for r, row in zip(rates, rows, strict=True) for j in range(len(row))
        ]
        assume(len({round(score, 12) for score in scores}) == len(scores))
    drafts = [make_draft(row, i, *past[i]) for i, row in enumerate(rows)]
    capacity = min(capacity, sum(map(len, rows)))
    order = data.draw(st.permutations(range(len(rows))))
    kept = select(name, drafts, capacity)
    assert select(name, [drafts[i] for i in order], capacity) == [kept[i] for i in order]


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_that_are_none_break_nothing(name: str) -> None:
    rows = [[math.nan, 0.5], [-1.0, 2.0], [math.inf, math.nan]]
    for capacity in range(7):
        kept = select(name, make_drafts(rows), capacity)
        assert sum(kept) == capacity
        assert max(kept) <= 2


# --- TETRIS


@given(rows=st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), min_size=1, max_size=4), data=st.data())
def test_tetris_maximises_the_expected_number_of_accepted_drafts(rows: list[list[float]], data: st.DataObject) -> None:
    capacity = data.draw(st.integers(0, sum(map(len, rows))))
    choices = itertools.product(*(range(len(row) + 1) for row in rows))
    best = max(expected_accepted(rows, kept) for kept in choices if sum(kept) <= capacity)
    kept = select("tetris", make_drafts(rows), capacity)
    assert expected_accepted(rows, kept) == pytest.approx(best, abs=1e-12)


def test_tetris_reads_the_product_and_not_the_single_probability() -> None:
    drafts = [make_draft([0.3, 1.0, 1.0]), make_draft([0.8, 0.5, 0.9], 1)]
    assert select("tetris", drafts, 3) == [0, 3]  # .8 .4 .36 against .3 .3 .3
    assert select("tetris", drafts, 5) == [2, 3]


def test_without_probabilities_tetris_shares_evenly_and_the_unbiased_one_goes_by_history() -> None:
    drafts = [Draft(make_draft([], i, num_accepted=9 * i, num_rounds=3).seq, 3, ()) for i in range(2)]
    assert select("tetris", drafts, 3) == select("all", drafts, 3) == [2, 1]
    assert select("tetris-unbiased", drafts, 3) == [0, 3]


# --- the unbiased one


@given(rows=batches, capacity=st.integers(0, 30), data=st.data())
def test_no_draft_and_none_behind_it_has_a_say_in_whether_it_is_kept(
    rows: list[list[float]], capacity: int, data: st.DataObject
) -> None:
    capacity = min(capacity, sum(map(len, rows)))
    i = data.draw(st.integers(0, len(rows) - 1))
    j = data.draw(st.integers(0, len(rows[i]) - 1))
    changed = [list(row) for row in rows]
    changed[i][j:] = data.draw(st.lists(probs, min_size=len(rows[i]) - j, max_size=len(rows[i]) - j))
    before, after = (select("tetris-unbiased", make_drafts(each), capacity) for each in (rows, changed))
    assert (before[i] > j) == (after[i] > j)


def test_the_published_one_does_ask_the_draft_itself() -> None:
    """The test above is not empty: it would fail for `tetris`."""
    assert select("tetris", [make_draft([0.5]), make_draft([0.6], 1)], 1) == [0, 1]
    assert select("tetris", [make_draft([0.7]), make_draft([0.6], 1)], 1) == [1, 0]


def test_the_guess_at_a_request_is_its_past_and_not_how_much_was_verified() -> None:
    good, bad = make_draft([0.5, 0.5], 0, num_accepted=9, num_rounds=3), make_draft([0.9, 0.9], 1, 0, 3)
    assert select("tetris-unbiased", [bad, good], 1) == [0, 1]
    assert select("tetris-unbiased", [bad, good], 2) == [0, 2]  # 10/14 * .5 against 1/5
    seq = SequenceState(Request("r", 4, 50), 0, 60, 60, 8)
    seq.num_accepted_tokens, seq.num_rounds, seq.num_draft_tokens = 0, 3, 12
    assert select("tetris-unbiased", [Draft(seq.view, 2, (0.9, 0.9)), bad], 1) == [1, 0]


# --- rejection sampling behind a selector

# Distributions of the next token by the one before it; the drafter is surer of itself than the target.
TARGET = ((0.5, 0.5), (0.3, 0.7))
DRAFTER = ((0.9, 0.1), (0.4, 0.6))
TEXT_LEN = 3
Noise = Callable[[str, int, int], float]


def verified_texts(selector: Any, k: int, capacity: int, noise: Noise) -> tuple[tuple[int, ...], ...]:
    """Texts of two requests that share the capacity, by draft, select and verify rounds as in any world."""
    seqs = [SequenceState(Request(f"r{i}", 1, TEXT_LEN), i, 60, 60, k) for i in range(2)]
    texts: list[list[int]] = [[], []]
    while live := [i for i in range(2) if len(texts[i]) < TEXT_LEN]:
        drafts = []
        tokens = {i: draft_tokens(texts[i], k, i, noise) for i in live}
        for i in live:
            rows = [DRAFTER[token] for token in [*texts[i][-1:], *tokens[i]] or [0]]
            rows = rows if texts[i] else [DRAFTER[0], *rows]
            drafts.append(Draft(seqs[i].view, k, tuple(rows[j][token] for j, token in enumerate(tokens[i]))))
        kept = selector.select(drafts, min(capacity, k * len(live)))
        for i, count in zip(live, kept, strict=True):
            accepted = judge(texts[i], tokens[i][:count], i, noise)
            if count:
                seqs[i].num_rounds += 1
                seqs[i].num_draft_tokens += count
                seqs[i].num_accepted_tokens += accepted
    return tuple(tuple(text[:TEXT_LEN]) for text in texts)


def draft_tokens(text: Sequence[int], k: int, request: int, noise: Noise) -> list[int]:
    tokens: list[int] = []
    before = text[-1] if text else 0
    for position in range(len(text), len(text) + k):
        before = int(noise("draft", request, position) >= DRAFTER[before][0])
        tokens.append(before)
    return tokens


def judge(text: list[int], tokens: Sequence[int], request: int, noise: Noise) -> int:
    """Rejection sampling (arXiv 2211.17192, algorithm 1); appends what becomes text, returns the number accepted."""
    for accepted, token in enumerate(tokens):
        before, position = text[-1] if text else 0, len(text)
        p, q = TARGET[before], DRAFTER[before]
        if noise("accept", request, position) >= p[token] / q[token]:
            text.append(1 - token)  # of two tokens the other one is all that p has more of
            return accepted
        text.append(token)
    before = text[-1] if text else 0
    text.append(int(noise("target", request, len(text)) >= TARGET[before][0]))
    return len(tokens)


def chance(text: Sequence[int]) -> float:
    """Of a text, by the target alone."""
    return math.prod(TARGET[before][token] for before, token in itertools.pairwise([0, *text]))


def by_position(seed: int) -> Noise:
    """Noise that is a function of what it is for: a position that is drafted anew gets the same number again."""
    known: dict[tuple[str, int, int], float] = {}
    draw = random.Random(seed).random
    return lambda *key: known[key] if key in known else known.setdefault(key, draw())


def afresh(seed: int) -> Noise:
    """New noise for every use."""
    draw = random.Random(seed).random
    return lambda *_: draw()


@pytest.mark.parametrize("make_noise", [afresh, by_position])
@pytest.mark.parametrize(("name", "exact"), [("tetris-unbiased", True), ("all", True), ("tetris", False)])
def test_sampled_text_behind_a_selector(name: str, exact: bool, make_noise: Callable[[int], Noise]) -> None:
    """Joint distribution of both texts, so that it also shows whether they depend on each other."""
    num_pairs = 20_000
    selector = load_policy("selection", name)
    every = list(itertools.product((0, 1), repeat=TEXT_LEN))
    counts = dict.fromkeys(itertools.product(every, repeat=2), 0)
    for seed in range(num_pairs):
        counts[verified_texts(selector, 3, 2, make_noise(seed))] += 1
    expected = [num_pairs * chance(one) * chance(other) for one, other in counts]
    p_value = stats.chisquare(list(counts.values()), expected).pvalue
    assert (p_value > 1e-3) if exact else (p_value < 1e-12), p_value


# --- in a run


def simulated(capsys: pytest.CaptureFixture[str], selection: str, *options: str) -> dict[str, Any]:
    """Figures of a run whose requests differ in how well they can be drafted."""
    arguments = ["simulate", "--mode", "psd", "--policy", f"selection={selection}", "--json", "-"]
    arguments += ["--set", "acceptance={kind='beta',mean=0.6,concentration=2.0,draft_probs=true}"]
    arguments += ["--set", "scheduler.num_speculative_tokens=4", "--set", "workload.num_requests=64"]
    for option in options:
        arguments += ["--set", option]
    assert run_cli(arguments) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def test_selection_gains_acceptance_per_verified_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """Under a capacity of 1.5 drafts per request, in a run from the command line."""
    tight = "scheduler.draft_capacity=24"
    rates = {name: simulated(capsys, name, tight)["spec_decode_acceptance_rate"] for name in NAMES}
    assert rates["tetris"] > rates["all"] + 5
    assert rates["tetris-unbiased"] > rates["all"] + 5


def test_where_there_is_room_for_all_every_selector_keeps_all(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [simulated(capsys, name, "scheduler.draft_capacity=1000") for name in NAMES]
    for figures, name in zip(runs, NAMES, strict=True):
        assert figures["config"]["policies"].pop("selection") == name
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "all"])
def test_a_selection_without_a_capacity_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """It would keep everything, and its figures would be taken for those of a selection."""
    options = ["simulate", "--policy", f"selection={name}", "--set", "workload.num_requests=8"]
    assert run_cli([*options, "--mode", "psd"]) == 2
    message = capsys.readouterr().err
    assert f"scheduler.draft_capacity: is missing, without which selection '{name}' keeps every draft" in message
    assert run_cli([*options, "--mode", "ar"]) == 0

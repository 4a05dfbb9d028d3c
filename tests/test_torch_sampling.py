"""Sampling: the two kinds of acceptance are exact, and random numbers depend on (seed, position, stream) only."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from minedraft.backends.torch import randomness
from minedraft.backends.torch.request import Sampling
from minedraft.backends.torch.sampling import Acceptance, draft_token, probabilities, target_token, verify

VOCAB = 5
K = 2


def table(seed: int) -> dict[tuple[int, ...], Tensor]:
    """Logits for every context of up to three tokens: a model in a table."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [()]
    for length in range(K + 1):
        contexts += [(*c, t) for c in contexts if len(c) == length for t in range(VOCAB)]
    return {c: 1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64) for c in contexts}


def speculate(
    target: dict[tuple[int, ...], Tensor],
    drafter: dict[tuple[int, ...], Tensor],
    sampling: Sampling,
    acceptance: Acceptance,
    k: int,
    length: int,
) -> tuple[list[int], int]:
    """Generate `length` tokens with k drafts a round; also the number of accepted drafts."""
    text: list[int] = []
    accepted = 0
    while len(text) < length:
        num_draft = min(k, length - len(text) - 1)
        drafts = []
        for _ in range(num_draft):
            context = (*text, *[d.token_id for d in drafts])
            drafts.append(draft_token(drafter[context], sampling, len(context), acceptance))
        ids = [draft.token_id for draft in drafts]
        logits = torch.stack([target[(*text, *ids[:i])] for i in range(num_draft + 1)])
        rows = [draft.row for draft in drafts if draft.row is not None]
        new = verify(logits, ids, torch.stack(rows) if rows else None, sampling, len(text), acceptance)
        accepted += len(new) - 1
        text += new
    return text, accepted


def expected_joint(model: dict[tuple[int, ...], Tensor], sampling: Sampling) -> dict[tuple[int, ...], float]:
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        joint = {
            (*context, token): mass * float(p)
            for context, mass in joint.items()
            for token, p in enumerate(probabilities(model[context], sampling))
        }
    return joint


def check_joint(params: tuple[float, int, float], acceptance: Acceptance, k: int, n: int) -> None:
    """E2: the joint distribution of three tokens, over requests that differ in their seed only."""
    target, drafter = table(1), table(2)
    counts = Counter(
        tuple(speculate(target, drafter, Sampling(*params, seed), acceptance, k, 3)[0]) for seed in range(n)
    )
    expected = expected_joint(target, Sampling(*params))
    assert all(expected[text] > 0 for text in counts)
    # Texts that are too rare for the test share a bin.
    common = [text for text, mass in expected.items() if mass * n >= 5]
    seen = [counts[text] for text in common]
    wanted = [expected[text] * n for text in common]
    if n - sum(wanted) > 1:
        seen.append(n - sum(seen))
        wanted.append(n - sum(wanted))
    wanted = [value * sum(seen) / sum(wanted) for value in wanted]
    assert chisquare(seen, wanted).pvalue > 1e-3


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_three_tokens_follow_the_target(acceptance: Acceptance) -> None:
    check_joint((1.0, 0, 1.0), acceptance, k=2, n=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [(1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8), (1.0, 4, 0.7)], ids=["plain", "k", "p", "both"]
)
@pytest.mark.parametrize("acceptance", list(Acceptance))
@pytest.mark.parametrize("k", [0, 1, 2])
def test_three_tokens_follow_the_target_closely(
    params: tuple[float, int, float], acceptance: Acceptance, k: int
) -> None:
    check_joint(params, acceptance, k, n=2000)


def test_rejection_accepts_with_the_overlap_of_p_and_q() -> None:
    target, drafter, n = table(1), table(2), 1500
    p, q = (probabilities(model[()], Sampling(1.0)) for model in (target, drafter))
    overlap = float(torch.minimum(p, q).sum())
    accepted = sum(
        speculate(target, drafter, Sampling(1.0, seed=seed), Acceptance.REJECTION, 1, 2)[1] for seed in range(n)
    )
    assert abs(accepted / n - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / n)


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_a_drafter_equal_to_the_target_is_always_accepted(acceptance: Acceptance) -> None:
    model = table(1)
    for seed in range(60):
        _, accepted = speculate(model, model, Sampling(1.0, seed=seed), acceptance, 2, 3)
        assert accepted == 2


@pytest.mark.parametrize("params", [(1.0, 0, 1.0), (0.7, 3, 0.9)])
def test_coupled_text_depends_on_neither_drafter_nor_k(params: tuple[float, int, float]) -> None:
    target = table(1)
    for seed in range(50):
        sampling = Sampling(*params, seed)
        texts = [
            speculate(target, table(drafter), sampling, Acceptance.COUPLED, k, 3)[0]
            for drafter, k in ((1, 0), (1, 2), (2, 1), (3, 2))
        ]
        assert texts.count(texts[0]) == 4


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_greedy_accepts_the_argmax_and_nothing_else(acceptance: Acceptance) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 9.0]])
    greedy = Sampling()
    assert verify(logits, [1, 0], None, greedy, 7, acceptance) == [1, 0, 2]
    assert verify(logits, [1, 1], None, greedy, 7, acceptance) == [1, 0]
    assert verify(logits, [0, 0], None, greedy, 7, acceptance) == [1]
    assert verify(logits[:1], [], None, greedy, 7, acceptance) == [1]
    assert draft_token(logits[0], greedy, 7, acceptance).token_id == 1


def test_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).double().log()
    assert probabilities(logits, Sampling(1.0, 2)).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(logits, Sampling(1.0, 0, 0.65)).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(logits, Sampling(1.0, 0, 1e-9)).tolist() == pytest.approx([1, 0, 0, 0])
    assert probabilities(logits, Sampling(1.0, 3, 0.8)).tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert probabilities(logits, Sampling(1.0, 100)).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for seed in range(100):
        for acceptance in Acceptance:
            assert target_token(logits, Sampling(1.0, seed=seed), 3, acceptance) in (1, 3)


def test_random_numbers_are_functions_of_their_key() -> None:
    keys = [
        (seed, position, stream)
        for seed in (0, 1, 2**64 - 1)
        for position in (0, 1, 9000)
        for stream in (randomness.DRAFT, randomness.ACCEPT, randomness.TARGET)
    ]
    values = [randomness.uniform(*key) for key in keys]
    assert values == [randomness.uniform(*key) for key in keys]
    assert len(dict.fromkeys(values)) == len(keys)
    assert all(0 < value < 1 for value in values)


def test_gumbel_noise_does_not_depend_on_the_padding_of_the_vocabulary() -> None:
    short, long = randomness.gumbel(5, 17, 10), randomness.gumbel(5, 17, 16)
    assert torch.equal(short, long[:10])
    assert not torch.equal(short, randomness.gumbel(5, 18, 10))
    many = randomness.gumbel(1, 1, 20000)
    assert float(many.mean()) == pytest.approx(0.5772, abs=0.03)
    assert float(many.var()) == pytest.approx(math.pi**2 / 6, rel=0.05)

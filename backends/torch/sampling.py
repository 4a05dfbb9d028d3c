"""How tokens are drafted and verified. Pure functions of logits, parameters and `randomness`.

Two ways to accept a sampled draft, both exact:

* `rejection`: the drafter samples d from q; the target takes it with probability min(1, p(d)/q(d)), else samples from
  the residual max(0, p - q). Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative
  Decoding", 2023; C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
* `coupled`: both sides take argmax(log prob + g) with the same Gumbel noise g, and a draft is accepted if it is the
  target's own token. M. Daliri, C. Musco, A. T. Suresh, "Coupling without Communication and Drafter-Invariant
  Speculative Decoding", 2024. The text is then a function of target, prompt and seed alone: it does not depend on
  the drafter, on k or on the schedule. It accepts a little less often than `rejection`.

Greedy requests (temperature 0) accept a draft if it is the target's argmax under either.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minedraft.backends.torch import randomness
from minedraft.backends.torch.request import Sampling


class Acceptance(enum.StrEnum):
    """How sampled drafts are accepted; see the module."""

    REJECTION = "rejection"
    COUPLED = "coupled"


class DraftToken(NamedTuple):
    """One drafted token.

    Attributes:
        token_id: the draft.
        prob: the drafter's probability of it.
        row: q, float32 of shape [V], if the target needs it to verify; else None.
    """

    token_id: int
    prob: float
    row: Tensor | None


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that a request samples from.

    Args:
        logits: shape [V].
        sampling: its temperature must be above 0.

    Returns:
        Probabilities in float64, shape [V]: temperature, then top-k, then top-p of what is left.
    """
    probs = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    if not sampling.top_k and sampling.top_p >= 1:
        return probs
    ranked, token_ids = probs.sort(descending=True, stable=True)
    if sampling.top_k:
        ranked[sampling.top_k :] = 0
        ranked = ranked / ranked.sum()
    if sampling.top_p < 1:
        # A token stays if the mass before it falls short of top_p; so the likeliest always stays.
        ranked = torch.where(ranked.cumsum(-1) - ranked < sampling.top_p, ranked, 0)
    return torch.zeros_like(probs).scatter(-1, token_ids, ranked / ranked.sum())


def _inverse_cdf(weights: Tensor, uniform: float) -> int:
    """The index whose share of the cumulative weights holds `uniform`; never one of weight 0."""
    cumulative = weights.cumsum(-1)
    index = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    # Rounding may put the threshold on the total itself.
    return min(index, int(weights.nonzero()[-1]))


def target_token(logits: Tensor, sampling: Sampling, position: int, acceptance: Acceptance) -> int:
    """The target's own token at a position, drafts aside.

    Args:
        logits: the target's, shape [V].
        sampling: the request's parameters.
        position: index of the token in the sequence, prompt included.
        acceptance: which noise to use.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probs = probabilities(logits, sampling)
    if acceptance is Acceptance.COUPLED:
        return _gumbel_argmax(probs, sampling, position)
    return _inverse_cdf(probs, randomness.uniform(sampling.seed, position, randomness.TARGET))


def _gumbel_argmax(probs: Tensor, sampling: Sampling, position: int) -> int:
    noise = randomness.gumbel(sampling.seed, position, probs.shape[-1]).to(probs.device)
    return int((probs.log() + noise).argmax())


def draft_token(logits: Tensor, sampling: Sampling, position: int, acceptance: Acceptance) -> DraftToken:
    """Draft one token.

    Args:
        logits: the drafter's, shape [V].
        sampling: the request's parameters.
        position: index of the token in the sequence, prompt included.
        acceptance: how the target is going to judge it.
    """
    if sampling.temperature == 0:
        token_id = int(logits.argmax())
        return DraftToken(token_id, float(torch.softmax(logits.double(), dim=-1)[token_id]), None)
    probs = probabilities(logits, sampling)
    if acceptance is Acceptance.COUPLED:
        token_id = _gumbel_argmax(probs, sampling, position)
        return DraftToken(token_id, float(probs[token_id]), None)
    row = probs.float()  # what is sampled from must be what is shipped, bit for bit
    q = _distribution(row)
    token_id = _inverse_cdf(q, randomness.uniform(sampling.seed, position, randomness.DRAFT))
    return DraftToken(token_id, float(q[token_id]), row)


def _distribution(row: Tensor) -> Tensor:
    q = row.double()
    return q / q.sum()


def verify(
    logits: Tensor,
    draft_ids: Sequence[int],
    draft_rows: Tensor | None,
    sampling: Sampling,
    position: int,
    acceptance: Acceptance,
) -> list[int]:
    """Judge k drafts against the target.

    Args:
        logits: the target's at the k draft positions and the one after, shape [k + 1, V].
        draft_ids: the drafts.
        draft_rows: q at the draft positions, shape [k, V]; None for greedy and coupled requests, and for k = 0.
        sampling: the request's parameters.
        position: index of the first draft in the sequence, prompt included.
        acceptance: how.

    Returns:
        The accepted drafts and one token of the target's own behind them.
    """
    if sampling.temperature == 0 or acceptance is Acceptance.COUPLED:
        tokens = []
        for offset, draft_id in enumerate((*draft_ids, None)):
            tokens.append(target_token(logits[offset], sampling, position + offset, acceptance))
            if tokens[-1] != draft_id:
                break
        return tokens
    return _verify_by_rejection(logits, draft_ids, draft_rows, sampling, position)


def _verify_by_rejection(
    logits: Tensor, draft_ids: Sequence[int], draft_rows: Tensor | None, sampling: Sampling, position: int
) -> list[int]:
    tokens: list[int] = []
    for offset, draft_id in enumerate(draft_ids):
        assert draft_rows is not None
        p = probabilities(logits[offset], sampling)
        q = _distribution(draft_rows[offset].to(p.device))
        if randomness.uniform(sampling.seed, position + offset, randomness.ACCEPT) * q[draft_id] < p[draft_id]:
            tokens.append(draft_id)
            continue
        residual = (p - q).clamp(min=0)
        if not residual.any():  # p equals q up to rounding
            residual = p
        own = randomness.uniform(sampling.seed, position + offset, randomness.TARGET)
        return [*tokens, _inverse_cdf(residual, own)]
    last = len(draft_ids)
    return [*tokens, target_token(logits[last], sampling, position + last, Acceptance.REJECTION)]

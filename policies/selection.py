"""Selection: which drafts are worth verifying.

Law of this file: every rule ranks all drafts of the batch by a score that never rises along a request's drafts, ties
going to the earlier position and then to the earlier request, and keeps the best ones. So what is kept of a request is
always its first drafts, and never more than the capacity, whatever the probabilities are (the plugin that the authors
of arXiv 2603.18016 published keeps more than the capacity where probabilities are equal).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

from minedraft.policy import Draft
from minedraft.sequence import SequenceView


class All:
    """Everything that was drafted; if that is over the capacity, everybody's first drafts before anybody's second."""

    keeps_all = True

    def select(self, drafts: Sequence[Draft], capacity: int) -> Sequence[int]:
        """All, or an even share."""
        kept = [0] * len(drafts)
        for position in range(max(draft.num_drafted for draft in drafts)):
            for i, draft in enumerate(drafts):
                if capacity and draft.num_drafted > position:
                    kept[i] += 1
                    capacity -= 1
        return kept


class Tetris:
    """TETRIS as published (Wu et al., ACL 2025, arXiv 2502.15197): the drafts that are most likely to be accepted.

    A draft's score is the product of the drafter's probabilities from the request's first draft up to and including
    this one, the estimate of the chance that all of them are accepted. Keeping the `capacity` highest scores of the
    whole batch maximises the expected number of accepted drafts if the probabilities are the chances and the drafts'
    fates are independent. To use it as the authors do, draft more than is going to be verified:
    `num_speculative_tokens` = k + e and `draft_capacity` = k times the batch size. Without a capacity it keeps all.

    **Bias.** Whether a draft is verified hangs on that draft's own probability q(x). Where drafts are sampled from q
    and judged against q by rejection sampling (accept with min(1, p(x) / q(x)), else sample from what p has more of),
    that changes the distribution of the text. The rule of rejection sampling is exact for a token that was drawn from
    q, but a token that survived this selection was drawn from q and then sieved: likely ones are over-represented.
    Those that were cut are replaced by samples of p, which doesn't make up for it. With p = (.5, .5), q = (.9, .1) and
    only likely drafts kept, token 0 comes out with .9 * (.5 / .9) + .1 * .5 = .55 instead of .5. `TetrisUnbiased`
    has no such bias.

    It doesn't matter

    * with greedy drafts: x is a function of the context, and so is what is kept;
    * with one-hot verification, where a draft is accepted with p(x) (the vLLM world: it ships token ids, not q): that
      is exact for any x, however it was chosen;
    * where the target's sample is fixed before it sees the drafts (the torch world's coupled acceptance).

    Where a world knows no probabilities, all are taken to be alike: everybody's first drafts before anybody's second.
    """

    keeps_all = False
    needs_capacity = True

    def select(self, drafts: Sequence[Draft], capacity: int) -> Sequence[int]:
        """The `capacity` drafts with the highest products of probabilities."""
        products = [islice(accumulate(draft.probs, _times, initial=1.0), 1, None) for draft in drafts]
        return _keep_best(drafts, capacity, products)


class TetrisUnbiased:
    """TETRIS with scores that leave out the draft that is decided on, so that sampled text keeps its distribution.

    The score of draft j is the product of the probabilities of the request's drafts *before* j, and of a guess at
    draft j's chance that was known before the round: the request's rate so far (see `_known_rate`). Drafts after j
    have lower scores than j, so they don't decide about it either, and the drafts of other requests are independent of
    it. So whether x_j is verified is settled before x_j is drawn, so to speak: given that it is, it still has the
    distribution q, for which rejection sampling is exact, and given that it isn't, the target samples from p. Texts of
    different requests stay independent as well: ranks can be revealed one by one, each from what was revealed before.

    What it costs: the guess is the request's own average, not this draft's own probability. Where a world knows no
    probabilities, that average stands in for those as well.
    """

    keeps_all = False
    needs_capacity = True

    def select(self, drafts: Sequence[Draft], capacity: int) -> Sequence[int]:
        """The `capacity` drafts with the highest scores, none of which reads its own draft's probability."""
        scores: list[Iterable[float]] = []
        for draft in drafts:
            rate = _known_rate(draft.seq)
            before = draft.probs[:-1] if draft.probs else (rate,) * (draft.num_drafted - 1)
            scores.append(accumulate(before, _times, initial=rate))
        return _keep_best(drafts, capacity, scores)


def _times(chance: float, prob: float) -> float:
    """The product, but never above the first factor, whatever a world reports as a probability."""
    return min(chance, chance * prob)


def _known_rate(seq: SequenceView) -> float:
    """A request's chance per draft by its past rounds, each of which counts as one refusal, by Laplace's rule.

    The number of drafts that were verified would give a better estimate, but may tell of tokens that didn't become
    text: a round's later drafts are kept or cut by the probabilities of those before them, and where random numbers
    are functions of the position (the torch world) the same number is used again when that position is drafted anew.
    Accepted drafts and rounds hang on nothing but tokens that did become text.
    """
    return (seq.num_accepted_tokens + 1.0) / (seq.num_accepted_tokens + seq.num_rounds + 2.0)


def _keep_best(drafts: Sequence[Draft], capacity: int, scores: Sequence[Iterable[float]]) -> Sequence[int]:
    """Count the `capacity` best drafts by request.

    Args:
        drafts: of the batch.
        capacity: how many drafts may be kept.
        scores: per request, in order of position and never rising; where there are fewer than drafts, the last one
            (1 if there is none) holds for the rest.

    Returns:
        Per request, how many of its first drafts are among the best.
    """
    if capacity >= sum(draft.num_drafted for draft in drafts):
        return [draft.num_drafted for draft in drafts]
    ranked: list[tuple[float, int, int]] = []
    for i, (draft, row) in enumerate(zip(drafts, scores, strict=True)):
        score = 1.0
        known = iter(row)
        for position in range(draft.num_drafted):
            score = next(known, score)
            ranked.append((-score, position, i))
    ranked.sort()
    kept = [0] * len(drafts)
    for _, _, i in ranked[: max(0, capacity)]:
        kept[i] += 1
    return kept

"""PEARL in closed form: tokens per step of its chain of two states (Liu et al., ICLR 2025, arXiv 2408.11850).

Not in the paper on PSD, which measures PEARL as a baseline. What a step does is told in `minedraft.sim.pearl`.
"""

from __future__ import annotations

from minedraft.theory.tokens import geometric_tokens


def pearl_tokens_per_step(alpha: float, num_draft: int) -> float:
    """Mean tokens that one request gets per PEARL step, each of which takes max(V, t) + o (`StageTimes.psd_s`).

    With k = `num_draft` tokens drafted per step and chance a = `alpha` that a draft is right given those before it:

    * pre-verify commits 1 token; with chance a it was drafted, and post-verify follows, else pre-verify again;
    * post-verify commits E = (1 - a^k) / (1 - a) tokens on average; with chance a^k all k tokens in question were
      right, and post-verify follows again, else pre-verify.

    The share of post-verify steps is p = a / (1 + a - a^k), so the mean is 1 - p + p E = (1 - a^k) / ((1 - a) (1 + a -
    a^k)): 1 at a = 0, k at a = 1, and 1 for k <= 1. That is k, not k + 1, at the best: there is no bonus token, since
    what the target says behind the last draft judges the first token of the next draft.

    Raises:
        ValueError: alpha is outside [0, 1], or `num_draft` is negative.
    """
    if num_draft < 1:
        return geometric_tokens(alpha, num_draft)  # 1, once the arguments are checked
    in_post = geometric_tokens(alpha, num_draft - 1)
    share = post_verify_share(alpha, num_draft)
    return 1.0 - share + share * in_post


def post_verify_share(alpha: float, num_draft: int) -> float:
    """The share of a request's steps that are post-verify: a / (1 + a - a^k); 0 without drafts.

    Raises:
        ValueError: alpha is outside [0, 1], or `num_draft` is negative.
    """
    geometric_tokens(alpha, num_draft)  # checks both
    return alpha / (1.0 + alpha - alpha**num_draft) if num_draft else 0.0

"""Each mode's own best k, and how dear drafting must be for PSD to save a given share of time.

The paper's theorem lets a round choose its drafting *time* at a fixed number of drafts (`minedraft.theory.theorem`). A
plain drafter chooses how many tokens it drafts, one pass each; this file is that case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minedraft.theory.extra import brentq
from minedraft.theory.tokens import check_rates, geometric_tokens, tokens_per_round


class BestLength(NamedTuple):
    """The k at which a mode is fastest.

    Attributes:
        num_draft: k; 0 means that plain decoding is faster than any speculation tried.
        tokens: E[N], tokens per round.
        step_s: seconds of a round.
        seconds_per_token: of one request in a batch, step_s / tokens.
    """

    num_draft: int
    tokens: float
    step_s: float

    @property
    def seconds_per_token(self) -> float:
        """Seconds of a round per token of a request in it."""
        return self.step_s / self.tokens


def best_draft_length(rates: Sequence[float], step_s: Callable[[int], float], *, least: int = 0) -> BestLength:
    """The k from `least` to the number of rates with the fewest seconds per token, the smallest of equals.

    Args:
        rates: of the longest round to try; see `minedraft.theory.tokens`.
        step_s: seconds of a round with k drafts, such as `lambda k: lines.at(k).psd_s`.
        least: 1 to leave plain decoding out.
    """
    checked = check_rates(rates)
    if not 0 <= least <= len(checked):
        raise ValueError(f"least is {least}, must be in [0, {len(checked)}], the number of rates")
    choices = [BestLength(k, tokens_per_round(checked[:k]), step_s(k)) for k in range(least, len(checked) + 1)]
    return min(choices, key=lambda choice: choice.seconds_per_token)


def reduction_at_best(alpha: float, draft_cost: float, *, least: int = 0) -> float:
    """1 - T_PSD / T_SD with each mode at its own best k, at constant alpha, o = 0 and the same m.

    T_SD = min over k of (1 + c k) / E[N](k) and T_PSD = min over k of max(1, c k) / E[N](k), in units of V.

    Args:
        alpha: acceptance rate, in [0, 1).
        draft_cost: c, seconds of one drafting pass over V, above 0.
        least: the smallest k that either may choose; 0 lets both decode plainly.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha is {alpha}, must be in [0, 1)")
    if not 0.0 < draft_cost < math.inf:
        raise ValueError(f"draft_cost is {draft_cost}, must be finite and > 0")
    sequential = _least_per_token(alpha, lambda k: 1.0 + draft_cost * k, least)
    parallel = _least_per_token(alpha, lambda k: max(1.0, draft_cost * k), least)
    return 1.0 - parallel / sequential


def _least_per_token(alpha: float, step: Callable[[int], float], least: int) -> float:
    """The minimum of step(k) / E[N](k).

    E[N] is concave in k and both steps are convex, so the quotient falls and then rises: the first rise ends the
    search.
    """
    k, best = least, step(least) / geometric_tokens(alpha, least)
    while (after := step(k + 1) / geometric_tokens(alpha, k + 1)) < best:
        k, best = k + 1, after
    return best


def draft_cost_ends(alpha: float, reduction: float, *, least: int = 0) -> tuple[float, float] | None:
    """The smallest and the largest c = (seconds per drafting pass) / V at which PSD saves this share of time.

    Below the first the drafter is so fast that there is little to hide; beyond the second so slow that the target
    waits. Between the two the saving isn't monotone, since k is a whole number, and may fall below `reduction` for a
    while: 37 % at alpha = 0.5 needs c >= 0.229, and isn't reached for c in 0.256 … 0.269 either. Both ends are
    crossings on a grid of c in steps of 1.4 %, refined.

    Args:
        alpha: acceptance rate, in (0, 1).
        reduction: strictly between 0 and 0.5.
        least: see `reduction_at_best`.

    Returns:
        Both ends; None if no c in [1e-4, 10] is enough.
    """
    if not 0.0 < reduction < 0.5:
        raise ValueError(f"reduction is {reduction}, must lie strictly between 0 and 0.5")

    def beyond(log_cost: float) -> float:
        return reduction_at_best(alpha, math.exp(log_cost), least=least) - reduction

    low, high = math.log(1e-4), math.log(10.0)
    grid = [low + (high - low) * i / 800 for i in range(801)]
    enough = [i for i, value in enumerate(map(beyond, grid)) if value >= 0.0]
    if not enough:
        return None
    first, last = enough[0], enough[-1]
    smallest = grid[0] if first == 0 else brentq(beyond, grid[first - 1], grid[first])
    largest = grid[-1] if last == len(grid) - 1 else brentq(beyond, grid[last], grid[last + 1])
    return math.exp(smallest), math.exp(largest)

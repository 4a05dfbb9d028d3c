"""Tokens per round, from the chance that drafts are accepted.

Acceptance is given as *rates*: entry i - 1 is the chance that the first i drafts of a round are all accepted. These are
unconditional and never rise; vLLM calls them `synthetic_acceptance_rates`. A round with k drafts uses the first k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The rates as floats.

    Raises:
        ValueError: one is outside [0, 1], or they rise; the message names the position.
    """
    found = tuple(map(float, rates))
    for i, rate in enumerate(found):
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"rates[{i}] is {rate}, must be in [0, 1]")
        if i and rate > found[i - 1]:
            raise ValueError(
                f"rates[{i}] is {rate}, above {found[i - 1]} before it: each is the chance that all drafts up to it "
                "are accepted, so they cannot rise"
            )
    return found


def constant_rates(alpha: float, num_draft: int) -> tuple[float, ...]:
    """Rates if each draft is accepted with chance `alpha` given those before it: alpha, alpha^2 and so on.

    Raises:
        ValueError: alpha is outside [0, 1], or `num_draft` is negative.
    """
    _check_alpha(alpha)
    _check_num_draft(num_draft)
    return tuple(alpha**i for i in range(1, num_draft + 1))


def beta_rates(a: float, b: float, num_draft: int) -> tuple[float, ...]:
    """Rates over requests whose own alpha is drawn from Beta(a, b): rate i is E[alpha^i].

    E[alpha^i] = product over j < i of (a + j) / (a + b + j). Conditional rates then rise with the position, as those of
    real drafters do. The mean is over requests of equally many rounds, not of equally many tokens.

    Raises:
        ValueError: a or b isn't finite and above 0, or `num_draft` is negative.
    """
    for name, value in (("a", a), ("b", b)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} is {value}, must be finite and > 0")
    _check_num_draft(num_draft)
    rates, power = [], 1.0
    for i in range(num_draft):
        power *= (a + i) / (a + b + i)
        rates.append(power)
    return tuple(rates)


def accepted_per_round(rates: Sequence[float]) -> float:
    """Mean accepted drafts of a round: the sum of the rates.

    What the paper's T_SD and T_PSD (section 4) count, as R/f(t) steps for R tokens: they leave out the one token that
    the target adds to every round. `tokens_per_round` has it.
    """
    return math.fsum(check_rates(rates))


def tokens_per_round(rates: Sequence[float]) -> float:
    """E[N], mean tokens of a round: 1 + the sum of the rates.

    The 1 is the target's own token: the correction after a rejected draft, or the bonus token after k accepted ones
    (the "+ m" in the paper's throughput G, section 3; arXiv 2211.17192, eq. 1).
    """
    return 1.0 + accepted_per_round(rates)


def tokens_per_round_without_bonus(rates: Sequence[float]) -> float:
    """Mean tokens of a round in an engine that gives no token after k accepted drafts: N = min(accepted + 1, k).

    This is 1 + the sum of all rates but the last, so one draft fewer per round than `tokens_per_round`; 1 for k = 0.
    """
    return tokens_per_round(check_rates(rates)[:-1])


def geometric_tokens(alpha: float, num_draft: int) -> float:
    """E[N] at constant alpha: (1 - alpha^(k+1)) / (1 - alpha), the geometric law cut at k (arXiv 2211.17192, eq. 1).

    Raises:
        ValueError: alpha is outside [0, 1], or `num_draft` is negative.
    """
    _check_alpha(alpha)
    _check_num_draft(num_draft)
    if alpha == 1.0:
        return num_draft + 1.0
    # expm1 and log1p keep the digits near alpha = 1.
    return -math.expm1((num_draft + 1) * math.log(alpha)) / (1.0 - alpha) if alpha else 1.0


def unbounded_geometric_tokens(alpha: float) -> float:
    """E[N] at constant alpha with no limit on k: 1 / (1 - alpha); what no k exceeds.

    Raises:
        ValueError: alpha is outside [0, 1].
    """
    _check_alpha(alpha)
    return math.inf if alpha == 1.0 else 1.0 / (1.0 - alpha)


def token_distribution(rates: Sequence[float]) -> tuple[float, ...]:
    """The chance of a round of exactly n tokens, n = 1 … k + 1, bonus token included."""
    reached = (1.0, *check_rates(rates), 0.0)
    return tuple(here - beyond for here, beyond in pairwise(reached))


def expected_rounds(rates: Sequence[float], num_tokens: int) -> float:
    """Mean rounds until a request has `num_tokens` more tokens; what the last round has too many is cut off.

    A renewal equation, T(L) = 1 + sum over n of P(N = n) T(L - n). It is a little above the num_tokens / E[N] of the
    paper, which has no last round: num_tokens <= E[N] T < num_tokens + k + 1 (Wald). A prompt's own pass gives the
    first token of an answer, so an answer of L tokens takes T(L - 1) rounds.

    Raises:
        ValueError: `num_tokens` is negative, or the rates can't be used.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}, must be >= 0")
    chances = token_distribution(rates)
    rounds = [0.0]
    for length in range(1, num_tokens + 1):
        ahead = math.fsum(p * rounds[length - n] for n, p in enumerate(chances, 1) if n < length)
        rounds.append(1.0 + ahead)
    return rounds[-1]


def _check_alpha(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}, must be in [0, 1]")


def _check_num_draft(num_draft: int) -> None:
    if num_draft < 0:
        raise ValueError(f"num_draft is {num_draft}, must be >= 0")

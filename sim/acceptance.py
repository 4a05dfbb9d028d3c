"""Acceptance models: how many drafts the target accepts.

A token's fate is keyed by (seed, request, position), see `minedraft.sim.fates`: output position p of a request has one
uniform number U(p), and a draft for p in slot j of its round is accepted iff all earlier slots were and U(p) < c_j, the
slot's conditional rate. So the draft length, the policies, the batches, a preemption or a failed step change which
positions are asked for but never what would have been accepted: runs that differ in policy share their luck (common
random numbers). Nothing is drawn without drafts.

In a run every position is asked for at most once in a round that counts, so the counts of a request's rounds
are independent, and the mean over rounds follows the closed form `expected_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from minedraft.request import RequestId
from minedraft.sim.beta_fates import BetaFates
from minedraft.sim.fates import TokenFates, threshold


class AcceptanceModel(Protocol):
    """Decides fates; see the module's docstring for the consistency a model must keep."""

    def num_accepted(self, request_id: RequestId, position: int, num_draft: int) -> int:
        """Accepted drafts of a round, 0 <= result <= num_draft.

        Args:
            request_id: whose round.
            position: output tokens committed before the round; slot j drafts output position `position + j`.
            num_draft: drafts verified in this round, at least 1.
        """
        ...

    def conditional_rates(self, request_id: RequestId, num_draft: int) -> tuple[float, ...]:
        """c_0 … c_(num_draft-1): the chance of each slot given that all before it were accepted."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept for a request that has ended; unknown ids are ignored."""
        ...


def _check_unit(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}, must be in [0, 1]")


class SyntheticRates:
    """Unconditional rates per slot: vLLM's `synthetic_acceptance_rates`, with the same meaning and checks.

    Entry i is the marginal probability that the first i + 1 drafts are all accepted, so the conditional rate
    of slot i is rates[i] / rates[i-1]. Shorter rounds use the first rates.

    Args:
        synthetic_acceptance_rates: one per speculative token, in [0, 1], non-increasing, at least one.
        seed: of the token fates.

    Raises:
        ValueError: no rates, a rate outside [0, 1], or rates that rise; the message names the position.
    """

    def __init__(self, synthetic_acceptance_rates: Sequence[float], *, seed: int = 0) -> None:
        rates = tuple(map(float, synthetic_acceptance_rates))
        if not rates:
            raise ValueError("synthetic_acceptance_rates is empty; give one rate per speculative token")
        for i, rate in enumerate(rates):
            _check_unit(f"synthetic_acceptance_rates[{i}]", rate)
            if i and rate > rates[i - 1]:
                raise ValueError(
                    f"synthetic_acceptance_rates[{i}] is {rate}, above {rates[i - 1]} before it: rates are "
                    "unconditional (chance that all drafts up to this one are accepted), so they cannot rise"
                )
        self.rates = rates
        before = (1.0, *rates)
        self._conditional = tuple(rate / prior if prior else 0.0 for rate, prior in zip(rates, before, strict=False))
        self._thresholds = tuple(map(threshold, self._conditional))
        self._fates = TokenFates(seed)

    def num_accepted(self, request_id: RequestId, position: int, num_draft: int) -> int:
        """See `AcceptanceModel`.

        Raises:
            ValueError: more drafts than there are rates.
        """
        self._check_length(num_draft)
        return self._fates.num_below_each(request_id, position, num_draft, self._thresholds)

    def conditional_rates(self, request_id: RequestId, num_draft: int) -> tuple[float, ...]:
        """See `AcceptanceModel`."""
        self._check_length(num_draft)
        return self._conditional[:num_draft]

    def forget(self, request_id: RequestId) -> None:
        """See `AcceptanceModel`."""
        self._fates.forget(request_id)

    def expected_tokens(self, num_draft: int) -> float:
        """Mean tokens per round, bonus included: 1 + sum of the first `num_draft` unconditional rates."""
        self._check_length(num_draft)
        return 1.0 + sum(self.rates[:num_draft])

    def _check_length(self, num_draft: int) -> None:
        if num_draft > len(self.rates):
            raise ValueError(
                f"a round has {num_draft} drafts but there are only {len(self.rates)} synthetic acceptance "
                "rates; give one rate per speculative token"
            )


class SyntheticLength(SyntheticRates):
    """A mean acceptance length: vLLM's `synthetic_acceptance_length`, turned into rates by vLLM's rule.

    The rule (vLLM 0.32, "minimum-variance schedule"): the L - 1 drafts accepted on average are spent on the
    first slots, rate_i = min(1, max(0, L - 1 - i)). L = 2.6 with three drafts gives [1, 0.6, 0]. Every round
    then yields floor(L) or floor(L) + 1 tokens: tails are thinner than with a real drafter; use `BetaRate`
    for those.

    Args:
        synthetic_acceptance_length: L, mean tokens per round including the bonus token, in [1, k + 1].
        num_speculative_tokens: k, at least 1.
        seed: of the token fates.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, synthetic_acceptance_length: float, num_speculative_tokens: int, *, seed: int = 0) -> None:
        k = num_speculative_tokens
        if k < 1:
            raise ValueError(f"num_speculative_tokens is {k}, must be >= 1")
        if not 1.0 <= synthetic_acceptance_length <= k + 1:
            raise ValueError(
                f"synthetic_acceptance_length is {synthetic_acceptance_length}, must be in [1, {k + 1}] "
                f"for {k} speculative tokens (it counts the bonus token)"
            )
        budget = synthetic_acceptance_length - 1.0
        super().__init__([min(1.0, max(0.0, budget - i)) for i in range(k)], seed=seed)


class ConstantRate:
    """Every draft is accepted with the same chance given the ones before it: geometric acceptance.

    The model of Leviathan et al. 2023 (arXiv 2211.17192, eq. 1). With real drafters requests differ, which makes
    measured conditional rates rise with the slot; see `BetaRate` and `RisingRate`.

    Args:
        alpha: conditional acceptance rate, in [0, 1].
        seed: of the token fates.

    Raises:
        ValueError: alpha is outside [0, 1].
    """

    def __init__(self, alpha: float, *, seed: int = 0) -> None:
        _check_unit("alpha", alpha)
        self.alpha = alpha
        self._threshold = threshold(alpha)
        self._fates = TokenFates(seed)

    def num_accepted(self, request_id: RequestId, position: int, num_draft: int) -> int:
        """See `AcceptanceModel`."""
        return self._fates.num_below(request_id, position, num_draft, self._threshold)

    def conditional_rates(self, request_id: RequestId, num_draft: int) -> tuple[float, ...]:
        """See `AcceptanceModel`."""
        return (self.alpha,) * num_draft

    def forget(self, request_id: RequestId) -> None:
        """See `AcceptanceModel`."""
        self._fates.forget(request_id)

    def expected_tokens(self, num_draft: int) -> float:
        """Mean tokens per round, bonus included: 1 + alpha + … + alpha^k (arXiv 2211.17192, eq. 1)."""
        return sum(self.alpha**i for i in range(num_draft + 1))


class RisingRate:
    """Conditional rates that rise with the slot, the same for all requests: c_j = limit - (limit - first) (1 - rise)^j.

    Logs of real drafters show this shape: who got the first draft right is in an easy stretch of text. Of EAGLE's
    drafts for ShareGPT requests to Llama-3.1-8B, for one, .59 .58 .63 .68 .72 of slots 1 to 5 were accepted given that
    all before them were, and of an n-gram matcher's .09 .70 .75 .82 .84 (logs of SpecDecode-Bench). A constant rate
    through the first slot is too low in the tail, one through the mean is too high at first.

    All requests are alike here, so a policy that looks for the better ones finds none; see `BetaRate` for those.

    Args:
        first: conditional rate of the first slot, in [0, 1].
        limit: what the later ones come near to, in [first, 1].
        rise: share of the way that is left which each slot goes, in [0, 1]; 0 is a constant rate, 1 goes all the way
            in the second slot.
        seed: of the token fates.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, first: float, limit: float, rise: float = 0.5, *, seed: int = 0) -> None:
        for name, value in (("first", first), ("limit", limit), ("rise", rise)):
            _check_unit(name, value)
        if limit < first:
            raise ValueError(f"limit is {limit}, must be >= first, which is {first}: rates rise with the slot")
        self.first = first
        self.limit = limit
        self.rise = rise
        self._thresholds: tuple[int, ...] = ()
        self._fates = TokenFates(seed)

    def num_accepted(self, request_id: RequestId, position: int, num_draft: int) -> int:
        """See `AcceptanceModel`."""
        if num_draft > len(self._thresholds):
            self._thresholds = tuple(map(threshold, self.conditional_rates(request_id, num_draft)))
        return self._fates.num_below_each(request_id, position, num_draft, self._thresholds)

    def conditional_rates(self, request_id: RequestId, num_draft: int) -> tuple[float, ...]:
        """See `AcceptanceModel`."""
        gap, left = self.limit - self.first, 1.0 - self.rise
        return tuple([self.limit - gap * left**slot for slot in range(num_draft)])

    def forget(self, request_id: RequestId) -> None:
        """See `AcceptanceModel`."""
        self._fates.forget(request_id)

    def expected_tokens(self, num_draft: int) -> float:
        """Mean tokens per round, bonus included: 1 + c_0 + c_0 c_1 + … + c_0 … c_(k-1)."""
        return 1.0 + sum(accumulate(self.conditional_rates("", num_draft), lambda before, rate: before * rate))


class BetaRate:
    """Each request has a conditional rate of its own, drawn once from a Beta distribution.

    Easy requests survive into the later slots, so the conditional rate over all requests rises with the slot,
    as logs of real drafters show; a constant rate is wrong in the tail.

    Args:
        mean: mean of the requests' rates, strictly between 0 and 1.
        concentration: a + b of Beta(a, b), above 0; larger means more alike.
        seed: of the rates (one stream) and of the token fates (another).

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, mean: float, concentration: float, *, seed: int = 0) -> None:
        if not 0.0 < mean < 1.0:
            raise ValueError(f"mean is {mean}, must lie strictly between 0 and 1")
        if not 0.0 < concentration < float("inf"):
            raise ValueError(f"concentration is {concentration}, must be finite and > 0")
        self.a = mean * concentration
        self.b = (1.0 - mean) * concentration
        self._fates = BetaFates(self.a, self.b, seed)

    @classmethod
    def from_shape(cls, a: float, b: float, *, seed: int = 0) -> BetaRate:
        """Beta(a, b) by its shape parameters, both above 0.

        Raises:
            ValueError: a parameter is out of range.
        """
        for name, value in (("a", a), ("b", b)):
            if not 0.0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, must be finite and > 0")
        return cls(a / (a + b), a + b, seed=seed)

    def num_accepted(self, request_id: RequestId, position: int, num_draft: int) -> int:
        """See `AcceptanceModel`."""
        return self._fates.num_below(request_id, position, num_draft)

    def conditional_rates(self, request_id: RequestId, num_draft: int) -> tuple[float, ...]:
        """See `AcceptanceModel`; the request's own rate."""
        return (self.alpha_of(request_id),) * num_draft

    def forget(self, request_id: RequestId) -> None:
        """See `AcceptanceModel`."""
        self._fates.forget(request_id)

    def alpha_of(self, request_id: RequestId) -> float:
        """The request's rate."""
        return self._fates.rate_of(request_id)

    def expected_tokens(self, num_draft: int) -> float:
        """Mean tokens per round over requests of equally many rounds, bonus included.

        1 + sum over i of E[alpha^i], with E[alpha^i] = product over j < i of (a + j) / (a + b + j). Over
        requests of equal *length* the mean per round is lower: slow requests have more rounds.
        """
        total = power = 1.0
        for i in range(num_draft):
            power *= (self.a + i) / (self.a + self.b + i)
            total += power
        return total

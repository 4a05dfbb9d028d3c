"""The luck of requests of which each has an acceptance rate of its own, drawn from a Beta distribution: `BetaFates`.

The rate is drawn from the stream of digests "seed/alpha/request/block", each of which gives eight numbers of 53 bits;
the fates of the tokens are those of `minedraft.sim.fates`.

`_gamma` and `beta_variate` are `random.Random.gammavariate` and `betavariate` over such a stream, operation by
operation, so that every bit of a rate is the same: an object with Python's distributions took half of the time of all
that has to do with acceptance.

Law of this file: nothing inherits from what is here, so that it can be compiled.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Final

from minedraft.request import RequestId
from minedraft.sim.fates import TokenFates, digest_words, threshold

_E: Final = exp(1.0)
_LOG4: Final = log(4.0)
_SG_MAGIC: Final = 1.0 + log(4.5)


class BetaFates:
    """Rates and fates, drawn lazily and kept until `forget`.

    Args:
        a: first shape parameter, above 0.
        b: second shape parameter, above 0.
        seed: of the rates (one stream) and of the token fates (another).
    """

    def __init__(self, a: float, b: float, seed: int) -> None:
        self._a = a
        self._b = b
        self._prefix = f"{seed}/alpha/"
        self._rates: dict[RequestId, float] = {}
        self._luck: dict[RequestId, tuple[int, list[int]]] = {}  # the threshold, and what `TokenFates` has drawn
        self._fates = TokenFates(seed)

    def rate_of(self, request_id: RequestId) -> float:
        """The request's rate."""
        rate = self._rates.get(request_id)
        if rate is None:
            rate = self._rates[request_id] = beta_variate(f"{self._prefix}{request_id}", self._a, self._b)
        return rate

    def num_below(self, request_id: RequestId, position: int, num_draft: int) -> int:
        """How many of a round's fates, from its first on, lie below the request's threshold; see `TokenFates`."""
        luck = self._luck.get(request_id)
        if luck is None:
            luck = (threshold(self.rate_of(request_id)), self._fates.drawn(request_id, position + num_draft))
            self._luck[request_id] = luck
        limit, fates = luck
        if len(fates) < position + num_draft:
            self._fates.drawn(request_id, position + num_draft)
        for slot in range(num_draft):
            if fates[position + slot] >= limit:
                return slot
        return num_draft

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept for a request; asked again, it is the same."""
        if self._rates.pop(request_id, None) is not None:
            self._luck.pop(request_id, None)
            self._fates.forget(request_id)


class _Stream:
    """Numbers in [0, 1) of 53 bits, without end: those of a name."""

    __slots__ = ("_block", "_name", "_next", "_words")

    def __init__(self, name: str) -> None:
        self._name = name
        self._block = 0
        self._words = digest_words(f"{name}/0")
        self._next = 0

    def draw(self) -> float:
        i = self._next
        if i == 16:
            i = 0
            self._block += 1
            self._words = digest_words(f"{self._name}/{self._block}")
        self._next = i + 2
        high, low = self._words[i], self._words[i + 1]
        return ((high >> 5) * 67108864.0 + (low >> 6)) / 9007199254740992.0


def beta_variate(name: str, a: float, b: float) -> float:
    """A number of the distribution Beta(a, b), always the same for a name."""
    stream = _Stream(name)
    first = _gamma(stream, a)
    return first / (first + _gamma(stream, b)) if first else 0.0


def _gamma(stream: _Stream, shape: float) -> float:
    """A number of the distribution Gamma(shape, 1)."""
    if shape > 1.0:
        return _gamma_above_one(stream, shape)
    if shape == 1.0:
        return -log(1.0 - stream.draw())
    # Algorithm GS of Kennedy & Gentle, "Statistical Computing".
    bound = (_E + shape) / _E
    while True:
        p = bound * stream.draw()
        x: float = p ** (1.0 / shape) if p <= 1.0 else -log((bound - p) / shape)
        u = stream.draw()
        most: float = x ** (shape - 1.0) if p > 1.0 else exp(-x)
        if u <= most:
            return x


def _gamma_above_one(stream: _Stream, shape: float) -> float:
    """The same for a shape above 1: R. C. H. Cheng, Applied Statistics 26 (1977), pp. 71-74."""
    ainv = sqrt(2.0 * shape - 1.0)
    bbb = shape - _LOG4
    ccc = shape + ainv
    while True:
        u1 = stream.draw()
        if not 1e-7 < u1 < 0.9999999:
            continue
        u2 = 1.0 - stream.draw()
        v = log(u1 / (1.0 - u1)) / ainv
        x = shape * exp(v)
        z = u1 * u1 * u2
        r = bbb + ccc * v - x
        if r + _SG_MAGIC - 4.5 * z >= 0.0 or r >= log(z):
            return x

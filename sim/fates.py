"""The luck of every output token of every request, as a function of (seed, request, position): `TokenFates`.

A fate is a whole number below 2**32, uniform, and independent of all others: word `position` of a sequence of BLAKE2b
digests (RFC 7693), each of the text "seed/accept/request/block". So it doesn't matter in which order, or whether, fates
are asked for; and a digest costs a small part of seeding a Mersenne Twister for each request, which is where a fifth of
the time of a simulated run went.

Law of this file: nothing inherits from what is here, so that it can be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import Final

from minedraft.request import RequestId

NUM_FATES: Final = 1 << 32
_WORDS: Final = Struct("<16I")  # of a digest
_PER_BLOCK: Final = 16


def threshold(rate: float) -> int:
    """The number that a uniform fate lies below with the chance `rate`, which is in [0, 1]; to one in 2**33."""
    return round(rate * NUM_FATES)


class TokenFates:
    """Fates, drawn lazily and kept until `forget`.

    Args:
        seed: of all of them.
    """

    def __init__(self, seed: int) -> None:
        self._prefix = f"{seed}/accept/"
        self._drawn: dict[RequestId, list[int]] = {}

    def num_below(self, request_id: RequestId, position: int, num_draft: int, limit: int) -> int:
        """How many of a round's fates, from its first on, lie below a threshold.

        Args:
            request_id: whose round.
            position: of the first.
            num_draft: at most so many.
            limit: see `threshold`.
        """
        fates = self._drawn.get(request_id)
        if fates is None or len(fates) < position + num_draft:
            fates = self.drawn(request_id, position + num_draft)
        for slot in range(num_draft):
            if fates[position + slot] >= limit:
                return slot
        return num_draft

    def num_below_each(self, request_id: RequestId, position: int, num_draft: int, limits: Sequence[int]) -> int:
        """The same where each slot has a threshold of its own."""
        fates = self._drawn.get(request_id)
        if fates is None or len(fates) < position + num_draft:
            fates = self.drawn(request_id, position + num_draft)
        for slot in range(num_draft):
            if fates[position + slot] >= limits[slot]:
                return slot
        return num_draft

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept for a request; asked again, its fates are the same."""
        self._drawn.pop(request_id, None)

    def drawn(self, request_id: RequestId, length: int) -> list[int]:
        """All fates of a request's first positions, at least so many; always the same list, until `forget`."""
        fates = self._drawn.setdefault(request_id, [])
        name = f"{self._prefix}{request_id}/"
        while len(fates) < length:
            fates += digest_words(f"{name}{len(fates) // _PER_BLOCK}")
        return fates


def digest_words(name: str) -> tuple[int, ...]:
    """Sixteen numbers below 2**32, uniform and independent of those of any other name."""
    words: tuple[int, ...] = _WORDS.unpack(blake2b(name.encode()).digest())
    return words

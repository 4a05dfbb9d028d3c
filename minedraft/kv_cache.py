"""KV block accounting for one model: who holds how many blocks of a pool.

Law of this file: counts only, no block ids and no payload. A pool grants or refuses; it never evicts by itself.
"""

from __future__ import annotations

from typing import Protocol

from minedraft.request import RequestId


class KVPool(Protocol):
    """What the scheduler needs to know of a KV cache; vLLM's block manager is one, `PagedPool` another."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a reservation can take at this moment."""
        ...

    def reserve(self, owner: RequestId, num_tokens: int) -> int:
        """Grow what `owner` holds to at least `num_tokens` tokens, all or nothing.

        Returns:
            The tokens that its blocks can hold now, or 0 if the pool has too few free blocks (nothing changed).
        """
        ...

    def trim(self, owner: RequestId, num_tokens: int) -> int:
        """Give back whole blocks beyond `num_tokens` tokens; returns the tokens that the rest can hold."""
        ...

    def release(self, owner: RequestId) -> None:
        """Give back everything that `owner` holds; it may hold nothing."""
        ...

    def held_blocks(self, owner: RequestId) -> int:
        """Blocks that `owner` holds."""
        ...


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks needed for `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class PagedPool:
    """Block accounting with no payload: the pool of the simulator and of the torch world.

    Raises:
        ValueError: a size is not positive; the message names it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be >= 1")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be >= 1")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self._held: dict[RequestId, int] = {}

    def reserve(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.reserve`."""
        held = self._held.get(owner, 0)
        needed = -(-num_tokens // self.block_size) - held
        if needed > self.num_free_blocks:
            return 0
        if needed > 0:
            held += needed
            self._held[owner] = held
            self.num_free_blocks -= needed
        return held * self.block_size

    def trim(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.trim`."""
        held = self._held[owner]
        keep = -(-num_tokens // self.block_size)
        if keep < held:
            self.num_free_blocks += held - keep
            self._held[owner] = held = keep
        return held * self.block_size

    def release(self, owner: RequestId) -> None:
        """See `KVPool.release`."""
        self.num_free_blocks += self._held.pop(owner, 0)

    def held_blocks(self, owner: RequestId) -> int:
        """See `KVPool.held_blocks`."""
        return self._held.get(owner, 0)

    def owners(self) -> tuple[RequestId, ...]:
        """Everybody who holds blocks."""
        return tuple(self._held)

    def check_integrity(self) -> None:
        """Assert I6: free + held = total, and nobody holds a negative number. O(owners); for tests."""
        assert all(count >= 0 for count in self._held.values())
        assert self.num_free_blocks + sum(self._held.values()) == self.num_blocks

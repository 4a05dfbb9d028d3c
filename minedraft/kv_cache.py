"""KV block accounting for one model: who holds how many blocks of a pool.

Law of this file: counts only, no block ids and no payload. A pool grants or refuses; it never evicts by itself.
"""

from __future__ import annotations

from typing import Final, Protocol

from minedraft.request import RequestId

BOUNDLESS: Final = 1 << 60
"""More tokens or blocks than anybody asks for."""


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

    def num_cached_tokens(self, owner: RequestId) -> int:
        """Tokens at the start of a waiting request's context whose KV it would find here if it were admitted now."""
        ...

    def num_missing_blocks(self, owner: RequestId, num_tokens: int) -> int:
        """Free blocks that a reservation of `num_tokens` tokens would take beyond those there are; <= 0 if it fits."""
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

    def num_cached_tokens(self, owner: RequestId) -> int:
        """See `KVPool.num_cached_tokens`: this pool keeps nothing of those that are gone."""
        return 0

    def num_missing_blocks(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.num_missing_blocks`."""
        return -(-num_tokens // self.block_size) - self._held.get(owner, 0) - self.num_free_blocks

    def owners(self) -> tuple[RequestId, ...]:
        """Everybody who holds blocks."""
        return tuple(self._held)

    def check_integrity(self) -> None:
        """Assert I6: free + held = total, and nobody holds a negative number. O(owners); for tests."""
        assert all(count >= 0 for count in self._held.values())
        assert self.num_free_blocks + sum(self._held.values()) == self.num_blocks


class NoPool:
    """The pool of a drafter that keeps no KV (prompt lookup): there is room for everybody, and nobody holds a block.

    Attributes:
        block_size: tokens per block, of no consequence.
        num_blocks: more than anybody asks for.
        num_free_blocks: all of them.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = BOUNDLESS
        self.num_free_blocks = BOUNDLESS

    def reserve(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.reserve`."""
        return BOUNDLESS

    def trim(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.trim`."""
        return BOUNDLESS

    def release(self, owner: RequestId) -> None:
        """See `KVPool.release`."""

    def held_blocks(self, owner: RequestId) -> int:
        """See `KVPool.held_blocks`."""
        return 0

    def num_cached_tokens(self, owner: RequestId) -> int:
        """See `KVPool.num_cached_tokens`."""
        return 0

    def num_missing_blocks(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.num_missing_blocks`."""
        return 0


class PoolAnswers(Protocol):
    """What only the owner of the blocks knows of a `SharedPool`."""

    def num_free_blocks(self, accounted: int) -> int:
        """Blocks that a reservation can take now, less what is granted and not taken yet; `accounted`: by our books."""
        ...

    def prefix_hit(self, owner: RequestId) -> tuple[int, int]:
        """Tokens that a waiting request would find computed, and how many blocks of them others hold already."""
        ...

    def num_freed_blocks(self, owner: RequestId, held: int) -> int:
        """How many of the blocks that `owner` holds by our books nobody else holds."""
        ...


class SharedPool(PagedPool):
    """A pool of a world that lets requests share blocks (prefix caching), so that three things must be asked of it.

    Between two calls of `sync` it counts by itself, as a `PagedPool` does. What `held_blocks` counts are entries of a
    request's block table, shared or not; so free + held may be more than the pool has.

    Args:
        num_blocks: blocks in all.
        block_size: tokens per block.
        answers: see there.
        cut: where to note who was cut by `trim`, for a world that has to do the same to its blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, answers: PoolAnswers, cut: list[RequestId] | None = None
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.answers = answers
        self._cut = cut
        self._hit: tuple[RequestId, int] = ("", 0)  # who was asked about last, and the blocks that it would share

    def sync(self) -> None:
        """Read the number of free blocks anew. To be called when the world has carried out all that was decided."""
        self.num_free_blocks = self.answers.num_free_blocks(self.num_free_blocks)

    def num_cached_tokens(self, owner: RequestId) -> int:
        """See `KVPool.num_cached_tokens`."""
        num_tokens, num_blocks = self.answers.prefix_hit(owner)
        self._hit = (owner, num_blocks)
        return num_tokens

    def num_missing_blocks(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.num_missing_blocks`."""
        missing = super().num_missing_blocks(owner, num_tokens)
        return missing - self._hit[1] if owner == self._hit[0] else missing

    def reserve(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.reserve`; blocks of a prefix that others hold cost nothing."""
        if owner != self._hit[0]:
            return super().reserve(owner, num_tokens)
        _, shared = self._hit
        self.num_free_blocks += shared
        capacity = super().reserve(owner, num_tokens)
        if capacity:
            self._hit = ("", 0)
        else:
            self.num_free_blocks -= shared
        return capacity

    def trim(self, owner: RequestId, num_tokens: int) -> int:
        """See `KVPool.trim`."""
        if self._cut is not None:
            self._cut.append(owner)
        return super().trim(owner, num_tokens)

    def release(self, owner: RequestId) -> None:
        """See `KVPool.release`; blocks that others hold as well stay taken."""
        held = self._held.pop(owner, 0)
        if held:
            self.num_free_blocks += self.answers.num_freed_blocks(owner, held)

    def check_integrity(self) -> None:
        """Assert what holds of shared blocks. O(owners); for tests."""
        assert all(0 <= count <= self.num_blocks for count in self._held.values())
        assert self.num_free_blocks <= self.num_blocks
        if not self._held:
            assert self.num_free_blocks == self.num_blocks, self.num_free_blocks

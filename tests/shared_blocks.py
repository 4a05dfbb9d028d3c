"""A block pool with reference counts and a prefix cache, as engines have them: the world's side of a `SharedPool`.

Blocks that nobody holds stay cached until they are needed; a full block is found again by the tokens up to its end.
"""

from __future__ import annotations

from collections import Counter

from minedraft.kv_cache import SharedPool, blocks_for


class BlockStore:
    """Blocks by number; `tables` by owner. Allocating more than is free is an error: the core planned too much."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks))  # least recently used first
        self.cached: dict[tuple[int, ...], list[int]] = {}  # several requests may have computed the same block
        self.key_of: dict[int, tuple[int, ...]] = {}
        self.tables: dict[str, list[int]] = {}

    def lookup(self, text: list[int]) -> list[int]:
        """Blocks of the longest cached prefix that leaves a token to compute."""
        found: list[int] = []
        for end in range(self.block_size, len(text), self.block_size):
            blocks = self.cached.get(tuple(text[:end]))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def join(self, owner: str, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1
        self.tables[owner] = list(blocks)

    def grow(self, owner: str, num_tokens: int) -> None:
        table = self.tables[owner]
        while len(table) < blocks_for(num_tokens, self.block_size):
            assert self.free, f"{owner}: the core planned more blocks than there are"
            block = self.free.pop(0)
            if (key := self.key_of.pop(block, None)) is not None:
                self.cached[key].remove(block)
            self.refs[block] = 1
            table.append(block)

    def publish(self, owner: str, text: list[int], num_computed: int) -> None:
        """Full blocks of committed tokens can be found from now on (I11)."""
        for i in range(num_computed // self.block_size):
            key, block = tuple(text[: (i + 1) * self.block_size]), self.tables[owner][i]
            if block not in self.key_of:
                self.cached.setdefault(key, []).append(block)
                self.key_of[block] = key

    def trim(self, owner: str, num_tokens: int) -> None:
        self._let_go(self.tables[owner][blocks_for(num_tokens, self.block_size) :])
        del self.tables[owner][blocks_for(num_tokens, self.block_size) :]

    def drop(self, owner: str) -> None:
        self._let_go(self.tables.pop(owner, []))

    def _let_go(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    def check(self) -> None:
        assert len(self.free) + sum(count > 0 for count in self.refs) == self.num_blocks
        assert sum(self.refs) == sum(len(table) for table in self.tables.values())


class StoreAnswers:
    """`PoolAnswers` over a store; `texts` holds the tokens of everybody who is alive."""

    def __init__(self, store: BlockStore, texts: dict[str, list[int]]) -> None:
        self.store = store
        self.texts = texts
        self.pool = SharedPool(store.num_blocks, store.block_size, self)
        self.leaving: dict[str, None] = {}  # released by the core; the store has yet to be told

    def sync(self, released: list[tuple[str, int]]) -> None:
        self.leaving = {owner: None for owner, _ in released if owner in self.store.tables}
        self.pool.sync()

    def num_free_blocks(self, accounted: int) -> int:
        num_free = len(self.store.free) + sum(self._own(owner) for owner in self.leaving)
        for owner in self.pool.owners():
            table = self.store.tables.get(owner)
            missing = self.pool.held_blocks(owner) - len(table or ())
            if table is None:
                missing -= self.prefix_hit(owner)[1]
            num_free -= max(0, missing)
        return num_free

    def prefix_hit(self, owner: str) -> tuple[int, int]:
        found = self.store.lookup(self.texts[owner])
        gone = Counter(block for other in self.leaving for block in self.store.tables[other])
        return len(found) * self.store.block_size, sum(self.store.refs[block] > gone[block] for block in found)

    def num_freed_blocks(self, owner: str, held: int) -> int:
        if owner not in self.texts:
            return held
        table = self.store.tables.get(owner)
        if table is None or owner in self.leaving:  # let in, and had no time to join
            return held - self.prefix_hit(owner)[1]
        own = self._own(owner)
        self.leaving[owner] = None
        return own + held - len(table)

    def _own(self, owner: str) -> int:
        """Blocks that only `owner` holds, and on which nobody counts who was let in and hasn't joined yet."""
        joining = [other for other in self.pool.owners() if other not in self.store.tables or other in self.leaving]
        claimed = {block for other in joining if other != owner for block in self.store.lookup(self.texts[other])}
        return sum(self.store.refs[block] == 1 and block not in claimed for block in self.store.tables[owner])

"""The KV of many sequences in one rewindable cache, in the shape that transformers' models expect.

Each layer holds [slots, heads, capacity, head_dim]; a sequence owns a slot, and position t of it lies at index t.
Rewinding is bookkeeping: entries behind the valid length are overwritten before a mask ever shows them. Slots and
capacity grow by doubling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from minedraft.backends.torch.messages import Key

_MIN_SLOTS = 4
_MIN_CAPACITY = 128


@dataclass(slots=True)
class Step:
    """Where one forward pass reads and writes.

    Attributes:
        slots: slot per row, shape [B].
        indices: where each query's key and value go, shape [B, Q].
        kv_len: positions that the pass can see, from 0; the mask hides those that a row may not see.
        num_slots: slots that must exist.
        capacity: positions that must exist per slot.
    """

    slots: Tensor
    indices: Tensor
    kv_len: int
    num_slots: int
    capacity: int


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn shapes, dtype and device from the first states; shape [B, heads, Q, head_dim]."""
        # Zeros, not empty: a masked position still enters the sum with weight 0, and 0 x NaN is NaN.
        self.keys = key_states.new_zeros((0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new states; return all that the step can see, shape [B, heads, kv_len, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self._cache.step
        self.keys = _grown(self.keys, step.num_slots, step.capacity)
        self.values = _grown(self.values, step.num_slots, step.capacity)
        slots = step.slots[:, None]
        # Two index tensors around a slice put the slice last: [B, Q, heads, head_dim].
        self.keys[slots, :, step.indices] = key_states.transpose(1, 2)
        self.values[slots, :, step.indices] = value_states.transpose(1, 2)
        return self.keys[step.slots, :, : step.kv_len], self.values[step.slots, :, : step.kv_len]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Visible length and offset; unused, since every pass brings its own mask."""
        return self._cache.step.kv_len, 0

    def get_seq_length(self) -> int:
        """Rows differ in length, so there is no such number; positions are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """No fixed maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5


def _grown(states: Tensor, num_slots: int, capacity: int) -> Tensor:
    old_slots, heads, old_capacity, head_dim = states.shape
    if num_slots <= old_slots and capacity <= old_capacity:
        return states
    new_slots = _doubled(max(old_slots, _MIN_SLOTS), num_slots)
    new_capacity = _doubled(max(old_capacity, _MIN_CAPACITY), capacity)
    grown = states.new_zeros((new_slots, heads, new_capacity, head_dim))
    grown[:old_slots, :, :old_capacity] = states
    return grown


def _doubled(size: int, at_least: int) -> int:
    while size < at_least:
        size *= 2
    return size


class _Holding(NamedTuple):
    slot: int
    length: int


class SlotCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """A transformers cache whose rows are chosen anew for every pass.

    Attributes:
        step: the pass in progress; set by `begin`.
    """

    step: Step

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self._held: dict[Key, _Holding] = {}
        self._free: list[int] = []
        self._num_slots = 0

    def length(self, key: Key) -> int:
        """Valid positions of a sequence; 0 if it has none."""
        return self._held[key].length if key in self._held else 0

    def drop(self, key: Key) -> None:
        """Forget a sequence; one that is not held is ignored."""
        holding = self._held.pop(key, None)
        if holding is not None:
            self._free.append(holding.slot)

    def begin(self, keys: list[Key], starts: list[int], counts: list[int], device: torch.device) -> Tensor:
        """Rewind the sequences and lay out a pass of `counts[i]` tokens behind position `starts[i]`.

        Returns:
            The queries' positions, shape [B, max(counts)]. Rows are padded on the right with the position of the last
            real query; what a padding query writes lies behind the row's new length.

        Raises:
            ValueError: a sequence holds fewer than `starts[i]` valid positions.
        """
        width = max(counts)
        for key, start in zip(keys, starts, strict=True):
            if start > self.length(key):
                raise ValueError(f"{key}: asked to keep {start} KV positions, but only {self.length(key)} are valid")
            self._held[key] = _Holding(self._slot(key), start)
        first = torch.tensor(starts, device=device)[:, None]
        last = torch.tensor(counts, device=device)[:, None] - 1
        offsets = torch.arange(width, device=device)[None, :]
        self.step = Step(
            slots=torch.tensor([self._held[key].slot for key in keys], device=device),
            indices=first + offsets,
            kv_len=max(start + count for start, count in zip(starts, counts, strict=True)),
            num_slots=self._num_slots,
            capacity=max(starts) + width,
        )
        return first + torch.minimum(offsets, last)

    def commit(self, keys: list[Key], lengths: list[int]) -> None:
        """Count what a finished pass wrote as valid."""
        for key, length in zip(keys, lengths, strict=True):
            self._held[key] = _Holding(self._held[key].slot, length)

    def _slot(self, key: Key) -> int:
        if key in self._held:
            return self._held[key].slot
        if self._free:
            return self._free.pop()
        self._num_slots += 1
        return self._num_slots - 1

"""A text as an array that grows and shrinks at its end.

A worker of vLLM's V1 model runner copies whole texts into its batch whenever a request comes back to it. From an array
that costs next to nothing; from a list of Python's integers it is what limits long contexts: 85 ns a token were
measured with 64 texts of 4096, which is 22 ms a time.

Law of this file: numpy only, no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

_FIRST_CAPACITY: Final = 256


class TokenArray:
    """Starts empty."""

    __slots__ = ("_buffer", "_length")

    def __init__(self) -> None:
        self._buffer = np.empty(_FIRST_CAPACITY, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def cut(self, length: int) -> None:
        """Keep at most so many tokens."""
        self._length = min(self._length, length)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        length = self._length + len(token_ids)
        if length > len(self._buffer):
            buffer = np.empty(2 * length, np.int32)
            buffer[: self._length] = self._buffer[: self._length]
            self._buffer = buffer
        self._buffer[self._length : length] = token_ids
        self._length = length

    @property
    def view(self) -> Any:
        """All tokens, shape [length], int32; what it shows changes once the text is cut and extended."""
        return self._buffer[: self._length]

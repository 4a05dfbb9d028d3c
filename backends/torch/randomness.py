"""Random numbers that are functions of (request seed, position, stream): nothing here has a state.

A number drawn for one position never shifts another's, so batching, draft length, rejected drafts and preemption
leave every other draw as it was.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import numpy as np
import torch
from torch import Tensor

DRAFT: Final = b"draft"  # the drafter's own sample
ACCEPT: Final = b"accept"  # whether the target takes a draft
TARGET: Final = b"target"  # the target's own sample: after a rejection, after the last draft, and without drafts
GUMBEL: Final = b"gumbel"  # noise shared by drafter and target


def _digest(seed: int, position: int, stream: bytes, size: int) -> int:
    key = struct.pack("<QQ", seed, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=size, person=stream).digest(), "little")


def uniform(seed: int, position: int, stream: bytes) -> float:
    """A number in the open interval (0, 1) for one position of one request.

    Args:
        seed: the request's, 0 <= seed < 2**64.
        position: index of the token in the sequence, prompt included.
        stream: what the number is for; draws of different streams are independent.
    """
    return ((_digest(seed, position, stream, 8) >> 11) + 0.5) * 2.0**-53


def gumbel(seed: int, position: int, num_token_ids: int) -> Tensor:
    """Standard Gumbel noise for every token id at one position, float64 of shape [num_token_ids], on the CPU.

    Philox is counter-based: entry i depends on (seed, position, i) only, so models of different padded vocabulary
    size see the same noise.
    """
    raw = np.random.Philox(key=_digest(seed, position, GUMBEL, 16)).random_raw(num_token_ids)
    uniforms = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(-np.log(-np.log(uniforms)))

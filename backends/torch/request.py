"""A request with its tokens (`TorchRequest`): what the torch world knows and the scheduler core never sees."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from minedraft.request import Request


class Sampling(NamedTuple):
    """How one request's tokens are chosen, ready for the workers.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches this; 1 keeps all.
        seed: key of the request's random numbers, 0 <= seed < 2**64.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TorchRequest:
    """One generation request, in tokens.

    Attributes:
        request_id: unique in the run.
        prompt_token_ids: the prompt, at least one token.
        max_tokens: upper bound on output tokens, at least 1.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens; 0 = all.
        top_p: sample among the likeliest tokens that make up this mass; 1 = all.
        seed: key of the random numbers; None derives one from `request_id`, so runs repeat either way.
        stop_token_ids: tokens that end the output, besides the model's own EOS; they stay in the output.
        ignore_eos: go on after the model's EOS. `stop_token_ids` still stop.
        arrival_s: when it arrives, in seconds after the models are loaded.
        priority: lower runs earlier under the `priority` admission policy.
        max_draft_tokens: upper bound on drafts per round; 0 opts out of speculation, None leaves it to the scheduler.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    arrival_s: float = 0.0
    priority: int = 0
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        # A list (of a tokenizer, say) is welcome, but what is kept must not change under us.
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._require(self.temperature >= 0, "temperature", "must be >= 0; 0 is greedy")
        self._require(self.top_k >= 0, "top_k", "must be >= 0; 0 keeps all tokens")
        self._require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]; 1 keeps all tokens")
        self._require(self.seed is None or 0 <= self.seed < 2**64, "seed", "must lie in [0, 2**64)")
        self._require(self.arrival_s >= 0, "arrival_s", "must be >= 0, in seconds after the start")
        self.core_request()  # checks the rest

    def _require(self, holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"request {self.request_id!r}: {field} is {getattr(self, field)}; it {rule}")

    def core_request(self) -> Request:
        """The same request in counts, for the scheduler."""
        return Request(
            request_id=self.request_id,
            prompt_len=len(self.prompt_token_ids),
            max_tokens=self.max_tokens,
            arrival_s=self.arrival_s,
            priority=self.priority,
            max_draft_tokens=self.max_draft_tokens,
        )

    def sampling(self) -> Sampling:
        """The sampling parameters with the seed settled."""
        seed = self.seed
        if seed is None:
            digest = hashlib.blake2b(self.request_id.encode(), digest_size=8, person=b"request-seed").digest()
            seed = int.from_bytes(digest, "little")
        return Sampling(self.temperature, self.top_k, self.top_p, seed)

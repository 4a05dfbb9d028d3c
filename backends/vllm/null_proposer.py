"""The proposer that proposes nothing (vLLM's method `custom_class`).

Drafts come from the drafter's process and enter through the scheduler. This class only makes vLLM's model runner build
its rejection sampler and size its buffers for k drafts. It is the one object of ours in vLLM's worker processes, so it
also puts `cpu_sampling` in force there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NullProposer:
    """Named by `speculative_config={"method": "custom_class", "model": "<this class>", ...}`."""

    def __init__(self, vllm_config: Any) -> None:
        from minedraft.backends.vllm import cpu_sampling  # loads torch, which this file's readers may not want

        cpu_sampling.correct()
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """No drafts for anybody."""
        return [[] for _ in sampled_token_ids]

"""The scheduler's limits: plain numbers, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

from minedraft.kv_cache import BOUNDLESS, blocks_for

CATCH_UP_SHARE: Final = 8  # of the drafter's budget, what a draft work may take in for requests that lag behind
CATCH_UP_TOKENS: Final = 256  # at least, since so many take a device hardly longer than one
MOST_BATCHES: Final = 1024  # each is looked at in every round


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits that hold for the whole run.

    Attributes:
        num_batches: sub-batches in `psd` mode, at least 2 there, at most `MOST_BATCHES`; `ar` and `sd` use the first
            one only.
        max_batch_size: requests per sub-batch, which is the number of rows that one verification may have (m).
        max_num_seqs: running requests in all; None means every sub-batch full.
        num_speculative_tokens: largest k.
        max_num_batched_tokens: token budget of one verification, drafts and prompt chunks included.
        max_num_draft_batched_tokens: committed tokens that the drafter may ingest in one work; None means the same.
        draft_capacity: drafts that one verification may carry, for selection policies; None means no bound.
        max_model_len: the target's context in tokens; None means what the target pool can hold.
        draft_max_model_len: the draft model's context; None means the target's. Beyond it a request is not drafted.
        block_size: tokens per KV block, in both pools.
        num_target_blocks: size of the target's pool.
        num_draft_blocks: size of the drafter's pool; 0 means that there is no drafter, unless it keeps no KV.
        draft_keeps_kv: the drafter holds KV; False for prompt lookup, which needs no pool.
        draft_follows_target: the drafter takes in only what the target has computed, since it reads the target's hidden
            states (EAGLE heads, MTP modules); it ingests no prompt ahead of the target.
        draft_ingests_beside: the drafter takes committed tokens in beside the target's work (`ingestion.py`); False for
            one that has no time then, since it shares the target's devices or is PEARL's.
        kv_watermark: share of the target's pool that admission leaves free while anything runs.
        max_verify_failures: a batch whose verification fails this often in a row ends with an error.

    Raises:
        ValueError: a number is out of range; the message names the field and the remedy.
    """

    num_batches: int = 2
    max_batch_size: int = 16
    max_num_seqs: int | None = None
    num_speculative_tokens: int = 4
    max_num_batched_tokens: int = 8192
    max_num_draft_batched_tokens: int | None = None
    draft_capacity: int | None = None
    max_model_len: int | None = None
    draft_max_model_len: int | None = None
    block_size: int = 16
    num_target_blocks: int = 65536
    num_draft_blocks: int = 65536
    draft_keeps_kv: bool = True
    draft_follows_target: bool = False
    draft_ingests_beside: bool = True
    kv_watermark: float = 0.01
    max_verify_failures: int = 3
    # Derived once, so that the hot path reads plain attributes.
    model_len: int = field(init=False, repr=False, default=0)
    draft_len: int = field(init=False, repr=False, default=0)
    draft_budget: int = field(init=False, repr=False, default=0)
    catch_up_limit: int = field(init=False, repr=False, default=0)
    running_limit: int = field(init=False, repr=False, default=0)
    watermark_blocks: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        self._check_ranges()
        pool_tokens = self.num_target_blocks * self.block_size
        model_len = pool_tokens if self.max_model_len is None else self.max_model_len
        needed = blocks_for(model_len, self.block_size)
        if needed > self.num_target_blocks:
            raise ValueError(
                f"num_target_blocks is {self.num_target_blocks}, but one request of max_model_len {model_len} needs "
                f"{needed} blocks of {self.block_size}: raise num_target_blocks or lower max_model_len"
            )
        draft_budget = self.max_num_draft_batched_tokens or self.max_num_batched_tokens
        if not self.draft_keeps_kv:
            draft_budget = BOUNDLESS  # nothing is ingested
        if self.num_draft_blocks and draft_budget < 2 * self.max_batch_size:
            raise ValueError(
                f"max_num_draft_batched_tokens is {draft_budget}, must be >= 2 * max_batch_size "
                f"({2 * self.max_batch_size}), which a full batch ingests in a round"
            )
        self._derive("model_len", model_len)
        self._derive("draft_len", min(model_len, self.draft_max_model_len or model_len))
        self._derive("draft_budget", draft_budget)
        catch_up_limit = draft_budget
        if self.draft_ingests_beside:  # what can be done beside the target is not to keep a batch waiting for long
            catch_up_limit = min(draft_budget, max(CATCH_UP_TOKENS, draft_budget // CATCH_UP_SHARE))
        self._derive("catch_up_limit", catch_up_limit)
        self._derive("running_limit", self.max_num_seqs or self.num_batches * self.max_batch_size)
        self._derive("watermark_blocks", int(self.kv_watermark * self.num_target_blocks))

    def given(self) -> dict[str, Any]:
        """The fields that make an equal configuration, for a journal's header."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.init}

    def _derive(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        least = {
            "num_batches": 1,
            "max_batch_size": 1,
            "max_num_seqs": 1,
            "num_speculative_tokens": 0,
            "max_num_batched_tokens": 1,
            "max_num_draft_batched_tokens": 1,
            "draft_capacity": 0,
            "max_model_len": 2,
            "draft_max_model_len": 1,
            "block_size": 1,
            "num_target_blocks": 1,
            "num_draft_blocks": 0,
            "max_verify_failures": 1,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} is {value}, must be >= {low}")
        if self.num_batches > MOST_BATCHES:
            raise ValueError(f"num_batches is {self.num_batches}, must be <= {MOST_BATCHES}")
        if not 0 <= self.kv_watermark < 1:
            raise ValueError(f"kv_watermark is {self.kv_watermark}, must be in [0, 1)")
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be >= max_batch_size "
                f"({self.max_batch_size}): every running request needs one token per verification"
            )

"""A Hugging Face causal LM that computes ragged batches over rewindable KV (`LanguageModel.forward`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from minedraft.backends.torch.kv_slots import SlotCache
from minedraft.backends.torch.messages import Key


class Row(NamedTuple):
    """One sequence's part in a pass.

    Attributes:
        key: whose KV.
        num_computed: valid positions to keep; what lies behind is dropped first.
        token_ids: tokens to compute behind them, at least one.
        num_logits: how many of the last tokens' logits are wanted.
    """

    key: Key
    num_computed: int
    token_ids: tuple[int, ...]
    num_logits: int


class LanguageModel:
    """A model, its device and the KV of its sequences.

    Attributes:
        num_token_ids: logits are cut to these; the rest is padding of the vocabulary.
    """

    def __init__(self, model: Any, num_token_ids: int, device: torch.device) -> None:
        self.num_token_ids = num_token_ids
        self._model = model
        self._device = device
        self._cache = SlotCache(model.config.get_text_config(decoder=True).num_hidden_layers)
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.x.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    @classmethod
    def load(cls, name_or_path: str, device: torch.device, dtype: str, num_token_ids: int) -> LanguageModel:
        """Load a model's weights onto a device.

        Args:
            name_or_path: a local folder or a hub name.
            device: where to.
            dtype: see `WorkerSpec.dtype`.
            num_token_ids: see the class.
        """
        if dtype == "auto":
            dtype = "float32" if device.type == "cpu" else "auto"
        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=wanted).eval().to(device)
        return cls(model, num_token_ids, device)

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget sequences; unknown ones are ignored."""
        for key in keys:
            self._cache.drop(key)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Compute the rows' tokens; one pass of the model, or a few if the rows differ much in length.

        Returns:
            Logits per row, float of shape [num_logits, num_token_ids].

        Raises:
            ValueError: a row asks to keep more positions than are valid.
        """
        logits: list[Tensor | None] = [None] * len(rows)
        for group in _groups_of_like_width([len(row.token_ids) for row in rows]):
            for index, result in zip(group, self._forward_padded([rows[i] for i in group]), strict=True):
                logits[index] = result
        return [result for result in logits if result is not None]

    @torch.inference_mode()
    def _forward_padded(self, rows: list[Row]) -> list[Tensor]:
        keys = [row.key for row in rows]
        starts = [row.num_computed for row in rows]
        counts = [len(row.token_ids) for row in rows]
        width = max(counts)
        positions = self._cache.begin(keys, starts, counts, self._device)
        padded = [(*row.token_ids, *(row.token_ids[-1:] * (width - len(row.token_ids)))) for row in rows]
        # Logits cost a matrix product with the whole vocabulary, so they are made for the wanted columns only.
        wanted = [range(count - row.num_logits, count) for row, count in zip(rows, counts, strict=True)]
        columns = [column for column in range(width) if any(column in part for part in wanted)]
        arguments: dict[str, Any] = {self._cache_argument: self._cache}
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = torch.tensor(columns, dtype=torch.long, device=self._device)
        output = self._model(
            input_ids=torch.tensor(padded, device=self._device),
            position_ids=positions,
            attention_mask=self._mask(positions),
            use_cache=True,
            **arguments,
        )
        self._cache.commit(keys, [start + count for start, count in zip(starts, counts, strict=True)])
        logits = output.logits if self._takes_logits_to_keep else output.logits[:, columns]
        at = {column: index for index, column in enumerate(columns)}
        return [logits[row, [at[column] for column in part], : self.num_token_ids] for row, part in enumerate(wanted)]

    def _mask(self, positions: Tensor) -> Tensor:
        """Additive mask, shape [B, 1, Q, kv_len]: a query sees every position up to its own."""
        visible = torch.arange(self._cache.step.kv_len, device=self._device) <= positions[:, :, None]
        mask = torch.zeros(visible.shape, dtype=self._model.dtype, device=self._device)
        return mask.masked_fill_(~visible, torch.finfo(self._model.dtype).min)[:, None]


def _groups_of_like_width(widths: Sequence[int]) -> list[list[int]]:
    """Row indices that go through the model together.

    Padding a verification of five tokens to the width of a prompt chunk of 500 would cost a hundred times its work, so
    rows of up to 32 tokens make one pass, and longer ones share a pass with those within a factor of four.
    """
    groups: dict[int, list[int]] = {}
    for index, width in enumerate(widths):
        groups.setdefault(((width - 1) | 16).bit_length() // 2, []).append(index)
    return list(groups.values())

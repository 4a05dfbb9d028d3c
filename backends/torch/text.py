"""Between text and token ids (`TextCodec`); the torch world itself never sees text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from minedraft.backends.torch.errors import TorchWorldError


class TextCodec:
    """A model's tokenizer and chat template.

    Args:
        model: what `resolve_model` returned.

    Raises:
        TorchWorldError: the model has no tokenizer.
    """

    def __init__(self, model: str | Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        except (OSError, ValueError) as error:
            raise TorchWorldError(
                f"model {str(model)!r} has no tokenizer that can be read; give prompts as token ids"
            ) from error

    def encode(self, prompt: str, *, chat: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt.

        Args:
            prompt: what the user wrote.
            chat: wrap it in the model's chat template, if it has one.
        """
        if chat and self._tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            # The template brings its own special tokens.
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        return tuple(self._tokenizer.encode(prompt))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

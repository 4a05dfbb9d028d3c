"""Which draft models fit a target, and what happens to padded vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minedraft.backends.torch.errors import TorchWorldError
from minedraft.backends.torch.model_card import ModelCard, common_num_token_ids, read_model_card
from minedraft.backends.torch.surgery import make_tiny_llama
from minedraft.backends.torch.text import TextCodec


def card(name: str, vocab_size: int, tokens: str | None = None) -> ModelCard:
    vocabulary = None if tokens is None else {token: index for index, token in enumerate(tokens)}
    return ModelCard(name, vocab_size, vocabulary, (2,), 512)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (card("t", 8), None, 8),
        (card("t", 8, "abcdef"), None, 6),  # padding of the target alone is never produced either
        (card("t", 8), card("d", 8), 8),
        (card("t", 8, "abcdef"), card("d", 6, "abcdef"), 6),
        (card("t", 8, "abcdef"), card("d", 16, "abcdef"), 6),
        (card("t", 8, "abcdef"), card("d", 8), 6),
    ],
)
def test_matching_vocabularies(target: ModelCard, draft: ModelCard | None, expected: int) -> None:
    assert common_num_token_ids(target, draft) == expected


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (card("t", 8), card("d", 9)),
        (card("t", 8, "abcdef"), card("d", 8, "abcdfe")),
        (card("t", 8, "abcdef"), card("d", 8, "abcde")),
        (card("t", 8, "abcdef"), card("d", 5, "abcdef")),
        (card("t", 8, "abcdef"), card("d", 9)),
    ],
)
def test_other_vocabularies_are_refused_in_one_line(target: ModelCard, draft: ModelCard) -> None:
    with pytest.raises(TorchWorldError, match="draft model 'd' and target 't' have different vocabul") as caught:
        common_num_token_ids(target, draft)
    assert "\n" not in str(caught.value)


def test_a_card_is_read_from_a_folder(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, seed=1, vocab_size=40, eos_token_id=[2, 7])
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    read = read_model_card(str(tmp_path))
    assert (read.vocab_size, read.num_token_ids, read.max_model_len) == (40, 3, 512)
    assert read.eos_token_ids == (2, 7)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TorchWorldError, match="cannot be read"):
        read_model_card(str(tmp_path))


def test_text_to_tokens_and_back(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "bare", seed=1, vocab_size=40)
    with pytest.raises(TorchWorldError, match="give prompts as token ids"):
        TextCodec(tmp_path / "bare")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "user": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"
    make_tiny_llama(tmp_path / "chat", seed=1, vocab_size=40)
    fast.save_pretrained(tmp_path / "chat")
    codec = TextCodec(tmp_path / "chat")
    assert codec.encode("b a") == (2, 1, 0)
    assert codec.encode("b a", chat=False) == (1, 0)
    assert codec.decode((1, 0)) == "b a"

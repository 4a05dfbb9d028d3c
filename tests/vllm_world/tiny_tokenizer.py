"""A tokenizer for models made in tests: one printable character per token, so texts and token ids say the same.

Encoding and decoding are inverse to each other, whatever the ids: no merges, no spaces added or cleaned away. The first
characters are those of ASCII, so JSON can be written with 98 ids, as grammars need it.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from itertools import count
from pathlib import Path

EOS_TEXT = "<eos>"
UNKNOWN = "?"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def add_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json beside a model's config.json.

    Every id below `vocab_size` decodes to a text of its own. The id that the model's configuration names as EOS is
    `EOS_TEXT`, the only special token. What the vocabulary doesn't hold is encoded as `UNKNOWN`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = make_vocabulary(vocab_size, eos_id(folder))
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    assert UNKNOWN in vocabulary, f"vocab_size {vocab_size} is too small"
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS_TEXT, unk_token=None, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_vocabulary(vocab_size: int, eos: int) -> list[str]:
    """Texts by id."""
    letters = printable_characters()
    return [EOS_TEXT if token_id == eos else next(letters) for token_id in range(vocab_size)]


def eos_id(folder: Path) -> int:
    """The id that ends a text, as the model's configuration has it."""
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return int(eos[0] if isinstance(eos, list) else eos)


def printable_characters() -> Iterator[str]:
    """ASCII from the space on, then other letters that have one form only and can't join with their neighbours."""
    yield from map(chr, range(0x20, 0x7F))
    others = (chr(code) for code in count(0xA1))
    yield from (
        char
        for char in others
        if char.isprintable()
        and unicodedata.category(char)[0] in "LNS"
        and not unicodedata.combining(char)
        and unicodedata.normalize("NFKC", char) == char
    )


def text_of(token_ids: list[int], vocab_size: int, eos: int) -> str:
    """What these ids decode to, EOS left out as servers leave it out."""
    texts = make_vocabulary(vocab_size, eos)
    return "".join(texts[token_id] for token_id in token_ids if token_id != eos)

"""What the parent must know of a model without its weights (`ModelCard`), and whether a draft fits a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from minedraft.backends.torch.errors import TorchWorldError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model's data that need no weights.

    Attributes:
        name: folder or hub name.
        vocab_size: rows of its output matrix; may be padded beyond the tokenizer's ids.
        vocabulary: token to id, of its tokenizer; None if it has none.
        eos_token_ids: ids that end a text.
        max_model_len: positions that it was made for; None if it doesn't say.
    """

    name: str
    vocab_size: int
    vocabulary: Mapping[str, int] | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int | None

    @property
    def num_token_ids(self) -> int:
        """Ids that may be produced: those of the tokenizer, without padding rows."""
        if not self.vocabulary:
            return self.vocab_size
        return min(self.vocab_size, max(self.vocabulary.values()) + 1)


def read_model_card(name: str) -> ModelCard:
    """Read a model's configuration and tokenizer.

    Raises:
        TorchWorldError: there is no such model, or it keeps KV in a form that can't be rewound (sliding window,
            recurrent state).
    """
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
        vocabulary = AutoTokenizer.from_pretrained(name).get_vocab() if _has_tokenizer(name) else None
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise TorchWorldError(f"model {name!r}: cannot be read: {first}") from error
    _refuse_unrewindable(name, config)
    return ModelCard(
        name=name,
        vocab_size=config.vocab_size,
        vocabulary=vocabulary,
        eos_token_ids=_eos_token_ids(name, config),
        max_model_len=getattr(config, "max_position_embeddings", None),
    )


def _refuse_unrewindable(name: str, config: Any) -> None:
    for layer in DynamicCache(config=config).layers:
        if type(layer) is not DynamicLayer:
            raise TorchWorldError(
                f"model {name!r}: its {type(layer).__name__} can't be rewound position by position; "
                "use a model with full attention in every layer"
            )


def _has_tokenizer(name: str) -> bool:
    folder = Path(name)
    return not folder.is_dir() or any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _eos_token_ids(name: str, config: Any) -> tuple[int, ...]:
    """EOS ids as `generate` would use them: the generation config's, else the model's."""
    try:
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:
        eos = config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def common_num_token_ids(target: ModelCard, draft: ModelCard | None) -> int:
    """The number of token ids that both models may produce.

    Equal tokenizers are enough: models of one family are often padded to different vocabulary sizes.

    Raises:
        TorchWorldError: the vocabularies differ, so one's drafts mean nothing to the other.
    """
    if draft is None:
        return target.num_token_ids
    if target.vocabulary is not None and draft.vocabulary is not None:
        same = target.vocabulary == draft.vocabulary and draft.vocab_size >= target.num_token_ids
    else:
        same = target.vocab_size == draft.vocab_size
    if not same:
        raise TorchWorldError(
            f"draft model {draft.name!r} and target {target.name!r} have different vocabularies "
            f"({_size(draft)} and {_size(target)} tokens); use a draft model with the target's tokenizer"
        )
    return target.num_token_ids


def _size(card: ModelCard) -> int:
    return card.vocab_size if card.vocabulary is None else len(card.vocabulary)

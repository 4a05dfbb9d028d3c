"""Ragged batches over rewindable KV give what the model gives for each text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_kit import VOCAB
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minedraft.backends.torch import jobs
from minedraft.backends.torch.errors import TorchWorldError
from minedraft.backends.torch.language_model import LanguageModel, Row, _groups_of_like_width
from minedraft.backends.torch.messages import DraftEntry, DraftJob, VerifyEntry, VerifyJob
from minedraft.backends.torch.model_card import read_model_card
from minedraft.backends.torch.request import Sampling
from minedraft.backends.torch.sampling import Acceptance
from minedraft.backends.torch.surgery import make_tiny_llama

CPU = torch.device("cpu")
TEXT = tuple((3 + 13 * i) % VOCAB for i in range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_llama(path, seed=1, vocab_size=VOCAB)
    return path


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return LanguageModel.load(str(folder), CPU, "float64", VOCAB)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@torch.inference_mode()
def alone(plain: LlamaForCausalLM, tokens: tuple[int, ...], num_logits: int) -> Tensor:
    return plain(torch.tensor([tokens])).logits[0, len(tokens) - num_logits :]


def close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=0, atol=1e-10)


def all_close(ones: list[Tensor], twos: list[Tensor]) -> bool:
    return len(ones) == len(twos) and all(close(one, two) for one, two in zip(ones, twos, strict=True))


def test_rows_of_any_length_at_any_position(model: LanguageModel, plain: LlamaForCausalLM) -> None:
    rows = [
        Row(("a", 0), 0, TEXT[:150], 1),  # a prompt chunk: a pass of its own
        Row(("b", 0), 0, TEXT[50:51], 1),
        Row(("c", 0), 0, TEXT[60:67], 3),
        Row(("d", 0), 0, TEXT[80:90], 0),
    ]
    wanted = [alone(plain, row.token_ids, row.num_logits) for row in rows]
    assert all_close(model.forward(rows), wanted)
    rows = [Row(("d", 0), 10, TEXT[90:93], 2), Row(("a", 0), 150, TEXT[150:152], 2)]
    wanted = [alone(plain, TEXT[80:93], 2), alone(plain, TEXT[:152], 2)]
    assert all_close(model.forward(rows), wanted)


@pytest.mark.parametrize("kept", range(8, 14))
def test_rewinding_to_every_length(model: LanguageModel, plain: LlamaForCausalLM, kept: int) -> None:
    """Ten tokens and four drafts, of which any number is kept; other tokens follow, beside another row."""
    other, tail = TEXT[100:105], TEXT[150:153]
    model.forward([Row(("a", 0), 0, TEXT[:10], 1), Row(("b", 0), 0, other, 1)])
    model.forward([Row(("a", 0), 10, TEXT[10:14], 4), Row(("b", 0), 5, TEXT[0:1], 1)])
    got = model.forward([Row(("b", 0), 5, tail[:1], 1), Row(("a", 0), kept, tail, 3)])
    assert close(got[0], alone(plain, other + tail[:1], 1))
    assert close(got[1], alone(plain, TEXT[:kept] + tail, 3))


def test_a_freed_slot_is_clean_and_an_incarnation_is_a_sequence_of_its_own(
    model: LanguageModel, plain: LlamaForCausalLM
) -> None:
    model.forward([Row(("a", 0), 0, TEXT[:40], 1)])
    model.drop([("a", 0), ("never", 3)])
    assert close(model.forward([Row(("a", 1), 0, TEXT[50:60], 2)])[0], alone(plain, TEXT[50:60], 2))
    with pytest.raises(ValueError, match="keep 3 KV positions, but only 0 are valid"):
        model.forward([Row(("a", 0), 3, TEXT[:1], 1)])


def test_padding_of_the_vocabulary_is_never_produced(folder: Path) -> None:
    model = LanguageModel.load(str(folder), CPU, "float64", VOCAB - 10)
    assert model.forward([Row(("a", 0), 0, TEXT[:3], 2)])[0].shape == (2, VOCAB - 10)


def test_other_architectures(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    qwen = Qwen3ForCausalLM(config).double().eval()
    qwen.save_pretrained(tmp_path)
    model = LanguageModel.load(str(tmp_path), CPU, "float64", VOCAB)
    model.forward([Row(("a", 0), 0, TEXT[:9], 1)])
    got = model.forward([Row(("b", 0), 0, TEXT[20:24], 1), Row(("a", 0), 7, TEXT[30:32], 2)])
    assert close(got[0], alone(qwen, TEXT[20:24], 1))
    assert close(got[1], alone(qwen, TEXT[:7] + TEXT[30:32], 2))


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    Qwen3Config(
        vocab_size=VOCAB, num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=0
    ).save_pretrained(tmp_path)
    with pytest.raises(TorchWorldError, match="can't be rewound"):
        read_model_card(str(tmp_path))


def test_prompt_chunks_do_not_widen_verifications() -> None:
    assert _groups_of_like_width([1, 5, 32, 1, 20]) == [[0, 1, 2, 3, 4]]
    assert _groups_of_like_width([5, 500, 4, 300, 40]) == [[0, 2], [1, 3], [4]]


def test_drafting_entries_of_different_k(model: LanguageModel, plain: LlamaForCausalLM) -> None:
    greedy = Sampling()
    entries = (
        DraftEntry(("a", 0), 0, TEXT[:5], 3, greedy),
        DraftEntry(("b", 0), 0, TEXT[10:12], 0, greedy),
        DraftEntry(("c", 0), 0, TEXT[20:24], 1, greedy),
    )
    drafted = jobs.draft(model, DraftJob(0, (), entries), Acceptance.REJECTION)
    assert [len(one.token_ids) for one in drafted] == [3, 0, 1]
    assert [len(one.probs) for one in drafted] == [3, 0, 1]
    text = TEXT[:5]
    for token_id, prob in zip(drafted[0].token_ids, drafted[0].probs, strict=True):
        logits = alone(plain, text, 1)[0]
        assert token_id == int(logits.argmax())
        assert prob == pytest.approx(float(logits.softmax(-1).max()))
        text += (token_id,)


@pytest.mark.parametrize("acceptance", list(Acceptance))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_accepts_its_own_drafts_in_full(
    folder: Path, model: LanguageModel, acceptance: Acceptance, temperature: float
) -> None:
    drafter = LanguageModel.load(str(folder), CPU, "float64", VOCAB)
    sampling = Sampling(temperature, seed=3)
    text = list(TEXT[:6])
    for round_number in range(3):  # full acceptance leaves the drafter two tokens behind
        start = 0 if not round_number else len(text) - 2
        entry = DraftEntry(("a", 0), start, tuple(text[start:]), 3, sampling)
        (drafted,) = jobs.draft(drafter, DraftJob(0, (), (entry,)), acceptance)
        assert (drafted.rows is None) == (temperature == 0 or acceptance is Acceptance.COUPLED)
        start = 0 if not round_number else len(text) - 1
        check = VerifyEntry(("a", 0), start, tuple(text[start:]), drafted.token_ids, drafted.rows, True, sampling)
        (new,) = jobs.verify(model, VerifyJob(0, (), (check,)), acceptance)
        assert new[:3] == drafted.token_ids
        assert len(new) == 4
        text += new


def test_a_prompt_chunk_that_is_not_the_last_yields_nothing(model: LanguageModel) -> None:
    entry = VerifyEntry(("a", 0), 0, TEXT[:40], (), None, False, Sampling())
    assert jobs.verify(model, VerifyJob(0, (), (entry,)), Acceptance.REJECTION) == ((),)

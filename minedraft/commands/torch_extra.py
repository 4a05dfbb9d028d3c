"""Says plainly that the `torch` extra is missing (`torch_extra`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

from minedraft.commands.errors import CommandError

NEEDED: Final = ("torch", "transformers", "gguf", "safetensors")
REMEDY: Final = "install it with: pip install 'minedraft[torch]'"


def has_torch_extra() -> bool:
    """Whether all packages of the extra are there; imports none of them."""
    try:
        return all(find_spec(name) is not None for name in NEEDED)
    except (ImportError, ValueError):  # blocked, or half removed
        return False


@contextmanager
def torch_extra() -> Iterator[None]:
    """Turn a missing package of the extra into a `CommandError` with the remedy."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in NEEDED:
            raise CommandError(f"this needs the torch extra ({package} is missing); {REMEDY}") from error
        raise

"""Where made models are kept, and making one whole or not at all (`build_once`)."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def default_cache_dir() -> Path:
    """`$MINEDRAFT_CACHE`, else `$XDG_CACHE_HOME/minedraft`, else `~/.cache/minedraft`."""
    if own := os.environ.get("MINEDRAFT_CACHE"):
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "minedraft"


def build_once(destination: Path, build: Callable[[Path], None]) -> Path:
    """Make a folder unless it is there.

    It is built beside its destination and renamed into place, so that an interrupted build leaves nothing that looks
    like a result; a lock keeps a second process waiting until the first is done.

    Args:
        destination: the folder.
        build: fills the empty folder that it is given.

    Returns:
        `destination`.
    """
    if destination.is_dir():
        return destination
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / f".{destination.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if destination.is_dir():
            return destination
        prefix = f".{destination.name}.part-"
        for stale in parent.glob(f"{prefix}*"):  # of a build that was killed: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            build(folder)
            _open_up(folder)
            folder.rename(destination)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return destination


def _open_up(folder: Path) -> None:
    """Give the modes that plain writing would: mkdtemp and safetensors make things private to their maker."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)

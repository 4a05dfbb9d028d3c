"""Whether the drafter is up, for a process that hears nothing of the engine while that has nothing to do.

vLLM's statistics travel with its steps, so an idle engine tells its front end nothing: a drafter that died at night
would show as up till the morning. So the engine's process keeps one byte in a file, whose name both can work out from
vLLM's instance id, and the stat logger reads it whenever vLLM has it log.

Law of this file: it is for display only. Nothing waits for it, and no failure of it does any harm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_UP, _DOWN = b"1", b"0"


def status_path(instance_id: str) -> Path:
    """Where the engine of this vLLM instance keeps its byte."""
    return Path(tempfile.gettempdir()) / f"minedraft-{os.getuid()}-{instance_id}"


def read_status(path: Path) -> bool | None:
    """Whether the drafter is up; None if no engine says so."""
    try:
        return path.read_bytes() == _UP
    except OSError:
        return None


class DrafterStatus:
    """The engine's end: says that the drafter is down until told otherwise.

    Args:
        path: see `status_path`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        try:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            logger.warning("%s: %s; minedraft_drafter_up will be out of date while the engine is idle", path, error)
        self.tell(is_up=False)

    def tell(self, *, is_up: bool) -> None:
        """Note that the drafter is up, or isn't; from any thread."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, _UP if is_up else _DOWN, 0)

    def close(self) -> None:
        """Take the file away; a second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
            with contextlib.suppress(OSError):
                self._path.unlink()

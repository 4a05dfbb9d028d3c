"""A journal that gives up rather than end the engine: a full disk must not cost a request.

Law of this file: a journal is whole up to some call of the core, and then ends; nothing is ever written behind a gap.
`minedraft replay` reads that much of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from minedraft.journal import JournalHeader, JournalWriter

logger = logging.getLogger(__name__)


class Recording(JournalWriter):
    """A `JournalWriter` whose file may fail once it is begun.

    Args:
        path: the file, overwritten.
        header: see `JournalHeader`.
        on_lost: called once, if the file takes no more.

    Raises:
        OSError: the file can't be begun: that is found out before there are any requests.
        TypeError: the header isn't JSON.
    """

    def __init__(self, path: str | Path, header: JournalHeader, on_lost: Callable[[], None]) -> None:
        self._path = path
        self._on_lost: Callable[[], None] | None = None
        super().__init__(path, header)
        self._on_lost = on_lost

    def _put(self, line: str) -> None:
        if self._file.closed:
            return
        try:
            super()._put(line)
        except OSError as error:
            if self._on_lost is None:
                raise
            self.give_up(str(error))

    def give_up(self, reason: str) -> None:
        """End here, without the line that calls a journal whole; nothing follows. Nothing happens a second time."""
        if self._file.closed or self._on_lost is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        logger.error("the journal %s ends here (%s); requests go on without it", self._path, reason)
        self._on_lost()

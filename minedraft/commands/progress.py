"""A progress bar on stderr for whoever waits longer than two seconds (`ProgressBar`)."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Final, Self

DELAY_S: Final = 2.0
REFRESH_S: Final = 0.2


class ProgressBar:
    """Shows how many are done; counting costs an addition, for the drawing is a thread's.

    Nothing is shown before `DELAY_S`, or if stderr is not a terminal.

    Args:
        label: what is going on; None to show nothing.
        total: how many there will be; None if nobody knows.

    Attributes:
        num_done: to be counted up by the user.
    """

    def __init__(self, label: str | None, total: int | None = None) -> None:
        self.num_done = 0
        self._label = label
        self._total = total
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._label is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        if self._closed.wait(DELAY_S):
            return
        assert self._label is not None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(self._label, total=self._total)
            while not self._closed.wait(REFRESH_S):
                progress.update(task, completed=self.num_done)

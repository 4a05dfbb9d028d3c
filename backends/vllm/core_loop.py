"""The core's two verbs for a world that owns its loop, with every call told to the journal's sinks.

Law of this file: the only place of the vLLM world that calls `schedule` and `update`; so what the sinks hear is exactly
what the core saw, and a replay of it must take the same decisions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from minedraft.backends.vllm.kv_view import KVView
from minedraft.journal import JournalWriter, Sink
from minedraft.request import RequestOutput
from minedraft.scheduler import Scheduler
from minedraft.work import Event, Work


class CoreLoop:
    """A core, a clock and some sinks.

    Args:
        core: the scheduler, made with the view's pool.
        view: of the target's blocks.
        sinks: who hears of every call; a journal among them also of the pool's answers.

    Attributes:
        core: look at it, but tell and ask through this object.
        origin_s: zero of `now`, on the clock of `time.monotonic`.
    """

    def __init__(self, core: Scheduler, view: KVView, sinks: Iterable[Sink] = ()) -> None:
        self.core = core
        self.origin_s = time.monotonic()
        self._view = view
        self._sinks = tuple(sinks)
        self._journals = tuple([sink for sink in self._sinks if isinstance(sink, JournalWriter)])
        for sink in self._sinks:
            sink.on_start(0.0)

    def now(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self.origin_s

    def tell(self, event: Event) -> list[RequestOutput]:
        """Let the core take an event in; returns the requests that ended with it."""
        now_s = self.now()
        for sink in self._sinks:
            sink.on_event(now_s, event)
        outputs = self.core.update(event, now_s)
        self._note_answers(now_s)
        return outputs

    def ask(self) -> list[Work]:
        """Ask the core what to start now; the target must be at rest."""
        now_s = self.now()
        for sink in self._sinks:
            sink.on_asked(now_s)
        self._view.sync(self.core.state.target_freed)
        works = self.core.schedule(now_s)
        self._note_answers(now_s)
        for work in works:
            for sink in self._sinks:
                sink.on_submit(now_s, work)
        return works

    def _note_answers(self, now_s: float) -> None:
        answers = self._view.take_answers()
        if answers is not None:
            for journal in self._journals:
                journal.on_pooled(now_s, answers)

    def close(self) -> None:
        """Close the sinks; a second call does nothing."""
        for sink in self._sinks:
            sink.close()

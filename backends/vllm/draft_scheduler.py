"""The drafter's scheduler: vLLM's own, in which a session can be rewound to the committed prefix.

A session is a vLLM *resumable* (streaming-input) request: after its k tokens it is parked with its KV, and the next job
continues it. vLLM's own rule keeps what was generated; ours keeps the tokens that the target has confirmed.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from minedraft.backends.vllm import compat


class DraftScheduler(Scheduler):  # type: ignore[misc]
    """Named by the drafter's `scheduler_cls`.

    Attributes:
        rewinds: by request id, for a session whose next job comes in: how many of its first tokens still hold, and its
            whole text from then on, as an array.

    Raises:
        VllmWorldError: the model can't be rewound.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compat.check_draft_engine(self.kv_cache_config)
        self.rewinds: dict[str, tuple[int, Any]] = {}
        # A draft in a cached block could be overwritten while another session reads it.
        compat.cache_prompts_only(self)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """Rewind a parked session, and append the update's tokens."""
        keep, text = self.rewinds.pop(session.request_id)
        compat.rewind_session(self, session, update, keep, text)

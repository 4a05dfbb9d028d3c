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
        keep: by request id, how many of a session's first tokens still hold when its next job comes in.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep: dict[str, int] = {}
        # A draft in a cached block could be overwritten while another session reads it.
        compat.cache_prompts_only(self)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """Replace a parked session's tokens by those of the update; its KV stays valid for the first `keep`."""
        compat.rewind_session(self, session, update, self.keep.pop(session.request_id, 0))

"""What vLLM runs in each of its processes where minedraft is installed (entry-point group `vllm.general_plugins`).

vLLM sets up its own logger only. So what minedraft logs in an engine, its drafter's state for one, would lose its
level, time and process, and everything below a warning would be lost altogether. `register` lets the logger
`minedraft` write where and as vLLM's does.

Law of this file: it must mean nothing to engines without minedraft, so it is cheap, silent, and touches no object of
vLLM's. What else minedraft needs in a process comes in by what the user names: the scheduler in the engine's, the
proposer (and with it `cpu_sampling`) in the workers', the stat logger in the API server's.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Give the logger `minedraft` the handlers of vLLM's, unless somebody has set it up; a second call does nothing."""
    ours, theirs = logging.getLogger("minedraft"), logging.getLogger("vllm")
    if ours.handlers or ours.level or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate

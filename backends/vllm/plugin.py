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
from importlib.metadata import entry_points
from typing import Final

METRICS_PLUGIN: Final = "minedraft_metrics"
"""Name of our stat logger's entry point."""

_GROUPS: Final = tuple([f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger")])
_ONLY_IF_NAMED: Final = "vllm.endpoint_plugins"


def register() -> None:
    """Give the logger `minedraft` the handlers of vLLM's, unless somebody has set it up; a second call does nothing."""
    ours, theirs = logging.getLogger("minedraft"), logging.getLogger("vllm")
    if ours.handlers or ours.level or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def without_metrics(allowed: str | None) -> str | None:
    """What VLLM_PLUGINS must be for all to be loaded that would be, but for our stat logger.

    Args:
        allowed: what it is now; None if unset.

    Returns:
        None if there is no such list: some plugin is loaded only where it is named, and has a name in common with
        another.
    """
    if allowed is not None:
        names = allowed.split(",")
    else:
        names = sorted({point.name for group in _GROUPS for point in entry_points(group=group)})
        if any(point.name in names for point in entry_points(group=_ONLY_IF_NAMED)):
            return None
    return ",".join([name for name in names if name.strip() != METRICS_PLUGIN])

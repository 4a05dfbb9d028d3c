"""What can go wrong with the world of vLLM, as opposed to with our code."""

from __future__ import annotations


class VllmWorldError(Exception):
    """A setting, a version or a process that this world can't work with; the message says what to change."""

"""What goes wrong in the torch world through no fault of our own; every message is one line with a remedy."""

from __future__ import annotations


class TorchWorldError(Exception):
    """A model, device or request that the torch world cannot serve; the message names the field and the remedy."""


class TargetLostError(TorchWorldError):
    """The target process ended: without it no token can be committed."""

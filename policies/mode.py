"""Mode: how the two device groups share the work."""

from __future__ import annotations

from minedraft.policy import LoadView, Mode


class Fixed:
    """Always the same mode.

    Args:
        mode: `ar`, `sd` or `psd`.
    """

    def __init__(self, mode: str = "psd") -> None:
        try:
            self.mode = Mode(mode)
        except ValueError:
            raise ValueError(f"mode is {mode!r}, must be one of {', '.join(Mode)}") from None

    def choose_mode(self, load: LoadView) -> Mode:
        """The constant."""
        return self.mode

"""How a command says that it can't go on (`CommandError`)."""

from __future__ import annotations

from typing import Final

BAD_INPUT: Final = 2
FAILED_CHECK: Final = 1
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it


class CommandError(Exception):
    """Ends a command: one line for stderr, and an exit code.

    Attributes:
        exit_code: `BAD_INPUT`, unless a check failed.
    """

    def __init__(self, message: str, exit_code: int = BAD_INPUT) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class InterruptedRunError(CommandError):
    """The user pressed Ctrl-C."""

    def __init__(self, message: str = "interrupted") -> None:  # with an argument it survives pickling
        super().__init__(message, INTERRUPTED)


def unusable_file(error: OSError, path: str | None = None) -> CommandError:
    """What to say of a file that can't be written or read; `path` if only the caller knows which it was."""
    name = error.filename if path is None else path
    name = "a file" if name is None else str(name)
    return CommandError(f"{name}: {error.strerror or error}; check the path, its folder and the permissions")

"""Writes to unbuffered files (`write_whole`)."""

from __future__ import annotations

from io import FileIO


def write_whole(file: FileIO, data: bytes) -> None:
    """Write all of it, for sinks that write to an unbuffered file.

    Raises:
        OSError: it can't be written; the error names the file.
    """
    try:
        while (written := file.write(data)) < len(data):  # a disk that is nearly full: the next try says so
            data = data[written:]
    except OSError as error:
        error.filename = file.name
        raise

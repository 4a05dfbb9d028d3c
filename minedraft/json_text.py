"""Reads JSON that somebody else wrote (`parse_json`)."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; whatever is wrong with it, the error is of one kind.

    `json.loads` has faults of other kinds too: thousands of brackets end in a RecursionError, thousands of digits and
    bytes that are no UTF-8 in a plain ValueError.

    Raises:
        json.JSONDecodeError: it can't be read.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        fault = "nested too deeply"
    except ValueError as error:
        fault = str(error).partition(";")[0]
    raise json.JSONDecodeError(fault, "", 0)

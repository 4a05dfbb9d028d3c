"""JSON of others: whatever is wrong with it, one kind of error comes."""

from __future__ import annotations

import json

import pytest

from minedraft.json_text import parse_json


def test_what_is_json_is_read() -> None:
    assert parse_json('{"a": [1, 2.5, null]}') == parse_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "4300 digits"),
        (b"\xff", "can't decode byte"),
    ],
)
def test_every_fault_is_of_one_kind(text: str | bytes, fault: str) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json(text)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)

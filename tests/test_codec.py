from __future__ import annotations

import json

import pytest
from hypothesis import given

from minedraft.codec import FIELDS, Record, decode, encode
from minedraft.request import FinishReason, Request
from minedraft.work import DrafterReady, RequestArrived, VerifyResult, WorkDone
from tests.streams import items, times


@given(times, items)
def test_round_trip_loses_nothing(now_s, item):
    line = encode(now_s, item)
    assert decode(line) == Record(now_s, item)
    assert type(decode(line).item) is type(item)
    assert encode(*decode(line)) == line


@given(times, items)
def test_a_line_is_one_ascii_line_whose_fields_are_listed(now_s, item):
    line = encode(now_s, item)
    assert line.isascii()
    assert "\n" not in line
    kind, _, *fields = json.loads(line)
    assert len(fields) == len(FIELDS[kind])


def test_the_format_is_stable():
    """Journals outlive versions: a change here needs a new FORMAT_VERSION."""
    assert encode(1.5, RequestArrived(Request("a", 3, 4, 1.25))) == '["arrived",1.5,"a",3,4,1.25,0,null]'
    done = WorkDone(7, VerifyResult((2,), (1,), (FinishReason.STOP,)), 0.1, 0.2)
    assert encode(0.3, done) == '["verified",0.3,7,0.1,0.2,[2],[1],["stop"]]'
    assert encode(2, DrafterReady()) == '["ready",2]'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{}", "not an array"),
        ("[1,2]", "not an array"),
        ('["nonsense",1.0]', "unknown kind 'nonsense'"),
        ('["ready","x"]', "the time is 'x'"),
        ('["ready",true]', "the time is True"),
        ('["aborted",1.0]', "has 0 fields, must be 1"),
        ('["drafted",1.0,0,0.1,0.2,5,null]', "wrong type"),
        ('["verified",1.0,0,0.1,0.2,[0],[1],["bored"]]', "bored"),
        ('["arrived",1.0,"a",0,4,0.0,0,null]', "prompt_len is 0"),
        ('["draft",1.0,0,0,[],[],[],[],[],[],[["a"]]]', "unpack"),
        ('["ready",1.0', "delimiter"),
    ],
)
def test_bad_lines_say_what_is_wrong(line, fault):
    with pytest.raises(ValueError, match=fault):
        decode(line)


def test_foreign_numbers_are_refused():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError):
        encode(0.0, WorkDone(numpy.int64(3), VerifyResult((), ()), 0.0, 0.0))

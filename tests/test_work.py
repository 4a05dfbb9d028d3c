"""The makers of values that cross the seam make what the classes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minedraft import work

MAKERS: dict[str, tuple[Callable[..., Any], type[Any]]] = {
    "draft_work": (work.draft_work, work.DraftWork),
    "verify_work": (work.verify_work, work.VerifyWork),
    "draft_result": (work.draft_result, work.DraftResult),
    "verify_result": (work.verify_result, work.VerifyResult),
    "work_done": (work.work_done, work.WorkDone),
}


COLUMNS = tuple([(i, i + 1) for i in range(10)])  # no two alike
VALUES: dict[str, tuple[Any, ...]] = {
    "draft_work": (7, 1, *COLUMNS[:7]),
    "verify_work": (7, 1, *COLUMNS),
    "draft_result": COLUMNS[:2],
    "verify_result": COLUMNS[:3],
    "work_done": (7, work.DraftResult((1, 2)), 0.5, 1.5),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_field_is_where_the_class_has_it(name: str) -> None:
    make, kind = MAKERS[name]
    made = make(*VALUES[name])
    assert type(made) is kind
    assert made == kind(*VALUES[name])
    assert make(**dict(zip(kind._fields, VALUES[name], strict=True))) == made


def test_what_may_be_left_out_is_none() -> None:
    assert work.draft_result((1,)) == work.DraftResult((1,), None)
    assert work.verify_result((1,), (2,)) == work.VerifyResult((1,), (2,), None)

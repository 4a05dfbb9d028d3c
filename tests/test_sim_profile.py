"""Profiles: the file, interpolation between measured neighbours, and what lies outside."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.cli import run_cli
from minedraft.config import ConfigError, parse_config
from minedraft.sim.fence import ExtrapolationWarning
from minedraft.sim.profile import FORMAT, Profile, ProfileTable
from minedraft.sim.steps import CostError

SEQS, TOKENS, CONTEXT = (1, 4, 16), (1, 4, 64), (0, 512, 2048)


def plane_s(seqs: float, tokens: float, context: float) -> float:
    """Linear along each axis, with an intercept."""
    return 1e-3 * (5 + 0.1 * seqs + 0.02 * seqs * tokens + 1e-5 * seqs * context + 1e-7 * seqs * tokens * context)


def tree(**changes: Any) -> dict[str, Any]:
    seconds = [[[plane_s(b, q, c) for c in CONTEXT] for q in TOKENS] for b in SEQS]
    axes = {"num_seqs": list(SEQS), "num_new_tokens": list(TOKENS), "context": list(CONTEXT)}
    return {"format": FORMAT, "about": {"model": "made up"}, **axes, "seconds": seconds, **changes}


def ask(profile: Profile, seqs: int, tokens: float, context: float) -> float:
    return profile.step_s(seqs, round(seqs * tokens), seqs * context, math.nan, 0)


PROFILE = Profile(ProfileTable.from_dict(tree()))


def test_measured_points_are_returned_as_they_are() -> None:
    for i, seqs in enumerate(SEQS):
        for j, tokens in enumerate(TOKENS):
            for k, context in enumerate(CONTEXT):
                assert ask(PROFILE, seqs, tokens, context) == PROFILE.table.seconds[i][j][k]


@given(seqs=st.integers(1, 16), tokens=st.integers(1, 64), context=st.integers(0, 2048))
def test_between_points_it_is_linear_along_each_axis(seqs: int, tokens: int, context: int) -> None:
    assert ask(PROFILE, seqs, tokens, context) == pytest.approx(plane_s(seqs, tokens, context), rel=1e-9)


@given(
    times=st.lists(st.floats(1e-4, 1.0), min_size=27, max_size=27),
    seqs=st.integers(1, 16),
    tokens=st.integers(1, 64),
    context=st.integers(0, 2048),
)
def test_never_beyond_its_neighbours(times: list[float], seqs: int, tokens: int, context: int) -> None:
    grid = [[times[9 * i + 3 * j : 9 * i + 3 * j + 3] for j in range(3)] for i in range(3)]
    profile = Profile(ProfileTable.from_dict(tree(seconds=grid)))

    def around(axis: tuple[int, ...], value: int) -> list[int]:
        low = max(i for i, x in enumerate(axis) if x <= value)
        return [low] if axis[low] == value else [low, low + 1]

    near = [grid[i][j][k] for i in around(SEQS, seqs) for j in around(TOKENS, tokens) for k in around(CONTEXT, context)]
    assert min(near) * (1 - 1e-9) <= ask(profile, seqs, tokens, context) <= max(near) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("point", "axis"),
    [((17, 1, 0), "num_seqs is 17"), ((4, 65, 0), "num_new_tokens is 65"), ((4, 1, 2049), "context is 2049")],
)
def test_outside_the_grid_is_refused(point: tuple[int, int, int], axis: str) -> None:
    with pytest.raises(CostError, match=rf'{axis} .* measured are .*set outside = "flag"') as caught:
        ask(PROFILE, *point)
    assert "\n" not in str(caught.value)
    assert PROFILE.fence.num_crossed == 0


def test_or_flagged_and_extrapolated_from_the_two_outermost_values() -> None:
    profile = Profile(ProfileTable.from_dict(tree()), "flag")
    with pytest.warns(ExtrapolationWarning, match="num_seqs is 32"):
        assert ask(profile, 32, 4, 512) == pytest.approx(plane_s(32, 4, 512))
    # Warned of once, counted always.
    assert ask(profile, 4, 4, 9999) == pytest.approx(plane_s(4, 4, 9999))
    assert profile.fence.num_crossed == 2
    assert ask(profile, 4, 4, 512) == pytest.approx(plane_s(4, 4, 512))
    assert profile.fence.num_crossed == 2


def test_below_the_grid_no_line_goes_through_zero() -> None:
    """A falling line is not followed below all that was measured."""
    grid = [[[0.010]], [[0.030]]]
    table = {"num_seqs": [8, 9], "num_new_tokens": [1], "context": [0], "seconds": grid}
    profile = Profile(ProfileTable.from_dict(tree(**table)), "flag")
    with pytest.warns(ExtrapolationWarning, match=r"num_seqs is 1 "):
        assert ask(profile, 1, 1, 0) == 0.010


def test_an_axis_of_one_value_answers_that_value_only() -> None:
    table = {"num_seqs": [1, 16], "num_new_tokens": [4], "context": [512], "seconds": [[[0.01]], [[0.02]]]}
    profile = Profile(ProfileTable.from_dict(tree(**table)), "flag")
    assert ask(profile, 16, 4, 512) == 0.02
    with pytest.raises(CostError, match=r"num_new_tokens is 3 .* measure more"):
        ask(profile, 1, 3, 512)


def test_holes_are_not_bridged() -> None:
    grid = tree()["seconds"]
    grid[2][2][2] = None
    for outside in ("refuse", "flag"):
        profile = Profile(ProfileTable.from_dict(tree(seconds=grid)), outside)  # type: ignore[arg-type]
        assert ask(profile, 16, 64, 512) == pytest.approx(plane_s(16, 64, 512))
        assert ask(profile, 4, 64, 2048) == pytest.approx(plane_s(4, 64, 2048))
        with pytest.raises(CostError, match="nothing was measured next to 16 sequences with 64 new tokens and 600"):
            ask(profile, 16, 64, 600)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is 'other', must be 'minedraft-profile/1'"),
        ({"num_seqs": [1, 4, 4]}, "num_seqs has 4 behind 4, must increase strictly"),
        ({"num_seqs": [0, 4, 16]}, "num_seqs begins with 0, must be >= 1"),
        ({"num_seqs": []}, "num_seqs is empty"),
        ({"context": [0, 512]}, r"seconds\[0\]\[0\] has 3 entries, its axis 2"),
        ({"context": [0, 1.5, 3]}, "context must be a list of whole numbers"),
        ({"seconds": [[1]]}, r"seconds\[0\]\[0\] must be a list"),
        ({"seconds": [[[0.0] * 3] * 3] * 3}, r"seconds\[0\]\[0\]\[0\] is 0.0, must be a number of seconds > 0"),
        ({"seconds": [[["1"] * 3] * 3] * 3}, r"seconds\[0\]\[0\]\[0\] is '1', must be a number"),
        ({"seconds": [[[None] * 3] * 3] * 3}, "seconds holds no time at all"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "target.json"
    file.write_text(json.dumps(tree(**change)))
    with pytest.raises(ValueError, match=rf"target.json: {message}"):
        ProfileTable.load(file)


def test_a_missing_key_a_missing_file_and_no_json(tmp_path: Path) -> None:
    file = tmp_path / "target.json"
    file.write_text(json.dumps({k: v for k, v in tree().items() if k != "context"}))
    with pytest.raises(ValueError, match="context is missing"):
        ProfileTable.load(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        ProfileTable.load(file)
    with pytest.raises(ValueError, match=r"nowhere\.json: No such file"):
        ProfileTable.load(tmp_path / "nowhere.json")


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    grid = tree()["seconds"]
    grid[0][0][0] = None
    table = ProfileTable.from_dict(tree(seconds=grid))
    (tmp_path / "p.json").write_text(json.dumps(table.to_dict()))
    assert ProfileTable.load(tmp_path / "p.json") == table


# --- configuration


def write_run(folder: Path, **changes: Any) -> Path:
    (folder / "target.json").write_text(json.dumps(tree(**changes)))
    (folder / "draft.json").write_text(json.dumps(tree()))
    file = folder / "run.toml"
    file.write_text(
        "[scheduler]\nmax_batch_size = 4\n[workload]\nnum_requests = 6\nprompt_lens = 32\noutput_lens = 40\n"
        '[cost]\nkind = "profile"\ntarget = {path = "target.json"}\ndraft = {path = "draft.json"}\n'
    )
    return file


def test_the_command_line_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["simulate", str(write_run(tmp_path)), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 6


def test_a_run_that_leaves_the_grid_fails_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path, context=[0, 40, 60])
    assert run_cli(["simulate", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "profile: context is" in error
    assert "measured are 0 to 60" in error


def test_faults_name_the_field(tmp_path: Path) -> None:
    def table(path: Path, **more: Any) -> dict[str, Any]:
        return {"mode": "ar", "cost": {"kind": "profile", "target": {"path": str(path), **more}}}

    file = tmp_path / "p.json"
    with pytest.raises(ConfigError, match=r"cost.target.path: .*p.json: No such file"):
        parse_config(table(file))
    file.write_text(json.dumps(tree()))
    assert parse_config(table(file, outside="flag"))
    with pytest.raises(ConfigError, match=r"cost.target.outside: is 'clamp'; known are refuse, flag"):
        parse_config(table(file, outside="clamp"))

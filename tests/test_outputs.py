"""Files of a command: an output never destroys an input or another output, and one that can't be written is named."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minedraft.cli import run_cli
from minedraft.commands.outputs import NamedPath, check_outputs, files_read
from minedraft.config import RunConfig
from minedraft.journal import JournalHeader, JournalWriter
from minedraft.trace import TraceWriter
from minedraft.whole_writes import write_whole

SHORT = ("--num-requests", "6", "--set", "workload.output_lens=8")
TRACE = "".join(f'{{"arrival_s": {i}, "prompt_len": 8, "output_len": 8}}\n' for i in range(6))
LENGTHS = "n\n8\n9\n"
FULL = "/dev/full"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with every kind of input."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text(TRACE)
    (tmp_path / "c.toml").write_text("seed = 3\n[workload]\nnum_requests = 6\noutput_lens = 8\n")
    (tmp_path / "lens.csv").write_text(LENGTHS)
    assert run_cli(["simulate", *SHORT, "--journal", "log.jsonl"]) == 0
    Path("link.jsonl").symlink_to("t.jsonl")
    Path("hard.jsonl").hardlink_to("t.jsonl")
    (tmp_path / "sub").mkdir()
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


LOG = ("--set", "acceptance.kind=log", "--set", "acceptance.path=log.jsonl")
LENS = ("--set", 'workload.output_lens={kind="empirical", path="lens.csv", column="n"}')
TWO_SEEDS = ("--seeds", "2")


@pytest.mark.parametrize(
    ("arguments", "both"),
    [
        (("simulate", "--workload", "t.jsonl", "--journal", "t.jsonl"), ("--journal t.jsonl", "workload.path t.jsonl")),
        (("simulate", "--workload", "t.jsonl", "--trace", "./sub/../t.jsonl"), ("--trace", "workload.path t.jsonl")),
        (("simulate", "--workload", "t.jsonl", "--json", "link.jsonl"), ("--json link.jsonl", "workload.path t.jsonl")),
        (("simulate", "--workload", "link.jsonl", "--json", "t.jsonl"), ("--json t.jsonl", "workload.path link.jsonl")),
        (("simulate", "--workload", "t.jsonl", "--json", "hard.jsonl"), ("--json hard.jsonl", "workload.path")),
        (("simulate", "c.toml", "--json", "c.toml"), ("--json c.toml", "the configuration c.toml")),
        (("simulate", *SHORT, *LOG, "--journal", "log.jsonl"), ("--journal log.jsonl", "acceptance.path log.jsonl")),
        (("simulate", *SHORT, *LENS, "--json", "lens.csv"), ("--json lens.csv", "workload.output_lens.path lens.csv")),
        (("simulate", *SHORT, "--json", "new", "--journal", "new"), ("--journal new", "--json new")),
        (("simulate", *SHORT, "--journal", "sub/../new", "--trace", "new"), ("--trace new", "--journal sub/../new")),
        (
            ("simulate", "--workload", "t.0.jsonl", "--set", "devices.num_replicas=2", "--journal", "t.jsonl"),
            ("--journal (of replica 0) t.0.jsonl", "workload.path t.0.jsonl"),
        ),
        (("compare", "c.toml", "--json", "c.toml"), ("--json c.toml", "the configuration c.toml")),
        (("compare", "--workload", "t.jsonl", "--csv", "t.jsonl", *TWO_SEEDS), ("--csv t.jsonl", "workload.path")),
        (("compare", *SHORT, *LOG, "--json", "log.jsonl"), ("--json log.jsonl", "acceptance.path log.jsonl")),
        (("compare", *SHORT, *TWO_SEEDS, "--json", "new", "--csv", "new"), ("--csv new", "--json new")),
        (("compare", *SHORT, "--rates", "1,2", "--csv", "new.svg", "--figure", "new.svg"), ("--figure", "--csv")),
        (("run", "--prompts", "t.jsonl", "--journal", "t.jsonl"), ("--journal t.jsonl", "--prompts t.jsonl")),
        (("run", "c.toml", "--prompt", "x", "--trace", "c.toml"), ("--trace c.toml", "the configuration c.toml")),
        (("run", "--prompt", "x", "--json", "new", "--trace", "new"), ("--trace new", "--json new")),
    ],
)
def test_no_output_destroys_an_input_or_another_output(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], both: Sequence[str]
) -> None:
    if "t.0.jsonl" in arguments:
        (folder / "t.0.jsonl").write_text(TRACE)
    capsys.readouterr()
    before = contents(folder)
    assert run_cli(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for part in both:
        assert part in err
    assert contents(folder) == before


def test_what_is_no_file_of_its_own_may_be_given_twice(folder: Path) -> None:
    nowhere = ("--json", os.devnull, "--journal", os.devnull, "--trace", os.devnull)
    assert run_cli(["simulate", *SHORT, *nowhere]) == 0
    assert run_cli(["simulate", *SHORT, "--json", "log.jsonl"]) == 0, "old outputs are overwritten"


def test_every_path_of_a_configuration_is_known() -> None:
    """A new field that names a file must be one of `PATH_KEYS`, or an output could destroy it."""
    tree: dict[str, Any] = {"a": {"path": "x"}, "b": [{"model": "y"}, {"c": ({"path": "z"},)}], "model": 3}
    found = [NamedPath("a.path", "x"), NamedPath("b[0].model", "y"), NamedPath("b[1].c[0].path", "z")]
    assert list(files_read(None, tree)) == found
    check_outputs({"--json": "w"}, found)
    names: set[str] = set()
    todo: list[Any] = [RunConfig.model_json_schema()]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            names.update(item.get("properties", {}))
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    assert "path" in names
    assert not [name for name in names if name != "path" and any(part in name for part in ("path", "file", "folder"))]


# --- files that can't be written

needs_full = pytest.mark.skipif(not Path(FULL).exists(), reason="only Linux has a disk that is always full")


@needs_full
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_figures_survive_a_timeline_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], replicas: str
) -> None:
    capsys.readouterr()
    options = ("--set", f"devices.num_replicas={replicas}", "--json", "a.json", "--journal", "a.jsonl")
    assert run_cli(["simulate", *SHORT, *options, "--trace", FULL]) == 2
    out, err = capsys.readouterr()
    fault = f"minedraft: error: {FULL}: No space left on device; check the path, its folder and the permissions"
    assert err.splitlines()[-1] == fault
    assert "Traceback" not in err
    assert "Successful requests" in out
    assert "stopped early" not in out
    figures = json.loads((folder / "a.json").read_text())
    assert figures["completed"] == 6
    assert figures["error"].startswith(FULL)
    journals = [folder / "a.jsonl"] if replicas == "1" else [folder / "a.0.jsonl", folder / "a.1.jsonl"]
    assert all(path.read_text().endswith('["end"]\n') for path in journals)


@needs_full
@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--journal", FULL),
        ("simulate", "--trace", FULL),
        ("simulate", "--set", "devices.num_replicas=2", "--trace", FULL),
        ("compare", "--seeds", "2", "--csv", FULL),
        ("simulate", "--json", FULL),
        ("compare", "--json", FULL),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str]
) -> None:
    capsys.readouterr()
    assert run_cli([arguments[0], *SHORT, *arguments[1:]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert FULL in err
    assert "No space left on device" in err


class Slow(io.FileIO):
    """A file that takes three bytes at a time, as a disk that is nearly full may."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:3])


def test_what_is_written_in_parts_is_whole(tmp_path: Path) -> None:
    with Slow(tmp_path / "a", "wb") as file:
        write_whole(file, b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@needs_full
def test_a_writer_that_fails_lets_its_file_go() -> None:
    with pytest.raises(OSError, match=FULL):
        JournalWriter(FULL, JournalHeader("1"))
    trace = TraceWriter(FULL)
    with pytest.raises(OSError, match=FULL):
        trace.close()
    trace.close()  # once is enough

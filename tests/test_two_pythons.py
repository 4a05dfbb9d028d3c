"""Same seed, same bytes: on every Python that is there, and as written down here.

What a run depends on besides its seed: CPython's `random.Random` (its stream is promised to stay), IEEE arithmetic, and
for workloads drawn from distributions numpy's generators, which may change between numpy's versions, and libm. The runs
that are written down below use neither of the last two, so every Python on every machine must reproduce them. Whole
files, drawn workloads included, are compared between interpreters of this machine that have the same numpy.

MINEDRAFT_OTHER_PYTHON names interpreters that have the needed packages (separated like PATH); without it those on PATH
are tried. `python tests/test_two_pythons.py` prints what is to be written down after a change that is meant.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minedraft
from minedraft.cli import run_cli

ROOT = Path(minedraft.__file__).parents[1]
PACKAGES = ("numpy", "pydantic", "rich", "simpy", "typer")
MODES = ("ar", "sd", "psd")

# Small pools and budgets, so that every kind of decision is made: preemption, short drafts, aborts, lost drafters.
CONFIG = """
seed = 11
[scheduler]
max_batch_size = 6
num_speculative_tokens = 4
max_num_batched_tokens = 96
num_target_blocks = 40
num_draft_blocks = 34
max_model_len = 500
[cost]
kind = "linear"
verify_base_s = 0.02
verify_per_seq_s = 0.0005
prefill_base_s = 0.02
prefill_per_token_s = 0.0001
draft_base_s = 0.004
[slo]
ttft_ms = 900.0
[faults]
draft_failure_rate = 0.05
verify_failure_rate = 0.02
outages = [{ at_s = 2.0, duration_s = 1.5 }]
pauses = [{ at_s = 4.0, duration_s = 0.3, device = "target" }]
"""
LISTED = """
[acceptance]
kind = "constant"
alpha = 0.7
[workload]
kind = "trace"
path = "requests.jsonl"
"""
DRAWN = """
[acceptance]
kind = "beta"
mean = 0.7
concentration = 4.0
[workload]
kind = "synthetic"
num_requests = 120
arrivals = { kind = "poisson", rate = 12.0 }
prompt_lens = { kind = "lognormal", mean = 60, p50 = 40, max_tokens = 300 }
output_lens = { kind = "lognormal", mean = 40, p50 = 30, max_tokens = 200 }
aborts = { probability = 0.1, mean_patience_s = 2.0 }
"""


def write_inputs(folder: Path) -> None:
    """A configuration of each kind, and the list of requests that the first one names."""
    (folder / "listed.toml").write_text(CONFIG + LISTED)
    (folder / "drawn.toml").write_text(CONFIG + DRAWN)
    lines, arrival_s = [], 0.0
    for i in range(80):
        arrival_s += i * i % 11 / 64
        row = {"arrival_s": arrival_s, "prompt_len": 5 + 37 * i % 211, "output_len": 3 + 29 * i % 83}
        lines.append(json.dumps(row))
    (folder / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))


def arguments(kind: str, mode: str) -> list[str]:
    files = ["--journal", f"{kind}-{mode}.jsonl", "--json", f"{kind}-{mode}.json"]
    return ["simulate", f"{kind}.toml", "--mode", mode, *files]


# --- what is written down

FIGURES = (
    "completed",
    "num_preemptions",
    "spec_decode_accepted_tokens",
    "duration",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "std_itl_ms",
    "decode_verify_share",
)


def digest(journal: Path) -> str:
    """Of a journal's records: its header tells of the version and of every field of the configuration."""
    return hashlib.sha256(journal.read_bytes().partition(b"\n")[2]).hexdigest()


def found_here(folder: Path, mode: str) -> tuple[str, list[Any]]:
    figures = json.loads((folder / f"listed-{mode}.json").read_text())
    return digest(folder / f"listed-{mode}.jsonl"), [figures[name] for name in FIGURES]


WRITTEN_DOWN: dict[str, tuple[str, list[Any]]] = {
    "ar": (
        "48a9f3e3f3e48d31d1ef88dec39577b143c889c2c43e66df3de83be05db27dbd",
        [
            80,
            30,
            0,
            23.998499999999805,
            145.21740942142335,
            8383.997499999974,
            17392.879999999837,
            29.360477682694277,
            0.9676078071565598,
        ],
    ),
    "sd": (
        "ef5f4f543abb91f78b3eac0cff7ecaea31420728c01fefc869d0563546f78817",
        [
            80,
            23,
            1708,
            20.97199999999972,
            166.17394621400183,
            7077.481249999988,
            14383.346999999838,
            32.962942051945014,
            0.6124743348600846,
        ],
    ),
    "psd": (
        "5a95ea4aff82dad5f2fd660f418e60df7b5010f39a610c13509d0264e73c68b2",
        [
            80,
            17,
            1831,
            22.517299999999988,
            154.76988804163918,
            7998.237500000056,
            16389.895000000062,
            30.399326584887024,
            0.9484169429885564,
        ],
    ),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all runs of this interpreter."""
    folder = tmp_path_factory.mktemp("here")
    run_all(folder)
    return folder


def run_all(folder: Path) -> None:
    write_inputs(folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for kind in ("listed", "drawn"):
            for mode in MODES:
                assert run_cli(arguments(kind, mode)) == 0
    finally:
        os.chdir(before)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_as_written_down(here: Path, mode: str) -> None:
    records, figures = found_here(here, mode)
    want_records, want_figures = WRITTEN_DOWN[mode]
    # Decisions to the byte; figures to the rounding of a sum, whose order is numpy's business.
    assert records == want_records, "the journal's records differ: see the module's docstring"
    assert figures == pytest.approx(want_figures, rel=1e-12)


# --- other interpreters


def candidates() -> list[str]:
    named = os.environ.get("MINEDRAFT_OTHER_PYTHON")
    if named:
        return named.split(os.pathsep)
    names = [f"python3.{minor}" for minor in range(11, 16) if minor != sys.version_info.minor]
    return [path for path in map(shutil.which, names) if path is not None]


def shortcoming(python: str) -> str | None:
    """Why an interpreter can't be asked; None if it can."""
    script = f"import {', '.join(PACKAGES)}, sys; print(numpy.__version__, sys.version_info >= (3, 11))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2]
    version, new_enough = done.stdout.split()
    if new_enough != "True":
        return "it is older than 3.11"
    if version != np.__version__:
        return f"its numpy is {version}, this one's {np.__version__}: their distributions may differ"
    return None


@pytest.mark.slow
def test_other_pythons_write_the_same_bytes(here: Path, tmp_path: Path) -> None:
    reasons = {python: shortcoming(python) for python in candidates()}
    usable = [python for python, reason in reasons.items() if reason is None]
    if os.environ.get("MINEDRAFT_OTHER_PYTHON"):
        assert len(usable) == len(reasons), reasons
    if not usable:
        pytest.skip(
            f"no other Python with {', '.join(PACKAGES)}; MINEDRAFT_OTHER_PYTHON may name one; tried: {reasons}"
        )
    script = (
        "import json, sys\n"
        "from minedraft.cli import run_cli\n"
        "for line in json.load(sys.stdin):\n"
        "    assert run_cli(line) == 0\n"
    )
    lines = [arguments(kind, mode) for kind in ("listed", "drawn") for mode in MODES]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for number, python in enumerate(usable):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_inputs(folder)
        # The sources of this package, whatever is installed there; hashes of strings differ, as between any two runs.
        environment = {**variables, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(number + 1)}
        done = subprocess.run(
            [python, "-c", script],
            input=json.dumps(lines),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for path in sorted(here.glob("*-*.json*")):
            assert (folder / path.name).read_bytes() == path.read_bytes(), f"{python}: {path.name} differs"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        run_all(Path(name))
        for mode in MODES:
            print(f"    {mode!r}: {found_here(Path(name), mode)!r},")

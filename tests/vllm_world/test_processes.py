"""vLLM's own processes: the engine core and its workers each in one of their own, and a target on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from vllm_kit import make_requests, minedraft_options

FOLDER = Path(__file__).parent
MARK = "MINEDRAFT_TEST_RUN"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_greedy_text_with_processes(
    models: Path, reference: dict[str, list[int]], tmp_path: Path, num_ranks: int
) -> None:
    """Texts are stock vLLM's, drafts are accepted, and no process outlives the run."""
    options = minedraft_options(models / "noisy", mode="psd", drafter={"env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}})
    options |= {"model": str(models / "target"), "tensor_parallel_size": num_ranks}
    mark = uuid.uuid4().hex
    env = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, str(FOLDER / "greedy_run.py"), str(tmp_path / "out"), json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "out").read_text())
    assert found["texts"] == {job.request_id: reference[job.request_id] for job in make_requests()}
    assert found["num_accepted_tokens"] > 50
    end = time.monotonic() + 30.0
    while left := processes(mark):
        assert time.monotonic() < end, f"processes outlive the run: {left}"
        time.sleep(0.1)


def processes(mark: str) -> dict[int, str]:
    """Those that inherited our mark, zombies left out: command line by process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found

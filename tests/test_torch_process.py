"""Worker processes: each on its own core, gone with the parent, and what happens when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch_kit import VOCAB, config, make_requests, reference

from minedraft.backends.torch.backend import TorchBackend
from minedraft.backends.torch.errors import TargetLostError, TorchWorldError
from minedraft.backends.torch.messages import WorkerSpec
from minedraft.backends.torch.process import WorkerProcess, launch_process, parse_device
from minedraft.backends.torch.run import run_backend, run_torch
from minedraft.backends.torch.surgery import make_noisy_copy, make_tiny_llama
from minedraft.policy import load_policies
from minedraft.work import DrafterLost, DraftResult, Event, VerifyResult, WorkDone

PSD = {"mode": "fixed,mode=psd"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "target", seed=1, vocab_size=VOCAB)
    make_noisy_copy(folder / "target", folder / "near", 0.03)
    return folder


@pytest.fixture(scope="module")
def cores() -> tuple[str, str]:
    """Two cores, or one twice."""
    available = sorted(os.sched_getaffinity(0))
    return f"cpu:{available[0]}", f"cpu:{available[-1]}"


def test_device_names() -> None:
    core = min(os.sched_getaffinity(0))
    assert parse_device(f"cpu:{core}") == core
    assert [parse_device(name) for name in ("cpu", "cuda", "cuda:1")] == [None, None, None]
    for name in ("", "cpu:", "cpu:x", "cpu:-1", "gpu:0", "cuda:a"):
        with pytest.raises(TorchWorldError, match="use cpu, cpu:N, cuda or cuda:N"):
            parse_device(name)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Launcher:
    """Starts real processes and keeps them in sight."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerProcess] = {}

    def __call__(self, spec: WorkerSpec) -> WorkerProcess:
        self.workers[spec.role] = launch_process(spec)
        return self.workers[spec.role]


@pytest.mark.slow
def test_a_killed_drafter_costs_no_token(models: Path, cores: tuple[str, str]) -> None:
    """E6 with SIGKILL; on the way: pinned cores, one clock for all processes, nothing left behind."""
    requests = make_requests((3, 9, 17, 30, 5, 12))
    launcher, events, cpus = Launcher(), list[Event](), {}

    def kill(event: Event, backend: TorchBackend) -> None:
        events.append(event)
        num_drafts = sum(isinstance(e, WorkDone) and isinstance(e.result, DraftResult) for e in events)
        if num_drafts == 4 and not cpus:
            for role, worker in launcher.workers.items():
                status = Path(f"/proc/{worker.pid}/status").read_text()
                cpus[role] = status.partition("Cpus_allowed_list:")[2].split()[0]
            os.kill(launcher.workers["drafter"].pid, signal.SIGKILL)

    backend = TorchBackend(
        models / "target",
        models / "near",
        requests,
        target_device=cores[0],
        draft_device=cores[1],
        dtype="float64",
        launch=launcher,
    )
    with backend:
        result = run_backend(backend, config(), load_policies(PSD), on_event=kill)
    assert dict(result.token_ids) == {r.request_id: reference(models / "target", r) for r in requests}
    assert cpus == {"target": cores[0][4:], "drafter": cores[1][4:]}
    (lost,) = [event for event in events if isinstance(event, DrafterLost)]
    assert lost.message == "drafter process ended (killed by SIGKILL)"
    done = [event for event in events if isinstance(event, WorkDone)]
    assert all(0 <= event.started_s <= event.ended_s <= result.duration_s for event in done)
    assert sum(sum(e.result.num_accepted) for e in done if isinstance(e.result, VerifyResult))
    assert not any(is_alive(worker.pid) for worker in launcher.workers.values())


@pytest.mark.slow
def test_a_killed_target_is_a_clear_error(models: Path, cores: tuple[str, str]) -> None:
    launcher = Launcher()

    def kill(event: Event, backend: TorchBackend) -> None:
        os.kill(launcher.workers["target"].pid, signal.SIGKILL)

    backend = TorchBackend(models / "target", None, make_requests([5]), target_device=cores[0], launch=launcher)
    policies = load_policies({"mode": "fixed,mode=ar"})
    with backend, pytest.raises(TargetLostError, match=r"target process ended \(killed by SIGKILL\)"):
        run_backend(backend, config(), policies, on_event=kill)


ORPHANS = """
import os, sys
from minedraft.backends.torch.backend import TorchBackend
from minedraft.backends.torch.request import TorchRequest
from minedraft.backends.torch.process import launch_process

def launch(spec):
    worker = launch_process(spec)
    print(worker.pid, flush=True)
    return worker

if __name__ == "__main__":
    backend = TorchBackend(sys.argv[1], sys.argv[2], [TorchRequest("r", (5,), 3)],
                           target_device="cpu", draft_device="cpu", launch=launch)
    with backend:
        os._exit(7)
"""


@pytest.mark.slow
def test_workers_end_with_their_parent(models: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    command = [sys.executable, str(script), str(models / "target"), str(models / "near")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 7, ended.stderr
    pids = [int(line) for line in ended.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
def test_colocated_models_are_two_processes(models: Path, cores: tuple[str, str]) -> None:
    """Sequential speculation on one shared device, through the front door."""
    requests = make_requests((3, 9, 17))
    result = run_torch(
        models / "target",
        models / "near",
        requests,
        config(),
        load_policies({"mode": "fixed,mode=sd"}),
        target_device=cores[0],
        draft_device=cores[0],
        dtype="float64",
    )
    assert dict(result.token_ids) == {r.request_id: reference(models / "target", r) for r in requests}
    assert result.scheduler_config.model_len == 512

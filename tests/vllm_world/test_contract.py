"""What this package uses of vLLM beyond its documented interface, looked for on the installed version."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time

import pytest


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_interface_methods() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(Scheduler.schedule) == ["self", "throttle_prefills"]
    assert parameters(Scheduler.update_from_output) == ["self", "scheduler_output", "model_runner_output"]
    assert parameters(Scheduler.add_request) == ["self", "request"]
    assert parameters(Scheduler.finish_requests) == ["self", "request_ids", "finished_status"]
    assert parameters(Scheduler.update_draft_token_ids) == ["self", "draft_token_ids"]


def test_private_methods() -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    lookahead = ["self", "request", "num_computed_tokens", "num_new_tokens"]
    assert parameters(Scheduler._reserve_prefill_lookahead) == lookahead
    assert parameters(Scheduler._preempt_request)[:3] == ["self", "request", "timestamp"]
    assert parameters(Scheduler._update_request_as_session) == ["self", "session", "update"]
    assert parameters(Scheduler._handle_blocked_waiting_request) == ["self", "request"]
    assert parameters(KVCacheCoordinator.cache_blocks) == ["self", "request", "num_computed_tokens"]
    assert parameters(KVCacheManager.get_computed_blocks) == ["self", "request"]
    assert parameters(KVCacheManager.get_block_ids) == ["self", "request_id"]


def test_the_gate_compares_after_it_counts() -> None:
    """`schedule` adds one to current_step first and tests with `<`; else + 2 would not sit out exactly one call."""
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    counted = source.index("self.current_step += 1")
    compared = source.index("if self.current_step < request.next_decode_eligible_step:")
    assert counted < compared


def test_the_scheduler_sets_what_compat_reads() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from minedraft.backends.vllm.compat import SCHEDULER_ATTRIBUTES

    source = inspect.getsource(Scheduler.__init__)
    for name in SCHEDULER_ATTRIBUTES:
        assert f"self.{name}" in source, name


def test_waiting_room_has_the_whole_interface() -> None:
    from vllm.v1.core.sched.request_queue import RequestQueue

    from minedraft.backends.vllm.waiting_room import WaitingRoom

    assert RequestQueue.__abstractmethods__
    assert not WaitingRoom.__abstractmethods__
    WaitingRoom()


def test_versions() -> None:
    import vllm

    from minedraft.backends.vllm.compat import check_version
    from minedraft.backends.vllm.errors import VllmWorldError

    check_version(vllm.__version__, force=False)
    check_version("0.99.0", force=True)
    with pytest.raises(VllmWorldError, match="force_version"):
        check_version("0.99.0", force=False)


def test_cpu_sampling_is_still_needed() -> None:
    """When this fails, vLLM has been corrected: delete cpu_sampling.py."""
    script = (
        "from minedraft.backends.vllm import cpu_sampling as c\n"
        "from vllm.platforms import current_platform\n"
        "if current_platform.is_cpu():\n"
        "    current_platform.register_triton_kernel_overrides()\n"
        "    assert c.is_needed() and c.crashes_on_no_drafts()\n"
        "    c.correct()\n"
        "    assert not c.is_needed() and not c.crashes_on_no_drafts()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_drafter_dies_with_its_parent() -> None:
    """Also when the parent is killed, and also while the drafter still loads."""
    import os
    import signal

    script = (
        "import sys, time\n"
        "from minedraft.backends.vllm.channel import DrafterChannel\n"
        "from minedraft.backends.vllm.settings import DrafterSettings\n"
        "settings = DrafterSettings(engine={'model': '/nowhere'}, log='/dev/null')\n"
        "channel = DrafterChannel(settings, {'model': '/nowhere'})\n"
        "print(channel.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(1.0)
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20.0
    while is_alive(pid):
        assert time.monotonic() < end, "the drafter outlives its parent"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    from pathlib import Path

    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False

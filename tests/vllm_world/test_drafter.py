"""The drafter: its sessions over a real engine in this process, and its own process over the channel."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_SIZE, MAX_MODEL_LEN, Engine, make_requests, minedraft_options, plain_ids, renamed

NUM_BLOCKS = 12


def engine_arguments(model: Path, **options: Any) -> dict[str, Any]:
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": NUM_BLOCKS + 1,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "scheduler_cls": "minedraft.backends.vllm.draft_scheduler.DraftScheduler",
        "async_scheduling": False,
    }
    return arguments | options


class Oracle:
    """What the draft model itself says, by transformers and without any cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(folder).eval()

    def greedy(self, token_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        import torch

        ids, probs = list(token_ids), []
        with torch.inference_mode():
            for _ in range(count):
                row = self._model(torch.tensor([ids])).logits[0, -1].softmax(-1)
                assert float(row.sum()) == pytest.approx(1.0, abs=1e-5)
                ids.append(int(row.argmax()))
                probs.append(float(row.max()))
        return ids[len(token_ids) :], probs


@pytest.fixture(scope="module")
def oracle(models: Path) -> Oracle:
    return Oracle(models / "target")


@pytest.fixture(scope="module")
def core(models: Path) -> Iterator[Any]:
    from minedraft.backends.vllm.drafter import _load

    core = _load(engine_arguments(models / "target"))
    yield core
    core.shutdown()


class Sessions:
    """The target's side: committed tokens per request, jobs that continue them, and every draft checked."""

    def __init__(self, core: Any, oracle: Oracle) -> None:
        from minedraft.backends.vllm.drafter import DraftEngine

        self.core = core
        self.engine = DraftEngine(core)
        self.oracle = oracle
        self.committed: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}  # committed tokens that the drafter has been told of
        self.freed: list[tuple[str, int]] = []

    @property
    def num_free(self) -> int:
        from minedraft.backends.vllm import compat

        return compat.num_free_blocks(self.core.scheduler)

    @property
    def with_kv(self) -> list[str]:
        return [key[0] for key, session in self.engine._sessions.items() if session.request_id]

    def run(self, drafts: dict[str, int]) -> dict[str, list[int]]:
        """Draft so many tokens for each of these, and see that they are the model's own, with its probabilities."""
        from minedraft.backends.vllm.messages import DraftEntry, DraftJob

        entries = []
        for name, count in drafts.items():
            start = self.known.get(name, 0)
            entries.append(DraftEntry(name, 0, start, self.committed[name][start:], count))
            self.known[name] = len(self.committed[name])
        reply = self.engine.run(DraftJob.of(1, self.freed, entries, True))
        self.freed = []
        assert reply.probs is not None
        for (name, count), token_ids, probs in zip(drafts.items(), reply.token_ids, reply.probs, strict=True):
            expected, expected_probs = self.oracle.greedy(self.committed[name], count)
            assert token_ids == expected, name
            assert probs == pytest.approx(expected_probs, abs=2e-3)
        return dict(zip(drafts, reply.token_ids, strict=True))

    def free(self, name: str) -> None:
        del self.committed[name], self.known[name]
        self.freed.append((name, 0))


@pytest.fixture
def sessions(core: Any, oracle: Oracle) -> Iterator[Sessions]:
    """Starts and ends with a whole pool."""
    sessions = Sessions(core, oracle)
    assert sessions.num_free == NUM_BLOCKS
    yield sessions
    sessions.engine.reset()
    assert sessions.num_free == NUM_BLOCKS
    assert not core.scheduler.requests
    assert not core.scheduler.rewinds


def make_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 128) for _ in range(count)]


def test_a_model_that_can_take_nothing_back_is_refused(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts would be worthless from the second round on, and nobody would be told."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from minedraft.backends.vllm import compat
    from minedraft.backends.vllm.draft_scheduler import DraftScheduler
    from minedraft.backends.vllm.errors import VllmWorldError

    scheduler = core.scheduler
    arguments = scheduler.vllm_config, scheduler.kv_cache_config, scheduler.structured_output_manager, BLOCK_SIZE
    DraftScheduler(*arguments)
    monkeypatch.setattr(compat, "MambaSpec", FullAttentionSpec)  # a tiny Mamba needs a GPU
    with pytest.raises(VllmWorldError, match="Mamba"):
        DraftScheduler(*arguments)


def test_drafts_and_probabilities_are_the_models_own(sessions: Sessions) -> None:
    """Prompts from one token to more than a step holds, and drafts of every length, none included."""
    for i, length in enumerate([1, 31, 32, 33, 70, 5]):
        sessions.committed[f"r{i}"] = make_tokens(i, length)
    sessions.run({"r0": 3, "r1": 1, "r2": 0, "r3": 5, "r4": 2, "r5": 4})


def test_rewinds_to_what_was_committed(sessions: Sessions) -> None:
    """Rounds in which none, some or all drafts are accepted, at every offset within a block; requests come and go."""
    rng = random.Random(7)
    num_started = 0
    for _ in range(60):
        while len(sessions.committed) < 3:
            num_started += 1
            sessions.committed[f"s{num_started}"] = make_tokens(num_started, rng.randrange(1, 40))
        names = [name for name in sessions.committed if rng.random() < 0.8] or [*sessions.committed]
        drafts = sessions.run({name: rng.randrange(5) for name in names})
        for name, token_ids in drafts.items():
            kept = rng.randrange(len(token_ids) + 1)
            sessions.committed[name] += [*token_ids[:kept], rng.randrange(3, 128)]
            # What was accepted is already there: the drafter is told of the rest only.
            sessions.known[name] += kept
            if len(sessions.committed[name]) > 90:
                sessions.free(name)
    assert num_started > 4


def test_the_longest_parked_session_makes_room(sessions: Sessions) -> None:
    """Six sessions of three blocks in a pool of twelve: evicted ones are computed anew and draft the same."""
    for i in range(6):
        sessions.committed[f"e{i}"] = make_tokens(20 + i, 66)
        sessions.run({f"e{i}": 2})
    assert sessions.with_kv == ["e2", "e3", "e4", "e5"]
    sessions.run({"e2": 1})  # used again, so it is not the next one to go
    sessions.committed["e0"] += [9]
    sessions.run({"e0": 3})
    assert "e0" in sessions.with_kv
    assert "e2" in sessions.with_kv
    assert "e3" not in sessions.with_kv
    for name in sessions.committed:
        sessions.committed[name] += [11, 12]
        sessions.run({name: 2})


def test_freed_sessions_give_their_blocks_back(sessions: Sessions) -> None:
    for i in range(3):
        sessions.committed[f"f{i}"] = make_tokens(30 + i, 40)
    sessions.run(dict.fromkeys(sessions.committed, 2))
    held = NUM_BLOCKS - sessions.num_free
    sessions.free("f0")
    sessions.freed.append(("nobody", 3))
    sessions.run({"f1": 1})
    assert NUM_BLOCKS - sessions.num_free == held * 2 // 3


def test_only_committed_tokens_are_cached(sessions: Sessions) -> None:
    """A block that drafts have filled is not found by others, though its content is what they want."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    def hit(token_ids: list[int]) -> int:
        params = SamplingParams(max_tokens=1)
        request = Request("probe", token_ids, params, None, block_hasher=sessions.core.request_block_hasher)
        return int(sessions.core.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    prompt = make_tokens(40, 60)
    sessions.committed["c"] = prompt
    drafts = sessions.run({"c": 8})["c"]
    assert hit([*prompt, *drafts]) == BLOCK_SIZE
    # The target takes three of them and goes on otherwise: another session with that text drafts what it must, and
    # one with the rejected text too.
    sessions.committed["c"] = [*prompt, *drafts[:3], 5, 6, 7]
    sessions.known["c"] = len(prompt) + 3
    sessions.run({"c": 8})
    assert hit(sessions.committed["c"]) == 2 * BLOCK_SIZE
    sessions.committed["twin"] = [*sessions.committed["c"], 8]
    sessions.committed["other"] = [*prompt, *drafts, 8]
    sessions.run({"twin": 4, "c": 4, "other": 4})


def test_out_of_step_and_back(sessions: Sessions) -> None:
    """A job that can't be done says so; after a reset the pool is whole and the same job from the start works."""
    from minedraft.backends.vllm.drafter import OutOfStepError

    sessions.committed["o"] = make_tokens(50, 40)
    sessions.run({"o": 2})
    sessions.known["o"] = 60  # never told of so many
    with pytest.raises(OutOfStepError, match="builds on 60"):
        sessions.run({"o": 2})
    sessions.engine.reset()
    assert sessions.num_free == NUM_BLOCKS
    sessions.known.clear()
    sessions.run({"o": 2})
    for i in range(3):
        sessions.committed[f"big{i}"] = make_tokens(60 + i, 200)
    with pytest.raises(OutOfStepError, match="too small for this job"):
        sessions.run({f"big{i}": 2 for i in range(3)})
    sessions.engine.reset()
    assert sessions.num_free == NUM_BLOCKS
    sessions.known.clear()
    sessions.run({"o": 2, "big0": 2})


# --- The process.


def settings(**options: Any) -> Any:
    from minedraft.backends.vllm.settings import DrafterSettings

    return DrafterSettings(**({"engine": {"model": "m"}, "log": "/dev/null", "restart_backoff_s": 0.01} | options))


def await_news(channel: Any, kind: str, timeout_s: float = 120.0) -> Any:
    """The next news of this kind."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for news in channel.poll():
            if type(news).__name__ == kind:
                return news
        channel.wait(0.1)
    raise AssertionError(f"no {kind} in {timeout_s} s")


def await_true(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it doesn't happen"
        time.sleep(0.02)


def job(work_id: int, entries: list[tuple[str, int, list[int], int]]) -> Any:
    from minedraft.backends.vllm.messages import DraftEntry, DraftJob

    return DraftJob.of(work_id, [], [DraftEntry(name, 0, *rest) for name, *rest in entries], False)


def group_members(group: int) -> list[int]:
    """Processes of a process group that are not yet dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[2]) == group:
            found.append(int(path.parent.name))
    return found


def test_jobs_failures_and_stops_of_the_process(models: Path, oracle: Oracle) -> None:
    """One real drafter: a job; one that is out of step; stopped while it owes nothing; killed; closed."""
    from minedraft.backends.vllm.channel import DrafterChannel

    prompt = make_tokens(70, 40)
    expected = oracle.greedy(prompt, 3)[0]
    channel = DrafterChannel(settings(hang_timeout_s=5.0, deadline_s=60.0), engine_arguments(models / "target"))
    try:
        hello = channel.wait_ready()
        assert hello.num_blocks == hello.num_free_blocks == NUM_BLOCKS
        channel.submit(job(1, [("r", 0, prompt, 3)]))
        assert await_news(channel, "Drafted").token_ids == [expected]

        pid = channel.pid
        channel.submit(job(2, [("r", 55, [1], 3)]))
        assert "builds on 55" in await_news(channel, "Down").message
        assert await_news(channel, "Up").hello == hello  # whole again, or it would have been ended
        channel.submit(job(3, [("r", 0, prompt, 3)]))
        assert await_news(channel, "Drafted").token_ids == [expected]
        assert channel.pid == pid

        os.kill(pid, signal.SIGSTOP)
        await_true(lambda: channel.pid not in (pid, None))  # nobody polls: the target may have nothing to do
        assert not group_members(pid)
        assert "silent" in await_news(channel, "Down").message
        await_news(channel, "Up")
        channel.submit(job(4, [("r", 0, prompt, 3)]))
        assert await_news(channel, "Drafted").token_ids == [expected]
        pid = channel.pid
    finally:
        channel.close()
    assert channel.pid is None
    assert not group_members(pid)


TP_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # by itself vLLM wants a NUMA node for each rank


def test_tensor_parallel_drafter(models: Path, oracle: Oracle) -> None:
    """Two ranks draft the same, and a worker that dies takes the drafter along, even while it owes nothing."""
    from minedraft.backends.vllm.channel import DrafterChannel

    prompts = [make_tokens(80, 40), make_tokens(81, 7)]
    expected = [oracle.greedy(prompt, 3)[0] for prompt in prompts]
    arguments = engine_arguments(models / "target", tensor_parallel_size=2)
    channel = DrafterChannel(settings(deadline_s=60.0, env=TP_ENV, max_restarts=0), arguments)
    try:
        channel.wait_ready()
        channel.submit(job(1, [("a", 0, prompts[0], 3), ("b", 0, prompts[1], 3)]))
        assert await_news(channel, "Drafted").token_ids == expected
        pid = channel.pid
        os.kill(find_worker(group_members(pid)), signal.SIGKILL)
        await_true(lambda: channel.pid is None)
        await_news(channel, "Down")
        assert not group_members(pid)
    finally:
        channel.close()


def find_worker(pids: list[int]) -> int:
    """One of vLLM's workers, by the title that it gives itself."""
    for pid in pids:
        if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(pids)


def test_no_orphans_of_a_killed_target(models: Path) -> None:
    """SIGKILL to the target's process: the drafter and the workers of its tensor parallelism end too."""
    script = (
        "import sys, time\n"
        "from test_drafter import TP_ENV, engine_arguments, settings\n"
        "from pathlib import Path\n"
        "from minedraft.backends.vllm.channel import DrafterChannel\n"
        "arguments = engine_arguments(Path(sys.argv[1]), tensor_parallel_size=2)\n"
        "channel = DrafterChannel(settings(env=TP_ENV), arguments)\n"
        "channel.wait_ready()\n"
        "print(channel.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(models / "target")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert len(group_members(pid)) >= 3
        parent.send_signal(signal.SIGKILL)
    await_true(lambda: not group_members(pid))


def test_a_drafter_that_can_not_start(tmp_path: Path) -> None:
    from minedraft.backends.vllm.channel import DrafterChannel
    from minedraft.backends.vllm.errors import VllmWorldError

    channel = DrafterChannel(settings(), engine_arguments(tmp_path / "nowhere"))
    with pytest.raises(VllmWorldError, match="the drafter can't start"):
        channel.wait_ready()
    assert channel.pid is None


def test_a_drafter_that_is_not_required(models: Path, reference: dict[str, list[int]], tmp_path: Path) -> None:
    """Its model isn't there yet: the engine serves without, and drafts once it is."""
    engine = {"model": str(tmp_path / "late"), "num_gpu_blocks_override": 40}
    drafter = {"engine": engine, "require_drafter": False, "max_restarts": 0, "restart_backoff_s": 0.01}
    options = minedraft_options(tmp_path / "late", mode="psd", drafter=drafter)
    with Engine(models / "target", **options) as target:
        state = target.conductor.core.state
        texts = plain_ids(target.run(renamed(make_requests(), "a")), "a")
        assert texts == {request_id: reference[request_id] for request_id in texts}
        assert state.num_draft_tokens == 0
        assert not state.drafter_up
        shutil.copytree(models / "target", tmp_path / "late")
        target.await_drafts()
        texts = plain_ids(target.run(renamed(make_requests(), "b")), "b")
        assert texts == {request_id: reference[request_id] for request_id in texts}
        assert state.num_accepted_tokens > 0.95 * state.num_draft_tokens > 0
        target.check_rest()

"""Host cost of minedraft in vLLM: `schedule()` + `update_from_output()` next to stock vLLM's, without the model's time.

Four engines after one another in one run, each a real vLLM engine on the CPU with a one-layer model, each request with
k drafts of which almost none is accepted:

* stock: vLLM's own scheduler; a proposer of ours hands it k constant tokens per request;
* sd: minedraft, one batch of 64;
* psd: minedraft, two batches of 32, of which every step verifies one: as many running requests as above;
* psd-128: two batches of 64, as many requests per step as above.

Two ways to leave the model out:

* with the model (default): the engine runs as ever. CPU time of the scheduler's thread is measured: waiting doesn't
  count. Between the two calls the thread waits as long as a large model would take (`--model-ms`), in which the drafts
  arrive; then the small model that does run uses the caches. Target and drafter are pinned to a core each. The thread
  waits as vLLM has it wait for GPUs, which is by spinning (`torch.Event.synchronize()`; with several ranks
  `sched_yield()` in a loop), or sleeps (`--wait sleep`), after which a shared machine is slower at everything.
* `--no-model`: the two calls are made in a loop, with made-up outputs, and a drafter that answers at once; messages are
  still encoded and written to a socket. With `--model-ms` there is a wait between them here too: on a machine that is
  shared with others, it alone makes both schedulers slower.

What minedraft adds is its two calls less vLLM's own part of them, in one process, so that a change of the machine's
pace between two engines doesn't count. It is given beside stock's two calls with 64 requests, and beside vLLM's own
part. A proposer's drafts reach stock's scheduler by a third call, `update_draft_token_ids()`; minedraft takes them in
within the two.

Reading the clocks is a part of what minedraft seems to add; what they add to stock tells how large.

Of the steps, the fastest tenth counts, which other load on the machine disturbs least. Needs vLLM.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

BLOCK_SIZE = 32
MODES = {"stock": ("stock", 64, 64), "sd": ("sd", 64, 64), "psd": ("psd", 32, 64), "psd-128": ("psd", 64, 128)}
"""By name: whose scheduler, or in which mode; requests in every step; running requests."""
STEPS: list[tuple[float, float, float, float, int]] = []
"""Per step of the engine that runs: CPU seconds in schedule(), in update_from_output(), those of both that were vLLM's
own, those in update_draft_token_ids() before, and the number of requests in the step."""


class ConstantProposer:
    """Proposes the same k tokens to everybody, as a stock proposer would: after the step, through the worker."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[1] * self.num_speculative_tokens if ids else [] for ids in sampled_token_ids]


def spin(seconds: float) -> None:
    """As vLLM waits for the workers of a GPU."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        os.sched_yield()


WAITS = {"spin": spin, "sleep": time.sleep}


class Wait(NamedTuple):
    """How the model's time is spent."""

    seconds: float
    how: str

    def __call__(self) -> None:
        WAITS[self.how](self.seconds)


def timed(wait: Wait | None, *bases: type[Any]) -> type[Any]:
    """vLLM's scheduler, or one derived from it, with a clock around the two calls and around vLLM's part of them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    class Inner(Scheduler):  # type: ignore[misc]
        inner_s = 0.0

        def schedule(self, throttle_prefills: bool = False) -> Any:
            started_s = time.thread_time()
            output = super().schedule(throttle_prefills)
            self.inner_s += time.thread_time() - started_s
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            started_s = time.thread_time()
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.inner_s += time.thread_time() - started_s
            return outputs

    class Timed(*bases, Inner):  # type: ignore[misc]
        schedule_s = drafts_s = 0.0

        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            started_s = time.thread_time()
            super().update_draft_token_ids(draft_token_ids)
            self.drafts_s += time.thread_time() - started_s

        def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
            if scheduler_output.num_scheduled_tokens and wait is not None:  # the model is about to run
                wait()
            return super().get_grammar_bitmask(scheduler_output)

        def schedule(self, throttle_prefills: bool = False) -> Any:
            started_s = time.thread_time()
            output = super().schedule(throttle_prefills)
            self.schedule_s += time.thread_time() - started_s
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            started_s = time.thread_time()
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            spent_s = time.thread_time() - started_s
            if scheduler_output.num_scheduled_tokens:
                num_rows = len(scheduler_output.num_scheduled_tokens)
                STEPS.append((self.schedule_s, spent_s, self.inner_s, self.drafts_s, num_rows))
                self.schedule_s = self.inner_s = self.drafts_s = 0.0
            return outputs

    return Timed


class InstantDrafter:
    """In the place of the channel: every job is encoded and written to a socket as ever, and answered at once."""

    def __init__(self, channel: Any) -> None:
        self.pid = channel.pid
        self._channel = channel
        self._answers: deque[Any] = deque()
        self._ours, self._theirs = socket.socketpair()
        self._drafts: list[list[int]] = []

    def submit(self, job: Any) -> None:
        from minedraft.backends.vllm.messages import Drafted, pack

        self._ours.send(pack(job), socket.MSG_DONTWAIT)
        now_s = time.monotonic()
        drafts = self._drafts if len(job.num_draft) == len(self._drafts) else []
        if not drafts or 0 in job.num_draft:
            drafts = [[1] * num for num in job.num_draft]
        self._answers.append(Drafted(job.work_id, drafts.copy(), None, now_s, now_s))

    def rest(self, num_rows: int, k: int) -> None:
        """Between two steps: read what was written, and have the next drafts ready, as the reading thread would."""
        if self._answers:
            self._theirs.recv(1 << 20)
        self._drafts = [[1] * k for _ in range(num_rows)]

    def poll(self) -> list[Any]:
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("nobody has to wait for this drafter")

    def drop(self, freed: Any) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        self._channel.close()


def engine(models: Path, mode: str, num_running: int, k: int, wait: Wait | None, cpus: list[int]) -> Any:
    """A vLLM engine with stock scheduler, or in a mode of minedraft."""
    from vllm import LLM

    from minedraft.backends.vllm.scheduler import PSDScheduler

    proposer = "bench_vllm_host.ConstantProposer"
    extra: dict[str, Any] = {"scheduler_cls": timed(wait)}
    if mode != "stock":
        proposer = "minedraft.backends.vllm.null_proposer.NullProposer"
        drafter = {"engine": {"model": str(models / "other")}, "deadline_s": 60.0, "cpus": cpus}
        extra = {
            "scheduler_cls": timed(wait, PSDScheduler),
            "additional_config": {"minedraft": {"mode": mode, "drafter": drafter}},
        }
    speculative = {"method": "custom_class", "model": proposer, "num_speculative_tokens": k}
    return LLM(
        str(models / "target"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=num_running,
        max_num_batched_tokens=2048,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_running * 16 + 1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        **extra,
    )


def prompt(i: int) -> list[int]:
    """Of all lengths modulo a block, so that in every step as many requests reach a new one."""
    return [3 + i % 100] * (1 + i % BLOCK_SIZE)


def run_model(llm: Any, num_running: int, num_steps: int) -> None:
    """The engine, as ever."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt(i)} for i in range(num_running)]
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)


def run_made_up(llm: Any, num_rows: int, num_running: int, num_steps: int, k: int, wait: Wait | None) -> None:
    """The scheduler's two calls in a loop; the model would have accepted nothing."""
    from vllm import SamplingParams
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    drafter = None
    if hasattr(scheduler, "conductor"):
        drafter = scheduler.conductor._channel = InstantDrafter(scheduler.conductor._channel)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    for i in range(num_running):
        llm.llm_engine.add_request(f"request-{i}", {"prompt_token_ids": prompt(i)}, params)
    gc.collect()
    gc.freeze()
    while scheduler.requests:
        if drafter is not None:
            drafter.rest(num_rows, k)
        output = scheduler.schedule()
        if wait is not None:
            wait()
        ids = list(output.num_scheduled_tokens)
        index = {request_id: i for i, request_id in enumerate(ids)}
        made_up = ModelRunnerOutput(ids, index, [[7] for _ in ids])
        scheduler.update_from_output(output, made_up)
        if drafter is None:
            scheduler.update_draft_token_ids(DraftTokenIds(ids, [[1] * k for _ in ids]))


def measure(
    models: Path, name: str, k: int, num_steps: int, wait: Wait | None, cpus: list[int], no_model: bool
) -> tuple[float, float, float, float]:
    """CPU seconds per step: the first four of `STEPS`."""
    mode, num_rows, num_running = MODES[name]
    llm = engine(models, mode, num_running, k, None if no_model else wait, cpus)
    STEPS.clear()
    if no_model:
        run_made_up(llm, num_rows, num_running, num_steps, k, wait)
    else:
        run_model(llm, num_running, num_steps)
    llm.llm_engine.engine_core.shutdown()
    full = [times for *times, rows in STEPS[10:] if rows == num_rows]
    assert len(full) > num_steps / 3, f"{name}: only {len(full)} of {len(STEPS)} steps had {num_rows} requests"
    full.sort(key=lambda times: times[0] + times[1])
    fastest = full[: max(10, len(full) // 10)]
    schedule_s, update_s, inner_s, drafts_s = (sum(column) / len(fastest) for column in zip(*fastest, strict=True))
    return schedule_s, update_s, inner_s, drafts_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="tokens per request")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--best-of", type=int, default=1, help="take the least of several rounds over all engines")
    parser.add_argument(
        "--model-ms", type=float, help="wait in the place of a large model's step; 40, or with --no-model 0"
    )
    parser.add_argument("--wait", choices=WAITS, default="spin", help="how")
    parser.add_argument("--no-model", action="store_true", help="made-up outputs, in a loop")
    parser.add_argument("--modes", default=",".join(MODES))
    arguments = parser.parse_args()

    import torch

    from minedraft import BUILD
    from minedraft.backends.torch.surgery import make_tiny_llama

    cores = sorted(os.sched_getaffinity(0))
    drafter_cores = cores[1:2]
    os.sched_setaffinity(0, cores[:1])
    model_ms = arguments.model_ms if arguments.model_ms is not None else 0.0 if arguments.no_model else 40.0
    wait = Wait(model_ms / 1e3, arguments.wait) if model_ms else None
    modes = arguments.modes.split(",")
    found: dict[str, list[tuple[float, float, float, float]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        shape = {"vocab_size": 128, "hidden_size": 64, "num_heads": 1, "num_kv_heads": 1, "dtype": torch.float32}
        make_tiny_llama(models / "target", seed=1, num_layers=1, **shape)
        make_tiny_llama(models / "other", seed=2, num_layers=1, **shape)
        for _ in range(arguments.best_of):
            for mode in modes:
                found[mode].append(
                    measure(models, mode, arguments.k, arguments.steps, wait, drafter_cores, arguments.no_model)
                )
    core = "compiled" if BUILD.active else "plain Python"
    print(f"k = {arguments.k}, core {core}; CPU milliseconds per step, fastest tenth of the steps")
    least = {mode: min(runs, key=lambda run: run[0] + run[1]) for mode, runs in found.items()}
    stock_s = sum(least[modes[0]][:2])
    for mode, (schedule_s, update_s, inner_s, drafts_s) in least.items():
        added_s = schedule_s + update_s - inner_s
        print(
            f"{mode:8} {MODES[mode][1]:3} of {MODES[mode][2]:3}  schedule {schedule_s * 1e3:6.3f}  "
            f"update {update_s * 1e3:6.3f}  third call {drafts_s * 1e3:6.3f}  added {added_s * 1e3:6.3f}: "
            f"{added_s / stock_s:6.1%} of {modes[0]}'s two calls, {added_s / inner_s:6.1%} of vLLM's own part"
        )


if __name__ == "__main__":
    main()

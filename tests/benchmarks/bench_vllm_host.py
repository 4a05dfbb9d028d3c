"""Host cost of minedraft in vLLM: `schedule()` + `update_from_output()` next to stock vLLM's, without the model's time.

Three engines after one another in one run, each a real vLLM engine on the CPU with a one-layer model and 64 requests in
every step, each request with k drafts of which almost none is accepted:

* stock: vLLM's own scheduler; a proposer of ours hands it k constant tokens per request;
* sd: minedraft, one batch of 64;
* psd: minedraft, two batches of 64, of which every step verifies one.

CPU time of the scheduler's thread is measured: waiting doesn't count. Between the two calls the thread sleeps as long
as a large model would take (`--model-ms`), in which the drafts arrive. Of the steps, the fastest tenth counts, which
other load on the machine disturbs least; the steps of the three engines are the same work for vLLM. Needs vLLM.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

NUM_ROWS = 64
STEPS: list[tuple[float, float, float, int]] = []
"""Per step of the engine that runs: CPU seconds in schedule(), in update_from_output(), those of both that were vLLM's
own, and the number of requests in the step."""


class ConstantProposer:
    """Proposes the same k tokens to everybody, as a stock proposer would: after the step, through the worker."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[1] * self.num_speculative_tokens if ids else [] for ids in sampled_token_ids]


def timed(model_s: float, *bases: type[Any]) -> type[Any]:
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
        schedule_s = 0.0

        def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
            if scheduler_output.num_scheduled_tokens:  # the model is about to run
                time.sleep(model_s)
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
                STEPS.append((self.schedule_s, spent_s, self.inner_s, len(scheduler_output.num_scheduled_tokens)))
                self.schedule_s = self.inner_s = 0.0
            return outputs

    return Timed


def measure(models: Path, mode: str, k: int, num_steps: int, model_s: float) -> tuple[float, float, float]:
    """CPU seconds of `schedule`, of `update_from_output`, and of vLLM's part of both, per step of NUM_ROWS requests."""
    from vllm import LLM, SamplingParams

    from minedraft.backends.vllm.scheduler import PSDScheduler

    num_running = NUM_ROWS * (2 if mode == "psd" else 1)
    proposer = "bench_vllm_host.ConstantProposer"
    extra: dict[str, Any] = {"scheduler_cls": timed(model_s)}
    if mode != "stock":
        proposer = "minedraft.backends.vllm.null_proposer.NullProposer"
        drafter = {"engine": {"model": str(models / "other")}, "deadline_s": 60.0}
        extra = {
            "scheduler_cls": timed(model_s, PSDScheduler),
            "additional_config": {"minedraft": {"mode": mode, "drafter": drafter}},
        }
    speculative = {"method": "custom_class", "model": proposer, "num_speculative_tokens": k}
    llm = LLM(
        str(models / "target"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=num_running,
        max_num_batched_tokens=2048,
        block_size=32,
        num_gpu_blocks_override=num_running * 16 + 1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        **extra,
    )
    STEPS.clear()
    prompts = [{"prompt_token_ids": [3 + i % 100, 5, 7]} for i in range(num_running)]
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    full = [times for *times, rows in STEPS[10:] if rows == NUM_ROWS]
    assert len(full) > num_steps / 3, f"{mode}: only {len(full)} of {len(STEPS)} steps had {NUM_ROWS} requests"
    full.sort(key=lambda times: times[0] + times[1])
    fastest = full[: max(10, len(full) // 10)]
    schedule_s, update_s, inner_s = (sum(column) / len(fastest) for column in zip(*fastest, strict=True))
    return schedule_s, update_s, inner_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="tokens per request")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--best-of", type=int, default=1, help="take the least of several rounds over all engines")
    parser.add_argument("--model-ms", type=float, default=40.0, help="sleep in the place of a large model's step")
    parser.add_argument("--modes", default="stock,sd,psd")
    arguments = parser.parse_args()

    import torch

    from minedraft.backends.torch.surgery import make_tiny_llama

    modes = arguments.modes.split(",")
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        shape = {"vocab_size": 128, "hidden_size": 64, "num_heads": 1, "num_kv_heads": 1, "dtype": torch.float32}
        make_tiny_llama(models / "target", seed=1, num_layers=1, **shape)
        make_tiny_llama(models / "other", seed=2, num_layers=1, **shape)
        for _ in range(arguments.best_of):
            for mode in modes:
                found[mode].append(measure(models, mode, arguments.k, arguments.steps, arguments.model_ms / 1e3))
    print(f"{NUM_ROWS} requests per step, k = {arguments.k}; CPU milliseconds per step, fastest tenth")
    least = {mode: min(runs, key=lambda run: run[0] + run[1]) for mode, runs in found.items()}
    base = sum(least[modes[0]][:2])
    for mode, (schedule_s, update_s, inner_s) in least.items():
        total_s = schedule_s + update_s
        print(
            f"{mode:6} schedule {schedule_s * 1e3:6.3f}  update {update_s * 1e3:6.3f}  both {total_s * 1e3:6.3f}  "
            f"{total_s / base - 1:+7.1%} on {modes[0]}, {total_s / inner_s - 1:+7.1%} on vLLM's part in the same run"
        )


if __name__ == "__main__":
    main()

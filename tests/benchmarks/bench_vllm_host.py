"""Host cost of minedraft in vLLM: `schedule()` + `update_from_output()` next to stock vLLM's, without the model's time.

Three engines after one another in one run, each a real vLLM engine on the CPU with a one-layer model and 64 requests in
every step, each request with k drafts of which almost none is accepted:

* stock: vLLM's own scheduler; a proposer of ours hands it k constant tokens per request;
* sd: minedraft, one batch of 64;
* psd: minedraft, two batches of 64, of which every step verifies one.

CPU time of the scheduler's thread is measured, so waiting for the drafter doesn't count, and other load on the machine
little. The median step is compared; the steps of the three engines are the same work for vLLM. Needs vLLM.
"""

from __future__ import annotations

import argparse
import os
import statistics
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
STEPS: list[tuple[float, float, int]] = []
"""Per step of the engine that runs: seconds in schedule() and update_from_output(), and requests in it."""


class ConstantProposer:
    """Proposes the same k tokens to everybody, as a stock proposer would: after the step, through the worker."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[1] * self.num_speculative_tokens if ids else [] for ids in sampled_token_ids]


def timed(base: type[Any]) -> type[Any]:
    """The scheduler with a clock around the two calls."""

    class Timed(base):  # type: ignore[misc]
        schedule_s = 0.0

        def schedule(self, throttle_prefills: bool = False) -> Any:
            started_s = time.thread_time()
            output = super().schedule(throttle_prefills)
            self.schedule_s += time.thread_time() - started_s
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            started_s = time.thread_time()
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if scheduler_output.num_scheduled_tokens:
                spent_s = time.thread_time() - started_s
                STEPS.append((self.schedule_s, spent_s, len(scheduler_output.num_scheduled_tokens)))
                self.schedule_s = 0.0
            return outputs

    return Timed


def measure(models: Path, mode: str, k: int, num_steps: int) -> tuple[float, float]:
    """Median seconds of `schedule` and of `update_from_output` over steps of NUM_ROWS requests."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    from minedraft.backends.vllm.scheduler import PSDScheduler

    num_running = NUM_ROWS * (2 if mode == "psd" else 1)
    proposer = "bench_vllm_host.ConstantProposer"
    extra: dict[str, Any] = {"scheduler_cls": timed(Scheduler)}
    if mode != "stock":
        proposer = "minedraft.backends.vllm.null_proposer.NullProposer"
        drafter = {"engine": {"model": str(models / "other")}, "deadline_s": 60.0}
        extra = {
            "scheduler_cls": timed(PSDScheduler),
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
    full = [(schedule_s, update_s) for schedule_s, update_s, rows in STEPS[10:] if rows == NUM_ROWS]
    assert len(full) > num_steps / 3, f"{mode}: only {len(full)} of {len(STEPS)} steps had {NUM_ROWS} requests"
    return statistics.median(s for s, _ in full), statistics.median(u for _, u in full)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="tokens per request")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--best-of", type=int, default=1, help="take the least of several rounds over all engines")
    parser.add_argument("--modes", default="stock,sd,psd")
    arguments = parser.parse_args()

    import torch

    from minedraft.backends.torch.surgery import make_tiny_llama

    modes = arguments.modes.split(",")
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        shape = {"vocab_size": 128, "hidden_size": 64, "num_heads": 1, "num_kv_heads": 1, "dtype": torch.float32}
        make_tiny_llama(models / "target", seed=1, num_layers=1, **shape)
        make_tiny_llama(models / "other", seed=2, num_layers=1, **shape)
        for _ in range(arguments.best_of):
            for mode in modes:
                found[mode].append(measure(models, mode, arguments.k, arguments.steps))
    print(f"{NUM_ROWS} requests per step, k = {arguments.k}; milliseconds per step, median")
    base = min(sum(pair) for pair in found[modes[0]])
    for mode in modes:
        schedule_s, update_s = min(found[mode], key=sum)
        total_s = schedule_s + update_s
        print(
            f"{mode:6} schedule {schedule_s * 1e3:6.3f}  update {update_s * 1e3:6.3f}  "
            f"both {total_s * 1e3:6.3f}  {total_s / base - 1:+7.1%}"
        )


if __name__ == "__main__":
    main()

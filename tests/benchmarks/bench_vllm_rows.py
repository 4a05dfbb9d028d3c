"""What alternating sub-batches cost in a worker of vLLM's V1 model runner, where rows that are left out come back.

The runner keeps the requests of its last step as rows of a persistent batch, and copies a request's whole text and
block table into a row when it comes (back). In plain serving that happens once per request, in psd at every
verification.

vLLM's own `InputBatch` is driven here, without a model: m requests go and others of the same lengths come, as in a step
of psd. Their texts are lists, as stock vLLM has them; or the prompts are arrays (`compat.pack_prompts`); or what was
generated is an array too, up to the last tokens (`retelling.py`). Medians. Needs vLLM.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")

BLOCK_SIZE = 16
MIN_TOKENS = 512  # of `retelling.py`; the longest list there is
LENGTHS = [(512, 0), (4096, 0), (512, 512), (512, 2048), (512, 8192)]
"""Tokens of the prompt and of the output so far."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="requests per verification, m (default: 32)")
    parser.add_argument("--steps", type=int, default=50, help="steps per measurement (default: 50)")
    args = parser.parse_args()
    max_len = max(map(sum, LENGTHS))
    print(f"{args.batch_size} requests leave and {args.batch_size} come, ms per step")
    print(f"{'prompt':>8}{'output':>8}{'lists':>12}{'prompt packed':>16}{'all packed':>12}")
    for prompt_len, output_len in LENGTHS:
        times = [
            1e3
            * measure(make_rows(args.batch_size, prompt_len + retold, output_len - retold, packed), max_len, args.steps)
            for packed, retold in ((False, 0), (True, 0), (True, output_len - min(output_len, MIN_TOKENS)))
        ]
        print(f"{prompt_len:>8}{output_len:>8}{times[0]:>12.3f}{times[1]:>16.3f}{times[2]:>12.3f}")


def make_rows(count: int, prompt_len: int, output_len: int, packed: bool) -> list[list[Any]]:
    """Two sub-batches, as the runner keeps them."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    def make(name: str) -> CachedRequestState:
        prompt: Any = list(range(1000, 1000 + prompt_len))
        length = prompt_len + output_len
        return CachedRequestState(
            req_id=name,
            prompt_token_ids=np.array(prompt, np.int64) if packed else prompt,
            prompt_embeds=None,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0),
            generator=None,
            block_ids=(list(range(-(-length // BLOCK_SIZE))),),
            num_computed_tokens=length - 1,
            output_token_ids=list(range(1000, 1000 + output_len)),
            pooling_params=None,
            lora_request=None,
        )

    return [[make(f"{batch}-{i}") for i in range(count)] for batch in "ab"]


def measure(batches: list[list[Any]], max_len: int, num_steps: int) -> float:
    """Median seconds of a step's change of rows."""
    import torch
    from vllm.v1.worker.gpu_input_batch import InputBatch

    rows = InputBatch(
        max_num_reqs=2 * len(batches[0]),
        max_model_len=max_len,
        max_num_batched_tokens=max_len,
        device=torch.device("cpu"),
        vocab_size=32_000,
        block_sizes=[BLOCK_SIZE],
        max_num_blocks_per_req=[max_len // BLOCK_SIZE],
    )
    for request in batches[1]:
        rows.add_request(request)
    times = []
    for step in range(num_steps):
        start_s = time.perf_counter()
        for request in batches[(step + 1) % 2]:
            rows.remove_request(request.req_id)
        for request in batches[step % 2]:
            rows.add_request(request)
        rows.condense()
        rows.refresh_metadata()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


if __name__ == "__main__":
    main()

"""Run by tests in a process of its own: greedy texts of `make_requests` by vLLM's own processes, as JSON.

Usage: greedy_run.py OUTPUT OPTIONS, the options being vLLM engine arguments in JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_kit import BLOCK_SIZE, MAX_MODEL_LEN, make_requests


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=65,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **json.loads(sys.argv[2]),
    )
    jobs = make_requests()
    params = [SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos) for job in jobs]
    outputs = llm.generate([{"prompt_token_ids": job.prompt} for job in jobs], params, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    texts = {job.request_id: list(o.outputs[0].token_ids) for job, o in zip(jobs, outputs, strict=True)}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value  # type: ignore[attr-defined]
    Path(sys.argv[1]).write_text(json.dumps({"texts": texts, "num_accepted_tokens": accepted}))


if __name__ == "__main__":
    main()

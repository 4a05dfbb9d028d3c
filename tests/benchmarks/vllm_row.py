"""One row of `bench_vllm_overlap.py`: one fresh engine, one fixed load, one measurement, in a process of its own.

Run by the benchmark as `python vllm_row.py ROW.json RESULT.json`. vLLM and torch are imported after the process has
pinned itself. What is timed is the load from the first request's arrival to the last one's end, after a shorter load
of the same shape.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_PREFIX = "w"
MEASURED_PREFIX = "r"
CPU_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at once and all write the same number of tokens.

    Attributes:
        num_requests: how many.
        prompt_len: tokens of each prompt; no two prompts are alike.
        max_tokens: tokens that each writes; EOS is ignored.
        vocab_size: of the models.
    """

    num_requests: int
    prompt_len: int
    max_tokens: int
    vocab_size: int

    def prompt(self, index: int, salt: int) -> list[int]:
        """Token ids, the special ones (0 to 2) left out; the first one tells apart what else would repeat."""
        span = self.vocab_size - 3
        rest = [3 + (index * (2 * j + 1) + 7 * j + salt) % span for j in range(1, self.prompt_len)]
        return [3 + index // span, *rest]


@dataclass(frozen=True, slots=True)
class Row:
    """What to run, and where.

    Attributes:
        name: heading in the table.
        kind: `plain`, `draft_model`, `ar`, `sd` or `psd`.
        running: running requests, all sub-batches together.
        num_devices: devices in use.
        engine: arguments of vLLM's `LLM`.
        load: see there.
        cpus: cores that the process may use; empty for all.
        env: environment variables on top of `CPU_ENV` and the caller's.
        journal: where a minedraft run is recorded; empty for stock vLLM.
    """

    name: str
    kind: str
    running: int
    num_devices: int
    engine: Mapping[str, Any]
    load: Load
    cpus: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    journal: str = ""

    def run(self, folder: Path) -> dict[str, Any]:
        """Run it in a process of its own.

        Args:
            folder: for the row's files; its output is `row.log` there.

        Raises:
            RuntimeError: it failed; the message ends with its last lines of output.
        """
        task, result, log = folder / "row.json", folder / "result.json", folder / "row.log"
        task.write_text(json.dumps(dataclasses.asdict(self)))
        result.unlink(missing_ok=True)
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, __file__, str(task), str(result)],
                env={**os.environ, **CPU_ENV, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode or not result.exists():
            raise RuntimeError(f"row {self.name} failed:\n{log.read_text(errors='replace')[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    if task["cpus"]:
        os.sched_setaffinity(0, task["cpus"])
    from vllm import LLM

    load = Load(**task["load"])
    llm = LLM(**task["engine"])
    engine = llm.llm_engine
    try:
        warm_up = dataclasses.replace(load, max_tokens=min(load.max_tokens, 12))
        serve(engine, warm_up, WARM_UP_PREFIX, salt=1)
        started_s = time.perf_counter()
        texts = serve(engine, load, MEASURED_PREFIX, salt=0)
        wall_s = time.perf_counter() - started_s
    finally:
        engine.engine_core.shutdown()
    Path(sys.argv[2]).write_text(json.dumps({"wall_s": wall_s, "texts": texts}))


def serve(engine: Any, load: Load, prefix: str, salt: int) -> dict[str, list[int]]:
    """Texts by request id."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=load.max_tokens, ignore_eos=True, detokenize=False)
    for index in range(load.num_requests):
        engine.add_request(f"{prefix}{index}", {"prompt_token_ids": load.prompt(index, salt)}, params)
    texts: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
    return texts


if __name__ == "__main__":
    main()

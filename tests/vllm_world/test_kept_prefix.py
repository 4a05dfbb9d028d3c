"""Who was let in keeps what it has found in the prefix cache, though others of its step allocate first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_kit import BLOCK_SIZE, Engine, Job, minedraft_options


def prompt(length: int, number: int) -> list[int]:
    return [(7 * number + 3 * j + number * j) % 125 + 3 for j in range(length)]


def test_others_of_the_step_take_other_blocks(models: Path) -> None:
    """Where all free blocks are cached, those that were used longest ago are the next to be taken: the newcomer's own.

    Without them it would have to compute its whole prompt, for which its step has no room.
    """
    found = Job("first", prompt(2 * BLOCK_SIZE + 1, 1), 1)
    with Engine(models / "target", num_gpu_blocks_override=13, **minedraft_options(None, mode="ar")) as engine:
        text = engine.run([found])["first"]
        engine.run([Job("filler", prompt(8 * BLOCK_SIZE - 1, 2), 1)])  # all its blocks but the last one are cached
        pool: Any = engine.scheduler.kv_cache_manager.block_pool
        queue = pool.free_block_queue.get_all_free_blocks()
        assert [block.block_hash is None for block in queue[:4]] == [True, True, True, False]
        lengths = (BLOCK_SIZE - 1, BLOCK_SIZE - 1, 1)  # in their third step the first two need another block each
        jobs = [Job(f"other{i}", prompt(length, 10 + i), 8) for i, length in enumerate(lengths)]
        counters = engine.conductor.counters
        steps: list[int] = []
        texts: dict[str, list[int]] = {}

        def join(number: int) -> None:
            steps.append(counters.steps)
            if number == 2:
                add(engine, found._replace(request_id="again"))

        texts = engine.run(jobs, on_step=join)
        assert texts["again"] == text
        assert counters.strays == 0
        ended = next(i for i, done in enumerate(steps) if done >= steps[2] + 1)
        assert ended == 3, "it took more than the step in which it joined"
        engine.check_rest()


def add(engine: Engine, job: Job) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
    engine.engine.add_request(job.request_id, {"prompt_token_ids": job.prompt}, params)

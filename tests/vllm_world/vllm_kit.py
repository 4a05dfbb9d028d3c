"""Engines for tests: an offline vLLM engine in this process, stepped by hand, with or without minedraft."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

BLOCK_SIZE = 32
MAX_MODEL_LEN = 256


class Job(NamedTuple):
    request_id: str
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = True


def make_requests() -> list[Job]:
    """Prompts from one token to more than a step's budget, at every offset within a block, some stopping at EOS."""
    lengths = [3, 20, 70, 1, 33, 100, 12, 64, 5, 40, 31, 32, 130, 2, 90, 65]
    limits = [20, 30, 40, 1, 25, 30, 2, 50, 33, 60, 40, 70, 30, 3, 64, 1]
    return [
        Job(f"r{i}", [(5 + 7 * i + 11 * j) % 125 + 3 for j in range(n)], limit, i % 3 > 0)
        for i, (n, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def make_load(count: int = 120) -> list[Job]:
    """Many short requests: prompts of one to 80 tokens, 1 to 24 tokens to generate, some ending at EOS."""
    jobs = []
    for i in range(count):
        length = 1 + (i * 37) % 80
        prompt = [(3 + 13 * i + 5 * j + i * j) % 125 + 3 for j in range(length)]
        jobs.append(Job(f"l{i}", prompt, 1 + (i * 7) % 24, i % 2 > 0))
    return jobs


def minedraft_options(draft: Path | None, k: int = 3, **settings: Any) -> dict[str, Any]:
    """Engine arguments that put the core at vLLM's side."""
    drafter = settings.pop("drafter", {})
    if draft is not None:
        settings["drafter"] = {"engine": {"model": str(draft)}, "deadline_s": 20.0, **drafter}
    return {
        "scheduler_cls": "minedraft.backends.vllm.scheduler.PSDScheduler",
        "speculative_config": {
            "method": "custom_class",
            "model": "minedraft.backends.vllm.null_proposer.NullProposer",
            "num_speculative_tokens": k,
        },
        "additional_config": {"minedraft": settings},
    }


class Engine:
    """An engine with small limits: six running requests, steps of 64 tokens."""

    def __init__(self, model: Path, **options: Any) -> None:
        from vllm import LLM

        arguments = {
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 65,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
        }
        self.llm = LLM(str(model), **(arguments | options))
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    @property
    def conductor(self) -> Any:
        return self.scheduler.conductor

    def run(
        self,
        jobs: Sequence[Job],
        *,
        per_step: int = 100,
        aborts: dict[int, str] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> dict[str, list[int]]:
        """Texts by request id.

        Args:
            jobs: what to generate; ids must be new to the engine.
            per_step: requests that arrive before each step.
            aborts: request ids by the number of the step before which their client goes away.
            on_step: called before each step with its number.
        """
        from vllm import SamplingParams

        texts: dict[str, list[int]] = {}
        waiting = list(jobs)
        number = 0
        while waiting or self.engine.has_unfinished_requests():
            for job in waiting[:per_step]:
                params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)
                self.engine.add_request(job.request_id, {"prompt_token_ids": job.prompt}, params)
            del waiting[:per_step]
            if aborts and number in aborts:
                self.engine.abort_request([aborts[number]])
            if on_step is not None:
                on_step(number)
            for output in self.engine.step():
                if output.finished:
                    texts[output.request_id] = list(output.outputs[0].token_ids)
            number += 1
            assert number < 100_000, "the engine makes no progress"
        return texts

    def await_drafts(self) -> None:
        """Run short requests until the target verifies drafts once more, of a drafter that may have to come back first.

        The core may not know yet that a drafter is gone, or hung: whether it thinks that one is up tells nothing.
        """
        state = self.conductor.core.state
        before, end = state.num_draft_tokens, time.monotonic() + 240.0
        for number in itertools.count():
            self.run([Job(f"await-{before}-{number}", [5, 6, 7], 8)])
            if state.num_draft_tokens > before:
                return
            assert time.monotonic() < end, "no drafts come"
            self.conductor._channel.wait(0.2)

    def check_rest(self) -> None:
        """Nobody is left, and every block of both accounts is free."""
        from minedraft.backends.vllm import compat

        assert not self.scheduler.requests
        assert compat.num_free_blocks(self.scheduler) == compat.num_usable_blocks(self.scheduler)
        self.conductor._await_ingestion()
        core = self.conductor.core
        assert core.num_unfinished == core.num_in_flight == 0
        for pool in (core.state.target_pool, core.state.draft_pool):
            if pool is not None:
                assert pool.num_free_blocks == pool.num_blocks
                pool.check_integrity()

    def check_blocks(self) -> None:
        """Between steps no request holds a block behind its committed tokens, in vLLM's own pool."""
        from minedraft.backends.vllm import compat

        for request in self.scheduler.running:
            held = compat.held_blocks(self.scheduler, request.request_id)
            assert held <= -(-request.num_computed_tokens // self.scheduler.block_size), request.request_id
            assert request.num_computed_tokens < request.num_tokens or request.is_prefill_chunk
        self.conductor.core.state.batches.check_integrity(list(self.conductor.core.state.running.values()))


def watch_chunks(engine: Engine) -> dict[str, list[int]]:
    """By request id, as it was given: how many tokens each of its verifications yields from now on."""
    chunks: dict[str, list[int]] = {}
    client = engine.engine.engine_core
    get_output = client.get_output

    def watched() -> Any:
        outputs = get_output()
        for one in outputs.outputs:
            chunks.setdefault(one.request_id.rpartition("-")[0] or one.request_id, []).append(len(one.new_token_ids))
        return outputs

    client.get_output = watched
    return chunks


def renamed(jobs: Sequence[Job], prefix: str) -> list[Job]:
    """The same requests under new ids."""
    return [job._replace(request_id=f"{prefix}{job.request_id}") for job in jobs]


def plain_ids(texts: dict[str, list[int]], prefix: str) -> dict[str, list[int]]:
    return {request_id.removeprefix(prefix): text for request_id, text in texts.items()}


def replay_report(path: Path) -> Any:
    """Feed a run's journal to a fresh core."""
    from minedraft.journal import read_journal
    from minedraft.policy import load_policies
    from minedraft.replay import recorded_pool, replay
    from minedraft.scheduler import Scheduler, SchedulerConfig

    journal = read_journal(path)
    header = journal.header
    pool = recorded_pool(header)
    core = Scheduler(SchedulerConfig(**header.scheduler), load_policies(header.policies), pool)
    return replay(journal, core)


class KeepTwo:
    """A selection policy that needs probabilities, to see that they come in."""

    keeps_all = False

    def select(self, drafts: Sequence[Any], capacity: int) -> list[int]:
        for draft in drafts:
            assert len(draft.probs) == draft.num_drafted
            assert all(0.0 < prob <= 1.0 + 1e-6 for prob in draft.probs)
        kept = []
        for draft in drafts:
            kept.append(min(2, draft.num_drafted, capacity))
            capacity -= kept[-1]
        return kept

"""Every attribute of vLLM that is not public and that we touch, in one place.

Law of this file: a function here does one thing to vLLM's objects and decides nothing; nobody else may use a name of
vLLM's that starts with an underscore. `check_engine` says what this world can't serve. Written for vLLM 0.32;
`tests/vllm_world/test_contract.py` looks at every name on the installed version.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from operator import attrgetter, itemgetter
from typing import Any, Final

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.metrics.perf import DebugPerfStats, PerfStats
from vllm.v1.request import RequestStatus

from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.request import FinishReason
from minedraft.work import DraftWork

Tail = tuple[Any, int, list[Any]]
"""Of a running request: it, the blocks that it held when some were cut off, and those in the order of its table."""

TESTED_VERSIONS: Final = ("0.32.", "0.33.")
"""Prefixes of the releases that the tests of this package have run on."""

LOGITS_PROCESSORS: Final = "vllm.logits_processors"
"""The entry-point group of vLLM's plugins that change logits."""

_STATE: Final = "keeps a state instead of KV, of which no tokens can be taken back (Mamba)"

_REPORT_PREFIX: Final = "minedraft/"

_REASONS: Final = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_REPETITION: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}

SCHEDULER_ATTRIBUTES: Final = (
    "cache_config",
    "dynamic_sd_lookup",
    "grammar_compile_error_reqs",
    "kv_cache_manager",
    "kv_holding_waiting",
    "lora_config",
    "max_model_len",
    "max_num_active_reqs",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "policy",
    "prev_step_scheduled_req_ids",
    "requests",
    "running",
    "structured_output_manager",
    "use_v2_model_runner",
    "waiting",
)
"""What a vLLM scheduler must have once it is made; for the contract test."""


# --- What an engine must look like.


def check_version(version: str, *, force: bool) -> None:
    """Refuse a vLLM that this package was not tested with.

    Raises:
        VllmWorldError: unless forced.
    """
    if force or version.startswith(TESTED_VERSIONS):
        return
    tested = ", ".join(prefix.rstrip(".") for prefix in TESTED_VERSIONS)
    raise VllmWorldError(
        f"vLLM {version} was not tested with this minedraft (tested: {tested}); "
        'install one of these, or set {"minedraft": {"force_version": true}} in additional_config'
    )


def check_engine(config: Any, kv_cache_config: Any) -> None:
    """Refuse what this world would serve wrongly.

    Raises:
        VllmWorldError: the message names the option and the remedy.
    """
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "custom_class":
        raise VllmWorldError(
            f"speculative_config.method is {speculative.method!r}; use 'custom_class' with NullProposer, "
            "since drafts come from minedraft's drafter"
        )
    if speculative is not None and speculative.rejection_sample_method != "standard":
        raise VllmWorldError(
            f"speculative_config.rejection_sample_method is {speculative.rejection_sample_method!r}, which changes "
            "the text; only 'standard' is lossless"
        )
    for found, what in _refusals(config, kv_cache_config):
        if found:
            raise VllmWorldError(f"minedraft can't serve this engine: {what}")


def _refusals(config: Any, kv_cache_config: Any) -> list[tuple[bool, str]]:
    schedule, model = config.scheduler_config, config.model_config
    plugins = ", ".join(installed_logits_processors())
    return [
        (
            schedule.async_scheduling,
            "async_scheduling is on, but drafts must follow the step before; use --no-async-scheduling",
        ),
        (config.max_concurrent_batches != 1, "it keeps several batches in flight; use pipeline_parallel_size 1"),
        (config.parallel_config.data_parallel_size > 1, "data_parallel_size is over 1; run one engine per replica"),
        (not schedule.enable_chunked_prefill, "enable_chunked_prefill is off, but the core plans prompt chunks"),
        (
            schedule.long_prefill_token_threshold > 0,
            "long_prefill_token_threshold is set, but the core plans prompt chunks; remove it",
        ),
        (
            getattr(config.speculative_config, "num_speculative_tokens_per_batch_size", None) is not None,
            "num_speculative_tokens_per_batch_size is set; use the draft_length policy by-batch-size",
        ),
        (config.kv_transfer_config is not None, "it has a KV connector; remove kv_transfer_config"),
        (config.ec_transfer_config is not None, "it has an encoder-cache connector; remove ec_transfer_config"),
        (
            config.speculative_config is not None and bool(plugins),
            f"speculation drops its logits processors ({plugins}); use mode 'ar' without speculative_config",
        ),
        (model.is_encoder_decoder, "the model is an encoder-decoder"),
        (model.supports_multimodal_inputs, "the model is multimodal, and its encoder's budget isn't the core's"),
        (model.runner_type == "pooling", "the model is a pooling model"),
        (_keeps_state(kv_cache_config), f"the model {_STATE}"),
        (len(kv_cache_config.kv_cache_groups) != 1, "the model has several kinds of KV cache (hybrid models)"),
    ]


def check_draft_engine(kv_cache_config: Any) -> None:
    """Refuse a draft model whose drafts would be worthless: its text is taken back in every round.

    Raises:
        VllmWorldError: the message says why.
    """
    if _keeps_state(kv_cache_config):
        raise VllmWorldError(f"the draft model {_STATE}; use another one")


def _keeps_state(kv_cache_config: Any) -> bool:
    return any(isinstance(group.kv_cache_spec, MambaSpec) for group in kv_cache_config.kv_cache_groups)


def installed_logits_processors() -> list[str]:
    """Names of installed plugins that vLLM would apply to every request, were it not for speculation."""
    return [point.name for point in metadata.entry_points(group=LOGITS_PROCESSORS)]


def is_paused(scheduler: Any) -> bool:
    """Whether vLLM will run nobody at all."""
    return bool(scheduler.pause_state == PauseState.PAUSED_ALL)


def is_in_pause(scheduler: Any) -> bool:
    """Whether vLLM is paused in any way."""
    return bool(scheduler.pause_state != PauseState.UNPAUSED)


def is_closed(scheduler: Any) -> bool:
    """Whether vLLM lets its running requests end, and nobody in."""
    return bool(scheduler.pause_state == PauseState.PAUSED_NEW)


def is_by_priority(scheduler: Any) -> bool:
    """Whether vLLM was told to serve by the requests' priorities."""
    return bool(scheduler.policy == SchedulingPolicy.PRIORITY)


def prepare(scheduler: Any, waiting_room: Any) -> None:
    """Hand admission to the core, and switch off what would change its plan behind its back."""
    assert not len(scheduler.waiting), "requests came before the scheduler was ready"
    scheduler.waiting = waiting_room
    scheduler.kv_cache_manager.watermark_blocks = 0  # the core keeps it
    # vLLM sends the whole text of whoever sat out the last step along with it, for async scheduling only.
    scheduler.prev_step_scheduled_req_ids = _EverScheduled()
    # With a lookup table, a request that joins with one token left isn't padded with placeholder drafts.
    scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (scheduler.max_num_running_reqs + 1)


def max_num_active(scheduler: Any) -> int:
    """Most requests that may run at once."""
    return min(int(scheduler.max_num_running_reqs), int(scheduler.max_num_active_reqs))


def watermark(scheduler: Any) -> float:
    """Share of the blocks that admission shall leave free."""
    return float(scheduler.scheduler_config.watermark)


def vocab_size(config: Any) -> int:
    """Token ids that a model knows, by its engine's configuration."""
    return int(config.model_config.get_vocab_size())


def num_usable_blocks(scheduler: Any) -> int:
    """Blocks that requests can hold: all but vLLM's null block."""
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


def num_free_blocks(scheduler: Any) -> int:
    """Blocks that nobody holds."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


# --- Requests.


def is_running(request: Any) -> bool:
    """Whether it holds a row of vLLM's running list."""
    return bool(request.status == RequestStatus.RUNNING)


def finish_reason(request: Any) -> FinishReason | None:
    """Why it ended, None if it goes on."""
    return _REASONS.get(request.status)


def max_draft_tokens(request: Any) -> int | None:
    """The request's own bound on k: `max_draft_tokens` in `extra_args` (`vllm_xargs` over HTTP).

    Raises:
        VllmWorldError: it isn't a whole number; vLLM's front end lets any value through.
    """
    extra = (request.sampling_params.extra_args or {}) if request.sampling_params is not None else {}
    value = extra.get("max_draft_tokens")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise VllmWorldError(f"max_draft_tokens is {value!r}, must be a whole number >= 0")
    return int(min(value, 1 << 30))


def adapter(request: Any) -> int:
    """The number of its LoRA adapter, 0 without one."""
    return 0 if request.lora_request is None else int(request.lora_request.lora_int_id)


def max_adapters(scheduler: Any) -> int:
    """How many different adapters a step may carry; 1 where there are none at all."""
    return 1 if scheduler.lora_config is None else int(scheduler.lora_config.max_loras)


def can_start(scheduler: Any, request: Any) -> bool:
    """Whether nothing else than its turn is waited for (a grammar is compiled in the background)."""
    return bool(scheduler._handle_blocked_waiting_request(request))


def fail(scheduler: Any, request_id: str) -> None:
    """End a request with an error that its client sees after the next step."""
    scheduler.grammar_compile_error_reqs.add(request_id)


def validate_drafts(scheduler: Any, request: Any, token_ids: Sequence[int]) -> list[int]:
    """The longest prefix of drafts that the request's grammar allows; all of them without one."""
    valid: list[int] = scheduler.structured_output_manager.validate_tokens(request, list(token_ids))
    return valid


# --- One step.


class _EverScheduled(set[str]):
    """Ids of requests that were scheduled since they got their place, where vLLM keeps those of the last step."""

    def clear(self) -> None:
        """What vLLM does with every step. Who loses its place, or ends, goes by `forget_scheduled`."""


def forget_scheduled(scheduler: Any, request_id: str) -> None:
    """A request has lost its place, or ended."""
    scheduler.prev_step_scheduled_req_ids.discard(request_id)


def show_running(scheduler: Any, chosen: list[Any]) -> list[Any]:
    """Let the next `schedule()` see only these running requests; returns the others, for `show_again`."""
    running: list[Any] = scheduler.running
    size = len(chosen)
    scheduler.running = chosen
    # Who sat out the last step comes last, so that two sub-batches in turn are each told by one comparison.
    if size and running[-size:] == chosen:
        return running[:-size]
    shown = set(chosen)
    return [request for request in running if request not in shown]


def show_again(scheduler: Any, others: list[Any]) -> None:
    """After `schedule()`: put those back that were not shown to it."""
    scheduler.running += others


def preempt(scheduler: Any, request: Any) -> None:
    """Take all KV from a running request and let it wait."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())


def prefix_hit(scheduler: Any, request: Any, leaving: Sequence[str] = ()) -> tuple[int, int]:
    """Tokens that a waiting request would find in the prefix cache, and blocks of them in use; takes nothing.

    Args:
        scheduler: vLLM's.
        request: who looks.
        leaving: ids of requests that are about to give back their blocks: what only they use isn't in use.
    """
    found, num_tokens, *_ = scheduler.kv_cache_manager.get_computed_blocks(request)
    if not num_tokens:
        return 0, 0
    gone = Counter(block.block_id for request_id in leaving for block in _blocks(scheduler, request_id))
    return int(num_tokens), sum(block.ref_cnt > gone[block.block_id] for block in found.blocks[0])


def keep_prefix(scheduler: Any, request: Any) -> None:
    """Make the blocks that a waiting request would find in the prefix cache the last to be taken by others."""
    found, num_tokens, *_ = scheduler.kv_cache_manager.get_computed_blocks(request)
    if num_tokens:
        pool, blocks = scheduler.kv_cache_manager.block_pool, found.blocks[0]
        pool.touch(blocks)
        pool.free_blocks(reversed(blocks))  # cached ones go to the end of the queue; who comes first is taken first


def held_blocks(scheduler: Any, request_id: str) -> int:
    """Blocks that a request holds."""
    return len(_blocks(scheduler, request_id))


def num_own_blocks(scheduler: Any, request_id: str, joining: Iterable[Any]) -> int:
    """Blocks that a request holds and nobody else, and that none of the `joining` requests finds in the cache."""
    manager = scheduler.kv_cache_manager
    claimed = {block.block_id for request in joining for block in manager.get_computed_blocks(request)[0].blocks[0]}
    own = [block for block in _blocks(scheduler, request_id) if block.ref_cnt == 1]
    return sum(block.block_id not in claimed for block in own)


def may_reuse_blocks(scheduler: Any) -> bool:
    """Whether a block may be taken again without vLLM's knowing: not where it notes new ones, to have them zeroed."""
    return not _group(scheduler).records_new_block_ids


def cut_blocks(scheduler: Any, request_ids: Iterable[str]) -> list[Tail]:
    """Give back blocks behind the computed tokens of running requests (rejected drafts were there).

    The workers keep their own copies of the block tables, to which vLLM only ever appends: see `tails.py`.

    Returns:
        What was cut from each that had such blocks.
    """
    requests, block_size, tables = scheduler.requests, scheduler.block_size, _group(scheduler).req_to_blocks
    tails, freed = [], []
    for request_id in request_ids:
        blocks = tables.get(request_id)
        if blocks is None:  # it has ended, or lost its place
            continue
        request = requests[request_id]
        keep = -(-request.num_computed_tokens // block_size)
        if len(blocks) > keep:
            cut = blocks[keep:]
            del blocks[keep:]
            tails.append((request, keep, cut))
            freed += cut[::-1]
    if freed:
        scheduler.kv_cache_manager.block_pool.free_blocks(freed)
    return tails


def take_blocks(scheduler: Any, tails: Iterable[Tail], num_new: Mapping[str, int]) -> list[Tail | None]:
    """Give running requests the blocks that their next steps need out of their tails, as far as those are still free.

    Args:
        scheduler: vLLM's.
        tails: of these requests.
        num_new: tokens of the next step by request id.

    Returns:
        What is left of each tail: None if nothing is, one without blocks if some that it needs are somebody else's by
        now, or if the request's table isn't what it was.
    """
    block_size, tables = scheduler.block_size, _group(scheduler).req_to_blocks
    pool = scheduler.kv_cache_manager.block_pool
    watched = pool._reuse_watchers
    taken: dict[int, Any] = {}
    left: list[Tail | None] = []
    for request, num_held, blocks in tails:
        request_id = request.request_id
        held = tables.get(request_id, ())
        if len(held) != num_held:
            left.append((request, len(held), []))
            continue
        needed = max(0, (request.num_computed_tokens + num_new[request_id] - 1) // block_size + 1 - num_held)
        is_lost, rest = not blocks, blocks[needed:]
        for block in blocks[:needed]:
            block_id = block.block_id
            if block.ref_cnt or block.block_hash is not None or block_id in taken or block_id in watched:
                is_lost = True
                break
            taken[block_id] = block
            held.append(block)
        left.append((request, len(held), [] if is_lost else rest) if rest or is_lost else None)
    pool.touch(taken.values())
    return left


def resend_blocks(scheduler: Any, cached: Any, i: int) -> None:
    """Make the workers replace a scheduled request's block table, as after a preemption, instead of appending."""
    assert not scheduler.use_v2_model_runner, "that model runner appends to a resumed request's block table"
    request_id = cached.req_ids[i]
    if request_id not in cached.resumed_req_ids:
        cached.resumed_req_ids.add(request_id)
        cached.new_block_ids[i] = scheduler.kv_cache_manager.get_block_ids(request_id)


def pack_prompts(output: Any) -> None:
    """Give the workers the prompts of those who join as arrays, not as lists.

    A worker of the V1 model runner copies the whole text of whoever sat out the step before, so of everybody in every
    step of a sub-batch; see `token_array.py` for what that costs with lists.
    """
    for request in output.scheduled_new_reqs:
        if type(request.prompt_token_ids) is list:
            request.prompt_token_ids = np.array(request.prompt_token_ids, np.int64)


def may_take_outputs_for_prompts(scheduler: Any) -> bool:
    """Whether the workers may be told that generated tokens are a prompt's.

    Not to the V2 model runner, whose rows stay where they are; nor if attention treats a prompt in its own way.
    """
    return not scheduler.use_v2_model_runner and scheduler.vllm_config.model_config.rswa_window is None


def looks_at_outputs(request: Any) -> bool:
    """Whether it makes a difference to what a request is sampled, or told, which of its tokens were generated.

    (`prompt_logprobs` of 0 don't count: they are done with once the prompt is.)
    """
    params = request.sampling_params
    return bool(
        request.prompt_embeds is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_tokens
        or params.bad_words
        or params.prompt_logprobs
        or params.thinking_token_budget is not None
    )


def announce_again(scheduler: Any, output: Any, request_id: str, text: Any) -> None:
    """Tell the workers of a running request of this step as of a new one, as vLLM tells the next piece of a stream.

    Args:
        scheduler: vLLM's.
        output: its output; changed.
        request_id: one of `scheduled_cached_reqs`.
        text: all its tokens, for the workers to take for its prompt, int32, shape [tokens].
    """
    cached = output.scheduled_cached_reqs
    i = cached.req_ids.index(request_id)
    new = NewRequestData.from_request(
        scheduler.requests[request_id], scheduler.kv_cache_manager.get_block_ids(request_id)
    )
    new.prompt_token_ids = text
    new.num_computed_tokens = cached.num_computed_tokens[i]  # the request's own has been advanced already
    output.scheduled_new_reqs.append(new)
    for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens):
        del column[i]
    cached.resumed_req_ids.discard(request_id)
    cached.all_token_ids.pop(request_id, None)


text_of: Final[Callable[[Any], list[int]]] = attrgetter("_all_token_ids")
"""All tokens of a request; for reading."""

_last = itemgetter(-1)


def new_tokens(scheduler: Any, requests: list[Any] | None, work: DraftWork) -> list[int]:
    """The committed tokens that a draft work's entries feed to the drafter, of all one after the other.

    Args:
        scheduler: vLLM's.
        requests: of the entries, if they are known; all are alive.
        work: the work.
    """
    if requests is None:
        requests = [scheduler.requests[request_id] for request_id in work.request_ids]
    elif work.num_new.count(1) == len(requests) and 0 not in work.num_draft:  # who drafts has all of its text then
        return list(map(_last, map(text_of, requests)))
    columns = zip(requests, work.num_computed, work.num_new, strict=True)
    return [token for request, start, count in columns for token in request._all_token_ids[start : start + count]]


def _group(scheduler: Any) -> Any:
    """The manager of the only kind of KV cache that an engine of ours has."""
    return scheduler.kv_cache_manager.coordinator.single_type_managers[0]


def _blocks(scheduler: Any, request_id: str) -> list[Any]:
    blocks: list[Any] = _group(scheduler).req_to_blocks.get(request_id, [])
    return blocks


# --- The drafter's sessions.


def cache_prompts_only(scheduler: Any) -> None:
    """Let only a session's prompt (what the target has confirmed) enter the prefix cache.

    The one wrap of a method in this package, on one object of the drafter's own engine.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    cache_blocks = coordinator.cache_blocks

    def capped(request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> Any:
        return cache_blocks(request, min(num_computed_tokens, request.num_prompt_tokens), *args, **kwargs)

    coordinator.cache_blocks = capped


def rewind_session(scheduler: Any, session: Any, update: Any, keep: int, text: Any) -> None:
    """Replace what is behind a parked session's first `keep` tokens by the update's; its KV stays valid for those.

    Args:
        scheduler: the drafter's.
        session: its request.
        update: what vLLM made of the request that continues it.
        keep: see above.
        text: all tokens that it has then, as an array: for the workers, see `pack_prompts`.
    """
    session.num_computed_tokens = min(session.num_computed_tokens, keep, len(text) - 1)
    del session.block_hashes[keep // scheduler.hash_block_size :]
    del session._all_token_ids[keep:]
    session._all_token_ids += update.prompt_token_ids
    assert len(session._all_token_ids) == len(text), "the drafter and its engine differ on a text"
    session._output_token_ids.clear()
    session.prompt_token_ids = text
    session.num_prompt_tokens = len(text)
    session.update_block_hashes()
    session.max_tokens = update.max_tokens
    session.sampling_params = update.sampling_params
    session.arrival_time = update.arrival_time
    if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
        scheduler.num_waiting_for_streaming_input -= 1
    session.status = RequestStatus.WAITING


# --- Statistics.


def put_report(stats: Any, report: dict[str, int]) -> None:
    """Give a step's statistics numbers of ours to carry to the front end.

    They travel where vLLM has numbers under free names: in `perf_stats.debug_stats`, which nobody reads unless
    VLLM_DEBUG_MFU_METRICS is set, and which is then only printed. A field of our own would not survive the encoding
    between the processes, and the fields for connectors make vLLM's loggers look for a connector.
    """
    if stats.perf_stats is None:
        stats.perf_stats = PerfStats()
    if stats.perf_stats.debug_stats is None:
        stats.perf_stats.debug_stats = DebugPerfStats(0.0, 0, 0, {}, {}, {}, {})
    debug_stats = stats.perf_stats.debug_stats
    debug_stats.context_breakdown = {
        **(debug_stats.context_breakdown or {}),
        **{_REPORT_PREFIX + key: value for key, value in report.items()},
    }


def take_report(stats: Any) -> dict[str, int]:
    """Take out what `put_report` put in; empty if there is nothing."""
    if stats.perf_stats is None or stats.perf_stats.debug_stats is None:
        return {}
    numbers = stats.perf_stats.debug_stats.context_breakdown or {}
    keys = [key for key in numbers if key.startswith(_REPORT_PREFIX)]
    return {key.removeprefix(_REPORT_PREFIX): numbers.pop(key) for key in keys}

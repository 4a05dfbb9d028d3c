"""What this package uses of vLLM beyond its documented interface, looked for on the installed version."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def takes(function: Any, *names: str) -> bool:
    """Whether it can be called with these in this order, the rest being optional."""
    found = list(inspect.signature(function).parameters.values())
    rest = found[len(names) :]
    optional = all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in rest)
    return [one.name for one in found[: len(names)]] == list(names) and optional


def test_interface_methods() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(Scheduler.schedule) == ["self", "throttle_prefills"]
    assert parameters(Scheduler.update_from_output) == ["self", "scheduler_output", "model_runner_output"]
    assert parameters(Scheduler.add_request) == ["self", "request"]
    assert parameters(Scheduler.finish_requests) == ["self", "request_ids", "finished_status"]
    assert parameters(Scheduler.update_draft_token_ids) == ["self", "draft_token_ids"]


def test_overrides_replace_something() -> None:
    """What our schedulers override exists in vLLM's, and takes what ours takes."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from minedraft.backends.vllm.draft_scheduler import DraftScheduler
    from minedraft.backends.vllm.scheduler import PSDScheduler

    for ours in (PSDScheduler, DraftScheduler):
        methods = {name: one for name, one in vars(ours).items() if inspect.isfunction(one) and name != "__init__"}
        assert methods
        for name, method in methods.items():
            base = getattr(Scheduler, name)
            if "args" not in parameters(method):
                assert parameters(method) == parameters(base), name


def test_private_methods() -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    assert takes(Scheduler._reserve_prefill_lookahead, "self", "request", "num_computed_tokens", "num_new_tokens")
    assert takes(Scheduler._preempt_request, "self", "request", "timestamp")
    assert takes(Scheduler._update_request_as_session, "self", "session", "update")
    assert takes(Scheduler._handle_blocked_waiting_request, "self", "request")
    assert takes(KVCacheCoordinator.cache_blocks, "self", "request", "num_computed_tokens")
    assert takes(KVCacheManager.get_computed_blocks, "self", "request")
    assert takes(KVCacheManager.get_block_ids, "self", "request_id")


def test_private_names_are_known() -> None:
    """Only compat.py uses names of vLLM's that start with an underscore, and only those that this file looks at."""
    import minedraft.backends.vllm as package

    known = {
        "_preempt_request",
        "_handle_blocked_waiting_request",
        "_all_token_ids",
        "_output_token_ids",
        "_reuse_watchers",
    }
    for path in Path(package.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text())
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = {name for name in used - own - {"_exit"} if re.match("_[a-z]", name)}
        if path.name == "compat.py":
            assert private == known
        else:
            assert not private & known, path.name


def is_own(node: ast.AST) -> bool:
    """Whether it is `self`, or `super()`, whose methods `test_overrides_replace_something` looks at."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id == "self"


def test_a_request_has_what_we_read_and_write() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    params = SamplingParams(max_tokens=5, extra_args={"max_draft_tokens": 2})
    request = Request("r", [3, 4, 5], params, None, resumable=True, block_hasher=lambda _: [])
    assert request.resumable
    assert request.lora_request is None
    assert (request.priority, request.num_preemptions, request.num_computed_tokens) == (0, 0, 0)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.max_tokens, request.spec_token_ids, request.block_hashes) == (5, [], [])
    assert request.sampling_params.extra_args == {"max_draft_tokens": 2}
    assert request.status == RequestStatus.WAITING
    request.append_output_token_ids(9)
    assert list(request.all_token_ids) == request._all_token_ids == [3, 4, 5, 9]
    assert request._output_token_ids == [9]
    request.update_block_hashes()
    assert request.use_structured_output is False


def test_what_goes_between_scheduler_and_workers() -> None:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    wanted = {
        NewRequestData: {"prompt_token_ids", "num_computed_tokens"},
        CachedRequestData: {
            "req_ids",
            "resumed_req_ids",
            "new_token_ids",  # empty without pipeline parallelism
            "all_token_ids",
            "new_block_ids",
            "num_computed_tokens",
            "num_output_tokens",
        },
        SchedulerOutput: {
            "num_scheduled_tokens",
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "scheduled_spec_decode_tokens",
        },
        ModelRunnerOutput: {"req_id_to_index", "sampled_token_ids"},
    }
    for kind, names in wanted.items():
        assert names <= {field.name for field in dataclasses.fields(kind)}, kind
    # What `announce_again` takes an entry out of: a column that is added must be cut too.
    assert wanted[CachedRequestData] == {field.name for field in dataclasses.fields(CachedRequestData)}
    assert takes(NewRequestData.from_request, "request", "block_ids")


def test_a_resumed_request_gets_its_whole_block_table() -> None:
    """`resend_blocks` names a running request as resumed; the worker then replaces its row, and takes no new tokens."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._update_states)
    assert "resumed_from_preemption = req_id in req_data.resumed_req_ids" in source
    assert "req_state.block_ids = new_block_ids" in source


def test_blocks_can_be_taken_again() -> None:
    """`take_blocks`: a free block is taken off the queue wherever it stands, and says whose it has become."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    assert takes(BlockPool.touch, "self", "blocks")
    assert takes(BlockPool.free_blocks, "self", "ordered_blocks")
    assert isinstance(SingleTypeKVCacheManager.records_new_block_ids, property)
    pool = BlockPool(6, enable_caching=True, hash_block_size=4)
    assert pool._reuse_watchers == {}
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(blocks[::-1])
    assert [(block.ref_cnt, block.block_hash) for block in blocks] == [(0, None)] * 3
    pool.touch([blocks[1]])
    assert blocks[1].ref_cnt == 1
    others = pool.get_new_blocks(pool.get_num_free_blocks())
    assert blocks[1].block_id not in {block.block_id for block in others}


def test_vllm_allocates_only_what_a_request_does_not_hold() -> None:
    """So that it has nothing to send to the workers for whoever has its tail again."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    source = inspect.getsource(SingleTypeKVCacheManager.allocate_new_blocks)
    assert "num_new_blocks = num_required_blocks - len(req_blocks)" in source
    assert "if num_new_blocks <= 0:" in source


def test_who_was_scheduled_matters_to_async_scheduling_only() -> None:
    """vLLM's `prev_step_scheduled_req_ids`, which `_EverScheduled` replaces, says whose whole texts the workers get."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(Scheduler)
    found = set(re.findall(r"self\.prev_step_scheduled_req_ids\S*", source))
    assert found == {
        "self.prev_step_scheduled_req_ids:",
        "self.prev_step_scheduled_req_ids.clear()",
        "self.prev_step_scheduled_req_ids.update(num_scheduled_tokens.keys())",
    }
    assert source.count("all_token_ids[req_id] = req.all_token_ids.copy()") == 1
    lines = [line.strip() for line in inspect.getsource(GPUModelRunner).splitlines()]
    uses = [i for i, line in enumerate(lines) if "req_data.all_token_ids" in line]
    assert uses
    for use in uses:
        assert any(line.startswith("if self.use_async_scheduling") for line in lines[use - 4 : use])


def test_workers_take_prompts_as_arrays() -> None:
    """`pack_prompts`: what the V1 model runner does with a prompt it can do with an array of integers as well."""
    from vllm.v1.worker import gpu_input_batch, gpu_model_runner

    used = [
        line.strip()
        for module in (gpu_input_batch, gpu_model_runner)
        for line in inspect.getsource(module).splitlines()
        if re.search(r"\b(request|req|req_state|self)\.prompt_token_ids\b", line)
    ]
    patterns = [
        r".*\.prompt_token_ids, (request|req|req_state|self)\.prompt_embeds$",  # their length
        r".* is (not )?None:$",
        r"self\.token_ids_cpu\[req_index, :num_prompt_tokens\] = request\.prompt_token_ids$",
        r"return self\.prompt_token_ids\[idx\]$",
        r"num_prompt_tokens = len\(request\.prompt_token_ids\)$",
        r"request\.prompt_token_ids, device=self\.device$",  # async_tensor_h2d, which takes arrays
        r"req_state\.prompt_token_ids = new_req_data\.prompt_token_ids$",
        r"input_tokens = req_state\.prompt_token_ids$",  # multimodal
        r"input_ids=req_state\.prompt_token_ids,$",  # multimodal
        r"request\.prompt_token_ids,$",  # to logits processors; none of vLLM's own looks at it
    ]
    assert len(used) > 10
    for line in used:
        assert any(re.match(pattern, line) for pattern in patterns), line


def test_workers_take_a_known_request_for_a_stream_s_next_piece() -> None:
    """`announce_again`: what it has is replaced by what comes, and what it generated so far becomes its prompt's."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._update_states)
    known = source.index("if req_id in self.requests:")
    assert (
        known
        < source.index("self._update_streaming_request(req_id, new_req_data)")
        < source.index("reqs_to_add.append(")
    )
    replaced = inspect.getsource(GPUModelRunner._update_streaming_request)
    for name in ("prompt_token_ids", "block_ids", "num_computed_tokens"):
        assert f"req_state.{name} = new_req_data.{name}" in replaced
    assert "self.input_batch.remove_request(req_id)" in replaced
    assert "req_state.output_token_ids.clear()" in replaced
    assert "generator" not in replaced


def test_who_looks_at_where_a_prompt_ends() -> None:
    """What in the V1 model runner treats prompts otherwise than outputs: nothing that `retelling.py` doesn't know."""
    import vllm
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    uses = [line.strip() for line in inspect.getsource(GPUModelRunner).splitlines() if "num_prompt_tokens" in line]
    methods = {
        name
        for name, one in inspect.getmembers(GPUModelRunner, inspect.isfunction)
        if "num_prompt_tokens" in inspect.getsource(one)
    }
    assert uses
    assert methods <= {
        "_prepare_lookback_token_ids",  # models that look back at tokens, see below
        "_update_states",  # cuts lists that are longer than the scheduler's, which none is
        "_update_streaming_request",
        "_prepare_inputs",  # recurrent states
        "_build_attention_metadata",  # R-SWA; and `is_prefilling`, true in a retold request's next step
        "_calc_mrope_positions",  # multimodal
        "_get_prompt_logprobs_dict",
    }, methods
    assert isinstance(ModelConfig.rswa_window, property)
    folder = Path(vllm.__file__).parent / "models"
    models = {
        path.relative_to(folder).parts[0] for path in folder.rglob("*.py") if "token_lookback_depth" in path.read_text()
    }
    assert models <= {"deepseek_v41"}  # a hybrid, which is refused


def test_how_a_pause_and_a_sleep_reach_the_scheduler() -> None:
    """The state first, then the caches: by that order `Conductor.dropped` knows that it is a pause."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    assert {state.name for state in PauseState} == {"UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"}
    assert takes(EngineCore.sleep, "self", "level")
    assert takes(EngineCore.wake_up, "self")
    for kind in (EngineCore, EngineCoreProc):
        source = inspect.getsource(kind.pause_scheduler)
        assert source.index("self.scheduler.set_pause_state(pause_state)") < source.index("self._finish_pause(")
    assert "self._reset_caches()" in inspect.getsource(EngineCore._finish_pause)
    assert takes(EngineCore._reset_caches, "self", "reset_running_requests")
    assert inspect.signature(EngineCore._reset_caches).parameters["reset_running_requests"].default is True
    assert "self.pause_scheduler(mode=mode, clear_cache=clear_prefix_cache)" in inspect.getsource(EngineCore.sleep)
    assert "set_pause_state(PauseState.UNPAUSED)" in inspect.getsource(EngineCore.resume_scheduler)
    assert "self.resume_scheduler()" in inspect.getsource(EngineCore.wake_up)


def test_a_stat_logger_is_asked_while_the_engine_is_idle() -> None:
    from vllm.entrypoints.launchers.utils import server_utils
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    assert parameters(AggregateStatLoggerBase.log) == ["self"]
    assert "do_log_stats" in inspect.getsource(server_utils.lifespan)
    assert "self.logger_manager.log()" in inspect.getsource(AsyncLLM.do_log_stats)


def test_the_block_pool() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    pool = BlockPool(9, enable_caching=True, hash_block_size=16)
    assert pool.num_gpu_blocks == 9
    assert pool.get_num_free_blocks() == 8  # one is the null block
    (block, *_) = blocks = pool.get_new_blocks(2)
    assert isinstance(block, KVCacheBlock)
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (1, 6)
    pool.free_blocks(reversed(blocks))
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (0, 8)


def test_what_an_engine_is_asked_at_its_start() -> None:
    """Names that `check_engine` reads; a name that is gone would be an AttributeError for every user."""
    from vllm.config import LoRAConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
    from vllm.config.model import ModelConfig

    wanted = {
        VllmConfig: [
            "speculative_config",
            "scheduler_config",
            "model_config",
            "max_concurrent_batches",
            "lora_config",
            "instance_id",
        ],
        ModelConfig: ["is_encoder_decoder", "supports_multimodal_inputs", "runner_type", "enable_sleep_mode"],
        SchedulerConfig: ["async_scheduling", "enable_chunked_prefill", "policy"],
        SpeculativeConfig: ["method", "rejection_sample_method", "num_speculative_tokens"],
        ParallelConfig: ["data_parallel_size"],
        LoRAConfig: ["max_loras"],
    }
    for kind, names in wanted.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        source = inspect.getsource(kind)
        for name in names:
            assert name in fields or hasattr(kind, name) or f"self.{name} = " in source, (kind, name)
    assert {"kv_transfer_config", "ec_transfer_config"} <= {field.name for field in dataclasses.fields(VllmConfig)}


def test_what_vllm_itself_refuses_with_speculation() -> None:
    """minedraft relies on it: each of these would be dropped without a word. A server answers the first with 400."""
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError, VLLMValidationError
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP, build_logitsprocs

    from minedraft.backends.vllm.compat import LOGITS_PROCESSORS

    assert issubclass(VLLMValidationError, VLLMClientError)
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        with pytest.raises(VLLMValidationError, match="speculative decoding"):
            params._validate_spec_decode(SimpleNamespace())
        params._validate_spec_decode(None)
    with pytest.raises(ValueError, match="speculative decoding"):
        build_logitsprocs(SimpleNamespace(speculative_config=object()), "cpu", False, False, ["module:Processor"])
    assert LOGITSPROCS_GROUP == LOGITS_PROCESSORS  # of plugins, which vLLM drops silently, so `check_engine` refuses


def test_what_the_drafter_uses_of_an_engine_core() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    assert parameters(EngineCore.__init__)[:4] == ["self", "vllm_config", "executor_class", "log_stats"]
    assert parameters(EngineCore.abort_requests) == ["self", "request_ids"]
    assert parameters(EngineCore.post_step) == ["self", "model_executed"]
    assert parameters(Executor.register_failure_callback) == ["self", "callback"]
    source = inspect.getsource(EngineCore.__init__)
    for name in ("model_executor", "request_block_hasher", "scheduler", "step_fn"):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name


def test_nobody_else_reads_what_carries_our_report() -> None:
    """vLLM's loggers look into `perf_stats.debug_stats` only where VLLM_DEBUG_MFU_METRICS asks them to."""
    from vllm.v1.metrics import loggers, perf

    assert "debug_stats" not in inspect.getsource(loggers)
    source = inspect.getsource(perf.PerfMetricsLogging)
    assert source.count("debug_stats") == source.count("perf_stats.debug_stats") == 2
    assert source.index("if self.debug_logging:\n            assert perf_stats.debug_stats") > 0
    assert "debug_stats" not in inspect.getsource(perf.PerfMetricsProm)


def test_the_scheduler_sets_what_compat_reads() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from minedraft.backends.vllm.compat import SCHEDULER_ATTRIBUTES

    source = inspect.getsource(Scheduler.__init__)
    for name in SCHEDULER_ATTRIBUTES:
        assert f"self.{name}" in source, name


def test_waiting_room_has_the_whole_interface() -> None:
    from vllm.v1.core.sched.request_queue import RequestQueue

    from minedraft.backends.vllm.waiting_room import WaitingRoom

    assert RequestQueue.__abstractmethods__
    assert not WaitingRoom.__abstractmethods__
    WaitingRoom()


def test_versions() -> None:
    import vllm

    from minedraft.backends.vllm.compat import check_version
    from minedraft.backends.vllm.errors import VllmWorldError

    check_version(vllm.__version__, force=False)
    check_version("0.99.0", force=True)
    with pytest.raises(VllmWorldError, match="force_version"):
        check_version("0.99.0", force=False)


def test_cpu_sampling_is_still_needed() -> None:
    """When this fails, vLLM has been corrected: delete cpu_sampling.py."""
    script = (
        "from minedraft.backends.vllm import cpu_sampling as c\n"
        "from vllm.platforms import current_platform\n"
        "if current_platform.is_cpu():\n"
        "    current_platform.register_triton_kernel_overrides()\n"
        "    assert c.is_needed() and c.crashes_on_no_drafts()\n"
        "    c.correct()\n"
        "    assert not c.is_needed() and not c.crashes_on_no_drafts()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_drafter_dies_with_its_parent() -> None:
    """Also when the parent is killed, and also while the drafter still loads."""
    import os
    import signal

    script = (
        "import sys, time\n"
        "from minedraft.backends.vllm.channel import DrafterChannel\n"
        "from minedraft.backends.vllm.settings import DrafterSettings\n"
        "settings = DrafterSettings(engine={'model': '/nowhere'}, log='/dev/null')\n"
        "channel = DrafterChannel(settings, {'model': '/nowhere'})\n"
        "print(channel.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(1.0)
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20.0
    while is_alive(pid):
        assert time.monotonic() < end, "the drafter outlives its parent"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False

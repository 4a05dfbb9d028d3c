"""vLLM's scheduler with minedraft's core at its side: name this class as `--scheduler-cls`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.conductor import Conductor
from minedraft.backends.vllm.settings import parse_settings


class PSDScheduler(Scheduler):  # type: ignore[misc]
    """Overrides vLLM's interface methods, each with a word to or from the `Conductor`.

    Attributes:
        conductor: see there.

    Raises:
        VllmWorldError: the engine, the settings or the drafter can't be used; the message says what to change.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = parse_settings(self.vllm_config.additional_config)
        compat.check_version(vllm.__version__, force=settings.force_version)
        compat.check_engine(self.vllm_config, self.kv_cache_config)
        self.conductor = Conductor(self, settings)

    def add_request(self, request: Any) -> None:
        """See vLLM."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            self.conductor.arrived(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """See vLLM: aborts, and errors found outside a step."""
        ended: list[Any] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self.conductor.aborted(request.request_id)
        return ended

    def set_pause_state(self, pause_state: Any) -> None:
        """See vLLM."""
        super().set_pause_state(pause_state)
        self.conductor.pause_changed()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See vLLM: called between steps."""
        try:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        finally:
            if reset_running_requests:
                self.conductor.dropped()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """See vLLM: the core decides, vLLM allocates and builds the step."""
        self.conductor.plan()
        output = super().schedule(throttle_prefills)
        self.conductor.scheduled(output)
        if self.num_spec_tokens and output.scheduled_new_reqs:  # else logits processors may want to see lists
            compat.pack_prompts(output)
        return output

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """The one way in which a request loses its place, whoever wants it."""
        super()._preempt_request(request, *args, **kwargs)
        self.conductor.lost_place(request.request_id)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The last word on a request's tokens in vLLM's scheduling loop; without lookahead it is free for ours."""
        if not self.conductor.marks:  # asked for every request of every step
            return num_new_tokens
        return self.conductor.limit(request, num_computed_tokens, num_new_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See vLLM; the next drafts are sent off before it returns, and what there is to report goes along."""
        self.conductor.sampled(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.conductor.updated(outputs)
        for output in outputs.values():
            stats = output.scheduler_stats  # one of them has some, unless statistics are off
            if stats is not None and (report := self.conductor.report()):
                compat.put_report(stats, report)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Drafts come from the drafter's process only."""

    def shutdown(self) -> None:
        """See vLLM."""
        self.conductor.close()
        super().shutdown()

"""Long outputs, told to the workers as arrays.

A worker of vLLM's V1 model runner copies the whole text of whoever sat out the step before into its batch: of all,
at every verification of a sub-batch. Prompts come to it as arrays (`compat.pack_prompts`), but what was generated since
is a list of its own, and costs tens of nanoseconds a token (`tests/benchmarks/bench_vllm_rows.py`). So a request whose
list has become long is announced to the workers once more, with all its text as its prompt, as vLLM does with the next
piece of a streamed input.

In that step vLLM's own log of iterations and its MFU estimate count the request as one that computes a prompt; nothing
else does.

Law of this file: what workers know changes its form only. Who has sampling parameters that tell generated tokens from
the prompt's is never retold.
"""

from __future__ import annotations

from typing import Any, Final

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.token_array import TokenArray
from minedraft.request import RequestId

MIN_TOKENS: Final = 512
"""A worker's list grows at least so long before it is retold."""

_LOOKS: Final = 4
"""Requests looked at in a step, in turn."""


class Retelling:
    """Which of vLLM's requests have been retold.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._texts: dict[RequestId, TokenArray] = {}  # by id, what the workers take for its prompt; only ever grows
        self._turns: dict[int, int] = {}  # by sub-batch, how often it was looked at
        self._is_possible = compat.may_take_outputs_for_prompts(scheduler)

    def __len__(self) -> int:
        return len(self._texts)

    def look(self, output: Any, batch: int) -> list[RequestId]:
        """After vLLM has scheduled: announce requests of the step anew that have become long.

        Args:
            output: of vLLM's scheduler; changed.
            batch: the sub-batch that it runs.

        Returns:
            Who was announced: the workers have their block tables as vLLM has them now.
        """
        cached = output.scheduled_cached_reqs
        request_ids, lengths = cached.req_ids, cached.num_output_tokens
        if not self._is_possible or not request_ids:
            return []
        turn = self._turns[batch] = self._turns.get(batch, 0) + 1
        places = {(turn * _LOOKS + look) % len(request_ids) for look in range(_LOOKS)}
        found = [request_ids[i] for i in places if lengths[i] >= MIN_TOKENS and self._renew_text(request_ids[i])]
        for request_id in found:
            compat.announce_again(self._scheduler, output, request_id, self._texts[request_id].view)
        return found

    def _renew_text(self, request_id: RequestId) -> bool:
        """Put a request's text together, if it is worth telling it; returns whether it is."""
        request = self._scheduler.requests[request_id]
        text, known = compat.text_of(request), self._texts.get(request_id)
        num_known = request.num_prompt_tokens if known is None else len(known)
        if len(text) - num_known < MIN_TOKENS or compat.looks_at_outputs(request):
            return False
        if known is None:
            known = self._texts[request_id] = TokenArray()
        known.extend(text[len(known) :])
        return True

    def forget(self, request_id: RequestId) -> None:
        """A request has ended."""
        self._texts.pop(request_id, None)

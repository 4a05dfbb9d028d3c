"""The token ids of one request, kept in the parent (`Transcript`), and where its output ends (`cut_at_stop`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from minedraft.backends.torch.request import TorchRequest
from minedraft.request import FinishReason

if TYPE_CHECKING:
    from minedraft.backends.torch.messages import Rows


class PendingDraft(NamedTuple):
    """Drafts that wait for their verification, and the (incarnation, round) that they were made for."""

    incarnation: int
    round: int
    token_ids: tuple[int, ...]
    rows: Rows | None


def cut_at_stop(
    token_ids: Sequence[int], num_output: int, request: TorchRequest, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cut newly decided tokens at the first stop boundary.

    A stop token is part of the output, and wins over the length limit if both fall on the same token (as in vLLM).

    Args:
        token_ids: accepted drafts and the target's own token.
        num_output: output tokens before these.
        request: whose.
        eos_token_ids: the model's.

    Returns:
        What becomes output, and why the request ends there, or None.
    """
    for index, token_id in enumerate(token_ids):
        kept = tuple(token_ids[: index + 1])
        if token_id in request.stop_token_ids or (not request.ignore_eos and token_id in eos_token_ids):
            return kept, FinishReason.STOP
        if num_output + index + 1 >= request.max_tokens:
            return kept, FinishReason.LENGTH
    return tuple(token_ids), None


class Transcript:
    """Prompt, output and pending drafts of one request.

    Attributes:
        request: as given.
        finish_reason: why it ended; None while it is alive.
    """

    __slots__ = ("_draft", "_tokens", "finish_reason", "request", "sampling")

    def __init__(self, request: TorchRequest) -> None:
        self.request = request
        self.sampling = request.sampling()
        self.finish_reason: FinishReason | None = None
        self._tokens = list(request.prompt_token_ids)
        self._draft: PendingDraft | None = None

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Committed output."""
        return tuple(self._tokens[len(self.request.prompt_token_ids) :])

    def tokens(self, start: int, count: int) -> tuple[int, ...]:
        """Committed tokens from `start`, prompt included.

        Raises:
            ValueError: there are not that many.
        """
        if start + count > len(self._tokens):
            raise ValueError(
                f"request {self.request.request_id!r}: tokens {start} to {start + count} were asked for, "
                f"but only {len(self._tokens)} are committed"
            )
        return tuple(self._tokens[start : start + count])

    def commit(self, token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Append what the target decided, up to the first stop boundary.

        Returns:
            The number of tokens that became output, and why the request ended, or None.
        """
        num_output = len(self._tokens) - len(self.request.prompt_token_ids)
        kept, reason = cut_at_stop(token_ids, num_output, self.request, eos_token_ids)
        self._tokens.extend(kept)
        self.finish_reason = reason
        return len(kept), reason

    def rewind(self, num_tokens: int) -> None:
        """Drop committed tokens beyond `num_tokens`: the scheduler never heard of them (it voided their round)."""
        assert num_tokens >= len(self.request.prompt_token_ids)
        if num_tokens < len(self._tokens):
            del self._tokens[num_tokens:]
            self.finish_reason = None

    def put_draft(self, draft: PendingDraft) -> None:
        """Keep drafts for their verification; older ones are void."""
        self._draft = draft

    def take_draft(self, incarnation: int, round_number: int, count: int) -> PendingDraft:
        """Hand out the first `count` drafts of a round; they can't be had twice.

        Raises:
            ValueError: there are no such drafts.
        """
        draft, self._draft = self._draft, None
        if count == 0:
            return PendingDraft(incarnation, round_number, (), None)
        if (
            draft is None
            or (draft.incarnation, draft.round) != (incarnation, round_number)
            or count > len(draft.token_ids)
        ):
            raise ValueError(
                f"request {self.request.request_id!r}: {count} drafts of incarnation {incarnation}, round "
                f"{round_number} were asked for, but there are none such"
            )
        return draft._replace(
            token_ids=draft.token_ids[:count], rows=None if draft.rows is None else draft.rows[:count]
        )

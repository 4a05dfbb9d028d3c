"""What the parent and a worker say to each other; plain values, pickled over a pipe to our own child.

Law of this file: importing it must not start a thread (so no numpy here): a worker pins itself to its core first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minedraft.backends.torch.request import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.float32]
    """Distributions over token ids, shape [k, V]."""

Key = tuple[str, int]
"""(request id, incarnation): names one sequence's KV in a worker."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker process needs to start.

    Attributes:
        role: "target" or "drafter".
        model: a local Hugging Face folder or a hub name.
        device: `cpu`, `cpu:N` (pinned to core N, one thread), `cuda` or `cuda:N`.
        dtype: "auto", "float32", "bfloat16", "float16" or "float64"; auto is float32 on a CPU and the model's own
            type on a GPU.
        num_token_ids: ids from here on are padding of the model's vocabulary, and are never produced.
        acceptance: a value of `Acceptance`.
    """

    role: str
    model: str
    device: str
    dtype: str
    num_token_ids: int
    acceptance: str


class DraftEntry(NamedTuple):
    """Keep `num_computed` positions, ingest `token_ids` behind them, then draft `num_draft` tokens."""

    key: Key
    num_computed: int
    token_ids: tuple[int, ...]
    num_draft: int
    sampling: Sampling


class DraftJob(NamedTuple):
    """A `DraftWork` with its tokens."""

    work_id: int
    freed: tuple[Key, ...]
    entries: tuple[DraftEntry, ...]


class VerifyEntry(NamedTuple):
    """Keep `num_computed` positions, compute `token_ids` behind them, verify `draft_ids` behind those."""

    key: Key
    num_computed: int
    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    draft_rows: Rows | None
    is_last: bool
    sampling: Sampling


class VerifyJob(NamedTuple):
    """A `VerifyWork` with its tokens."""

    work_id: int
    freed: tuple[Key, ...]
    entries: tuple[VerifyEntry, ...]


class Drafted(NamedTuple):
    """One entry's drafts: ids, the drafter's probability of each, and q if rejection sampling needs it."""

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]
    rows: Rows | None


class Loaded(NamedTuple):
    """The worker's model is ready."""


class LoadFailed(NamedTuple):
    """The worker's model can't be used; the worker ends."""

    message: str


class Done(NamedTuple):
    """A job is complete.

    Attributes:
        work_id: of the job.
        value: a tuple of `Drafted` per draft entry, or of token ids per verify entry (accepted drafts and the target's
            own token; empty for a prompt chunk that is not the last).
        started_s: seconds on CLOCK_MONOTONIC, which all processes of a Linux machine share.
        ended_s: likewise.
    """

    work_id: int
    value: tuple[Any, ...]
    started_s: float
    ended_s: float


class Failed(NamedTuple):
    """A job came to nothing; the worker goes on."""

    work_id: int
    message: str


Job = DraftJob | VerifyJob
Reply = Loaded | LoadFailed | Done | Failed

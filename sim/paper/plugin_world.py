"""`PluginWorld`: a simulated world in which prompts and host work stall both device groups.

The authors' plugin for vLLM 0.9.2 (repository electron-shaders/MineDraft, MIT) overlaps one thing only: the target's
pass over one sub-batch with the drafting of the other. Prompts are steps of their own, the target's first and then the
drafter's, while both wait (the paper's FAQ 3); scheduling, input preparation, the copy of full-vocabulary probabilities
and rejection sampling follow one another in the engine's process. Here both are time of the host: the verification that
carries them starts when it has passed, and so does the drafting that was decided on with it.

One thing is not as there: a request's prompt rides in a verification of its sub-batch (its seconds apart, as above), so
a request that joins takes a row of that step without drafts. That is one round in about a hundred, in every mode.
"""

from __future__ import annotations

from statistics import median
from typing import Final

from minedraft.sim.backend import SimBackend
from minedraft.sim.paper.stages import Stages
from minedraft.work import DraftResult, DraftWork, Event, VerifyResult, VerifyWork, Work, WorkDone, ZeroDraft

_BEFORE_ALL: Final = (-2.0, -1.0)
_LAWFUL_ZERO: Final = (ZeroDraft.PREFILL, ZeroDraft.LENGTH_LIMIT)


class PluginWorld:
    """A `minedraft.backend.Backend` around a `SimBackend` whose cost model takes prompts as free.

    Args:
        world: without `round_overhead_s` of its own.
        stages: its cost model.
        host_row_s: host work of a step, per request in it.

    Attributes:
        prompt_s: seconds spent on prompts so far, with their host work: what the authors' throughput leaves out.
        num_rows: rows of verifications, prompts left out.
        num_steps: verifications with at least one such row.
        num_overlapped: of those, with drafts that were made while the verification before was running.
        num_tokens: committed, the first of each request (from its prompt) left out.
        num_verified: drafts verified.
        num_accepted: drafts accepted.
        num_undrafted: rows without drafts for another cause than a prompt or the end of the answer.
        first_s: by request, when the target was first given it.
        sizes: time and size of the sub-batches at each verification.
        verify_s: device seconds of each verification with drafts.
        draft_s: device seconds of each drafting.
    """

    def __init__(self, world: SimBackend, stages: Stages, host_row_s: float) -> None:
        self._world = world
        self._stages = stages
        self._host_row_s = host_row_s
        self._works: dict[int, Work] = {}
        self._drafted: dict[int, tuple[float, float]] = {}  # when the drafts of a sub-batch were made
        self._verified = _BEFORE_ALL  # when the last verification ran
        self.prompt_s = 0.0
        self.num_rows = 0
        self.num_steps = 0
        self.num_overlapped = 0
        self.num_tokens = 0
        self.num_verified = 0
        self.num_accepted = 0
        self.num_undrafted = 0
        self.first_s: dict[str, float] = {}
        self.sizes: list[tuple[float, tuple[int, ...]]] = []
        self.verify_s: list[float] = []
        self.draft_s: list[float] = []

    # --- the seam

    def now(self) -> float:
        """Simulated seconds."""
        return self._world.now()

    def ready(self) -> bool:
        """See `Backend`."""
        return self._world.ready()

    def submit(self, work: Work) -> None:
        """Stall for the work's prompts and host work, then pass it on."""
        self._works[work.work_id] = work
        if type(work) is VerifyWork:
            stall_s = self._stall_s(work)
            if stall_s:
                self._world.host.occupy(stall_s)
        self._world.submit(work)

    def next_event(self) -> Event | None:
        """See `Backend`."""
        event = self._world.next_event()
        if type(event) is WorkDone:
            work = self._works.pop(event.work_id)
            if type(event.result) is VerifyResult:
                assert type(work) is VerifyWork
                self._note_verified(work, event, event.result)
            else:
                assert type(work) is DraftWork
                self._note_drafted(work, event)
        return event

    # --- the ledger

    def _stall_s(self, work: VerifyWork) -> float:
        num_rows = work.num_new.count(1)
        num_prompts = len(work.num_new) - num_rows
        self.num_rows += num_rows
        self.num_steps += num_rows > 0
        self.num_verified += sum(work.num_draft)
        zero = work.zero_draft
        self.num_undrafted += sum(zero) - sum(zero[cause] for cause in _LAWFUL_ZERO)
        self.sizes.append((self.now(), work.batch_sizes))
        stall_s = num_rows * self._host_row_s
        if num_prompts:
            for request_id, new in zip(work.request_ids, work.num_new, strict=True):
                if new > 1:
                    self.first_s.setdefault(request_id, self.now())
            prompt_s = self._stages.prompts_s([new for new in work.num_new if new > 1])
            prompt_s += num_prompts * self._host_row_s
            self.prompt_s += prompt_s
            stall_s += prompt_s
        return stall_s

    def _note_verified(self, work: VerifyWork, event: WorkDone, result: VerifyResult) -> None:
        num_prompts = len(work.num_new) - work.num_new.count(1)
        self.num_tokens += sum(result.num_committed) - num_prompts
        self.num_accepted += sum(result.num_accepted)
        if any(work.num_draft):
            self.verify_s.append(event.ended_s - event.started_s)
            began_s, ended_s = self._drafted.get(work.batch, _BEFORE_ALL)
            self.num_overlapped += began_s < self._verified[1] and ended_s > self._verified[0]
        self._verified = (event.started_s, event.ended_s)

    def _note_drafted(self, work: DraftWork, event: WorkDone) -> None:
        assert type(event.result) is DraftResult
        if any(work.num_draft):
            self._drafted[work.batch] = (event.started_s, event.ended_s)
            self.draft_s.append(event.ended_s - event.started_s)

    # --- what it adds up to

    @property
    def median_verify_s(self) -> float:
        """Of verifications with drafts, as a profiler sees them; 0 without any."""
        return median(self.verify_s) if self.verify_s else 0.0

    @property
    def median_draft_s(self) -> float:
        """Of draftings."""
        return median(self.draft_s) if self.draft_s else 0.0

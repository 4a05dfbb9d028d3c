"""Drives a scheduler by hand: arrive, complete this or that work, look. For scenario tests."""

from __future__ import annotations

from invariants import check_state, check_work

from minedraft import Request, RequestOutput, Scheduler, SchedulerConfig, load_policies
from minedraft.policy import Policies
from minedraft.work import (
    DrafterLost,
    DrafterReady,
    DraftResult,
    DraftWork,
    Event,
    RequestAborted,
    RequestArrived,
    VerifyResult,
    VerifyWork,
    Work,
    WorkDone,
    WorkFailed,
)


class Driver:
    """A scheduler between two events, with its works in flight by kind.

    `works` lists everything that was ever submitted, `outputs` everything that ended.
    """

    def __init__(self, mode: str = "psd", policies: Policies | None = None, **limits: object) -> None:
        names = {"mode": f"fixed,mode={mode}"}
        config = SchedulerConfig(
            **{  # type: ignore[arg-type]
                "num_batches": 2 if mode == "psd" else 1,
                "max_batch_size": 8,
                "max_model_len": 512,
                "block_size": 4,
                "num_target_blocks": 512,
                "num_draft_blocks": 0 if mode == "ar" else 512,
                **limits,
            }
        )
        self.scheduler = Scheduler(config, policies or load_policies(names))
        self.now_s = 0.0
        self.works: list[Work] = []
        self.outputs: list[RequestOutput] = []
        self.drafting: DraftWork | None = None
        self.verifying: VerifyWork | None = None

    def feed(self, *events: Event, check: bool = True) -> list[RequestOutput]:
        ended: list[RequestOutput] = []
        self.now_s += 1.0
        for event in events:
            ended += self.scheduler.update(event, self.now_s)
        self.outputs += ended
        for work in self.scheduler.schedule(self.now_s):
            check_work(self.scheduler, work)
            self.works.append(work)
            if isinstance(work, DraftWork):
                self.drafting = work
            else:
                self.verifying = work
        if check:
            check_state(self.scheduler)
        return ended

    def arrive(self, *requests: Request) -> list[RequestOutput]:
        return self.feed(*[RequestArrived(request) for request in requests])

    def abort(self, request_id: str) -> list[RequestOutput]:
        return self.feed(RequestAborted(request_id))

    def draft_done(self, num_drafted: int | None = None) -> list[RequestOutput]:
        work, self.drafting = self.drafting, None
        assert work is not None
        counts = tuple([k if num_drafted is None else min(k, num_drafted) for k in work.num_draft])
        return self.feed(WorkDone(work.work_id, DraftResult(counts), self.now_s, self.now_s))

    def ingest_done(self) -> list[RequestOutput]:
        assert self.drafting is not None
        assert not any(self.drafting.num_draft), "that is a draft, not an ingestion"
        return self.draft_done()

    def verify_done(self, num_accepted: int = 0) -> list[RequestOutput]:
        work, self.verifying = self.verifying, None
        assert work is not None
        accepted = tuple([min(k, num_accepted) for k in work.num_draft])
        committed = tuple([a + 1 if last else 0 for a, last in zip(accepted, work.is_last, strict=True)])
        return self.feed(WorkDone(work.work_id, VerifyResult(accepted, committed), self.now_s, self.now_s))

    def draft_failed(self) -> list[RequestOutput]:
        work, self.drafting = self.drafting, None
        assert work is not None
        return self.feed(WorkFailed(work.work_id, "test"))

    def verify_failed(self) -> list[RequestOutput]:
        work, self.verifying = self.verifying, None
        assert work is not None
        return self.feed(WorkFailed(work.work_id, "test"))

    def lose_drafter(self) -> list[RequestOutput]:
        self.drafting = None
        return self.feed(DrafterLost("test"))

    def drafter_back(self) -> list[RequestOutput]:
        return self.feed(DrafterReady())

    def step(self, num_accepted: int = 0) -> None:
        """Complete whatever is in flight, the draft first; what begins meanwhile goes on."""
        drafting, verifying = self.drafting, self.verifying
        if drafting is not None:
            self.draft_done()
        if verifying is not None:
            self.verify_done(num_accepted)

    def drain(self, num_accepted: int = 0, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.num_unfinished:
                return
            self.step(num_accepted)
        raise AssertionError("did not drain")

    def sizes(self) -> tuple[int, ...]:
        return self.scheduler.state.batches.sizes()

    def verifies(self) -> list[VerifyWork]:
        return [work for work in self.works if isinstance(work, VerifyWork)]

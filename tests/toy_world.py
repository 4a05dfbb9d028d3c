"""A world of toy tokens that checks every work it is given: the oracle behind the scheduler's tests.

The "target" and the "drafter" are hash functions of the context. KV is kept as the very tokens it was computed from, so
a wrong rewind, a stale incarnation or a reused draft is seen at once, and text can be compared with plain decoding.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

from minedraft.request import FinishReason, Request
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

VOCAB = 11
EOS = 0


def _hash(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


@dataclass(frozen=True)
class ToyModel:
    """Next token of the target, and of a drafter that agrees in `agreement` percent of the contexts."""

    seed: int = 0
    agreement: int = 60
    use_eos: bool = True

    def target(self, context: list[int]) -> int:
        token = _hash(self.seed, context[-4:], len(context)) % (4 * VOCAB)
        if token == EOS and self.use_eos:
            return EOS
        return 1 + token % (VOCAB - 1)

    def drafter(self, context: list[int]) -> int:
        token = self.target(context)
        agrees = _hash(self.seed, "agree", context[-4:], len(context)) % 100 < self.agreement
        return token if agrees else (token + 1) % VOCAB

    def prompt(self, request: Request) -> list[int]:
        return [_hash(self.seed, "prompt", request.request_id, i) % VOCAB for i in range(request.prompt_len)]

    def plain_decode(self, request: Request, max_model_len: int) -> list[int]:
        """What the target writes on its own: the text that every mode and policy must give (E1)."""
        text = self.prompt(request)
        limit = min(len(text) + request.max_tokens, max_model_len)
        while len(text) < limit:
            text.append(self.target(text))
            if text[-1] == EOS:
                break
        return text[request.prompt_len :]


class ToyDevices:
    """Executes works on toy tokens. Works are executed when submitted; tokens count when the result is delivered."""

    def __init__(self, model: ToyModel, max_model_len: int, *, gives_probs: bool = False) -> None:
        self.model = model
        self.gives_probs = gives_probs
        self.max_model_len = max_model_len
        self.text: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, list[int]] = {}
        self.target_kv: dict[tuple[str, int], list[int]] = {}
        self.draft_kv: dict[tuple[str, int], list[int]] = {}
        self.drafts: dict[tuple[str, int, int], list[int]] = {}
        self.used: dict[tuple[str, int, int], None] = {}
        self._commits: dict[int, list[tuple[Request, list[int], FinishReason | None]]] = {}

    def arrive(self, request: Request) -> None:
        assert request.request_id not in self.text
        self.text[request.request_id] = self.model.prompt(request)
        self.requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self.text.pop(request_id, None)
        self.requests.pop(request_id, None)

    def displace(self, request_id: str) -> None:
        """The target's KV of a request goes, and with it what a verification in flight says of it."""
        for key in [key for key in self.target_kv if key[0] == request_id]:
            del self.target_kv[key]
        for commits in self._commits.values():
            commits[:] = [item for item in commits if item[0].request_id != request_id]

    def lose_drafter(self) -> None:
        self.draft_kv.clear()

    def execute(self, work: Work) -> DraftResult | VerifyResult:
        return self._draft(work) if isinstance(work, DraftWork) else self._verify(work)

    def _rewind(self, kv: dict[tuple[str, int], list[int]], work: Work, i: int) -> list[int]:
        """Drop what was freed before, cut to the valid prefix, ingest; asserts that the prefix is the text's."""
        key = (work.request_ids[i], work.incarnations[i])
        text, start, new = self.text[work.request_ids[i]], work.num_computed[i], work.num_new[i]
        cache = kv.setdefault(key, [])
        assert new >= 1, "an entry must compute something"
        assert start <= len(cache), f"{key}: {start} positions claimed, {len(cache)} there"
        assert cache[:start] == text[:start], f"{key}: KV of other tokens would be used"
        assert start + new <= len(text), f"{key}: tokens that don't exist yet"
        del cache[start:]
        cache.extend(text[start : start + new])
        return cache

    def _draft(self, work: DraftWork) -> DraftResult:
        for key in work.freed:
            self.draft_kv.pop(key, None)
        counts = []
        for i, request_id in enumerate(work.request_ids):
            cache = self._rewind(self.draft_kv, work, i)
            text, k = self.text[request_id], work.num_draft[i]
            assert not k or len(cache) == len(text), f"{request_id}: drafts behind a gap"
            context = list(text)
            for _ in range(k):
                context.append(self.model.drafter(context))
            drafted = context[len(text) :]
            cache.extend(drafted[:-1])  # the last draft is never fed back
            if k:
                assert self.requests[request_id] not in self._verified(), f"{request_id}: drafted and verified at once"
                key = (request_id, work.incarnations[i], work.rounds[i])
                # A draft that was never verified may be made again; one that was verified may not.
                assert key not in self.used, f"{key} was verified before"
                self.drafts[key] = drafted
            counts.append(len(drafted))
        probs = tuple([(0.5,) * count for count in counts]) if self.gives_probs else None
        return DraftResult(tuple(counts), probs)

    def _verified(self) -> list[Request]:
        """Whom a verification in flight is about; the drafter may take their committed tokens in meanwhile."""
        return [request for commits in self._commits.values() for request, _, _ in commits]

    def _verify(self, work: VerifyWork) -> VerifyResult:
        for key in work.freed:
            self.target_kv.pop(key, None)
        accepted, committed, reasons, commits = [], [], [], []
        for i, request_id in enumerate(work.request_ids):
            cache = self._rewind(self.target_kv, work, i)
            request, text, k = self.requests[request_id], self.text[request_id], work.num_draft[i]
            assert work.is_last[i] == (len(cache) == len(text))
            assert not k or (work.is_last[i] and work.num_new[i] == 1), "drafts while prompt tokens remain"
            drafts: list[int] = []
            if k:
                key = (request_id, work.incarnations[i], work.rounds[i])
                assert key not in self.used, f"{key} used twice"
                drafts = self.drafts.pop(key)[:k]
                self.used[key] = None
                assert len(drafts) == k
            cache.extend(drafts)
            tokens: list[int] = []
            if work.is_last[i]:
                for draft in [*drafts, None]:
                    tokens.append(self.model.target(text + tokens))
                    if tokens[-1] != draft:
                        break
            num_accepted = max(0, len(tokens) - 1)
            tokens, reason = self._cut(request, text, tokens)
            accepted.append(num_accepted)
            committed.append(len(tokens))
            reasons.append(reason)
            commits.append((request, tokens, reason))
        self._commits[work.work_id] = commits
        return VerifyResult(tuple(accepted), tuple(committed), tuple(reasons) if any(reasons) else None)

    def _cut(self, request: Request, text: list[int], tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        limit = min(request.prompt_len + request.max_tokens, self.max_model_len)
        for n, token in enumerate(tokens, 1):
            if token == EOS:
                return tokens[:n], FinishReason.STOP
            if len(text) + n >= limit:
                return tokens[:n], FinishReason.LENGTH
        return tokens, None

    def deliver(self, work: VerifyWork) -> None:
        """The result of a verification becomes text, for those requests that are still there."""
        for request, tokens, reason in self._commits.pop(work.work_id):
            if self.requests.get(request.request_id) is request:
                self.text[request.request_id].extend(tokens)
                if reason is not None:
                    self.finished[request.request_id] = self.text[request.request_id][request.prompt_len :]
                    self.forget(request.request_id)

    def undo_ingestion(self, work: DraftWork) -> None:
        """The draft failed as early as it can: the drafter has rewound, and ingested nothing."""
        for i, request_id in enumerate(work.request_ids):
            cache = self.draft_kv.get((request_id, work.incarnations[i]), [])
            del cache[work.num_computed[i] :]

    def drop(self, work: VerifyWork) -> None:
        """The verification failed: nothing of it counts."""
        self._commits.pop(work.work_id)


class ToyBackend:
    """A `Backend` in logical time: requests arrive after a given number of events, works finish in seeded order."""

    def __init__(self, requests: list[tuple[int, Request]], devices: ToyDevices, seed: int = 0) -> None:
        self.devices = devices
        self._pending = deque(sorted(requests, key=lambda item: item[0]))
        self._ready: deque[Event] = deque()
        self._in_flight: dict[int, tuple[Work, DraftResult | VerifyResult]] = {}
        self._ticks = 0
        self._seed = seed
        self.works: list[Work] = []

    def now(self) -> float:
        return float(self._ticks)

    def submit(self, work: Work) -> None:
        self.works.append(work)
        self._in_flight[work.work_id] = (work, self.devices.execute(work))

    def ready(self) -> bool:
        return bool(self._pending) and self._pending[0][0] <= self._ticks

    def next_event(self) -> Event | None:
        self._ticks += 1
        while self._pending and (self._pending[0][0] <= self._ticks or not self._in_flight):
            request = self._pending.popleft()[1]
            self.devices.arrive(request)
            return RequestArrived(request)
        if not self._in_flight:
            return None
        choices = list(self._in_flight)
        work, result = self._in_flight.pop(choices[_hash(self._seed, self._ticks) % len(choices)])
        if isinstance(work, VerifyWork):
            self.devices.deliver(work)
        return WorkDone(work.work_id, result, self.now() - 1, self.now())


__all__ = [
    "EOS",
    "VOCAB",
    "DrafterLost",
    "DrafterReady",
    "RequestAborted",
    "ToyBackend",
    "ToyDevices",
    "ToyModel",
    "WorkFailed",
]

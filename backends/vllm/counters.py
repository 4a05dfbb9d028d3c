"""What happened so far in an engine, and what of it is reported with a step's statistics.

Law of this file: counts only; no clock, nothing of vLLM. On the critical path: constant time per step, but for one
number per sub-batch. What crosses to the front end's process is a flat dictionary of integers (seconds as
microseconds): counters as what was added since the last report, gauges as they are. Sums of reports are thus right
whichever front end gets which of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from minedraft.policy import Mode

TOTALS: Final = (
    "waits",
    "empty_plans",
    "strays",
    "late_drafts",
    "drafters_lost",
    "preemptions",
    "trims",
    "journals_lost",
    "policies_replaced",
)
"""Counters that are reported as they are, by their names in `Counters`."""

TOTALS_S: Final = ("wait_s", "draft_s", "overlap_s")
"""Counters of seconds."""

_ROUNDS: Final = {mode: f"rounds/{mode}" for mode in Mode}

_MAX_INTERVALS: Final = 1024
"""Verifications remembered while one draft job runs; with more, the share that is hidden is underestimated."""


@dataclass(slots=True)
class Counters:
    """What happened so far, for metrics and tests.

    Attributes:
        steps: verifications that vLLM ran.
        rounds: the same by the mode that was in force.
        waits: times that `schedule()` waited for the drafter.
        wait_s: seconds spent in `schedule()` waiting for the drafter.
        empty_plans: `schedule()` calls that ended with nothing to verify while drafts were awaited.
        draft_s: seconds that the drafter spent on jobs that asked for drafts and were answered in time.
        overlap_s: those of them in which a verification was running.
        strays: requests that vLLM treated otherwise than planned.
        late_drafts: draft works given up.
        drafters_lost: times that the drafter went away.
        preemptions: requests that lost their target KV by the core's decision.
        trims: requests that gave back blocks of rejected drafts.
        journals_lost: journals that were given up: their file took no more, or a policy was replaced.
        policies_replaced: policies that failed and gave way to the default of their slot.
    """

    steps: int = 0
    rounds: dict[Mode, int] = field(default_factory=lambda: dict.fromkeys(Mode, 0))
    waits: int = 0
    wait_s: float = 0.0
    empty_plans: int = 0
    draft_s: float = 0.0
    overlap_s: float = 0.0
    strays: int = 0
    late_drafts: int = 0
    drafters_lost: int = 0
    preemptions: int = 0
    trims: int = 0
    journals_lost: int = 0
    policies_replaced: int = 0
    _verified: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_INTERVALS))
    _reported: dict[str, int] = field(default_factory=dict)

    def started(self, mode: Mode) -> None:
        """VLLM runs a verification under this mode."""
        self.steps += 1
        self.rounds[mode] += 1

    def verified(self, started_s: float, ended_s: float, *, drafting: bool) -> None:
        """A verification is over.

        Args:
            started_s: seconds on some clock.
            ended_s: likewise.
            drafting: whether a draft job is out; else nothing can have been hidden behind it.
        """
        if drafting:
            self._verified.append((started_s, ended_s))
        else:
            self._verified.clear()

    def drafted(self, started_s: float, ended_s: float) -> None:
        """A draft job was answered; times on the clock of `verified`. No verification is running."""
        self.draft_s += ended_s - started_s
        while self._verified:
            start, end = self._verified[0]
            self.overlap_s += max(0.0, min(end, ended_s) - max(start, started_s))
            if end > ended_s:  # it may hide some of the next job too
                return
            self._verified.popleft()

    def ingested(self, ended_s: float) -> None:
        """A job that asked for no drafts was answered: that is no drafting, and hides nothing of any."""
        while self._verified and self._verified[0][1] <= ended_s:
            self._verified.popleft()

    def report(self, drafter_up: bool, batch_sizes: Sequence[int], num_active: int) -> dict[str, int]:
        """What is new since the last call, under keys `name` or `name/label`.

        Args:
            drafter_up: whether drafts can be had now.
            batch_sizes: requests per sub-batch.
            num_active: sub-batches that the mode uses, from the first on; the imbalance is theirs.
        """
        now = {name: getattr(self, name) for name in TOTALS}
        for name in TOTALS_S:
            now[name] = round(getattr(self, name) * 1e6)
        for mode, count in self.rounds.items():
            now[_ROUNDS[mode]] = count
        before, self._reported = self._reported, now
        report = {key: value - before.get(key, 0) for key, value in now.items() if value != before.get(key, 0)}
        report["drafter_up"] = int(drafter_up)
        for i, size in enumerate(batch_sizes):
            report[f"batch_size/{i}"] = size
        active = batch_sizes[:num_active]
        report["batch_imbalance"] = max(active) - min(active)
        return report

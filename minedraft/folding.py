"""A run of any length in a fixed amount of memory: what ended requests and past works come to (`Folded`).

Counts, sums and shares of time stay exact but for rounding; percentiles come from histograms (`PERCENTILE_ERROR`).

Law of this file: columns come in and are added up; nothing is kept per request or per work but for what is not settled
yet.
"""

from __future__ import annotations

import copy
import math
from typing import Final

import numpy as np

from minedraft.histogram import PERCENTILE_ERROR, Histogram
from minedraft.intervals import BusyTime, length_s, part_after, part_before, union
from minedraft.run_data import COMPLETED, OPEN, Bools, Floats, Ints, RunData
from minedraft.slo import Slo
from minedraft.steady_state import NUM_PARTS
from minedraft.tally import LATENCIES, Tally, decode_spans, drafter_spans_s, known, latencies_s, num_by_status, num_good

MAX_BLOCKS: Final = 4096  # of arrivals, whose mean backlogs are kept


class Folded:
    """The requests of a run that have ended, and its works up to a moment, as totals.

    Args:
        slo: limits for goodput.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        self._slo = slo
        self._num_requests = np.zeros(4, dtype=np.int64)
        self._num_good = 0
        self._tokens_in = 0
        self._tokens_out = 0
        self._start_s = math.inf
        self._last_end_s = -math.inf
        self._last_completed_s = -math.inf
        self._histograms = {name: Histogram() for name in (*LATENCIES, "itl")}
        self._present = _Present()
        self._backlog = _Backlog()
        self._times = _Times()

    def fold(self, run: RunData, settled_s: float) -> None:
        """Take in the ended requests of a run, and its works; all but the open requests may be forgotten.

        Args:
            run: what came since the last time, and the requests that were open then. Gaps of open requests are told
                when those have ended.
            settled_s: no work that hasn't come back yet began before this moment.
        """
        self._add(run)
        is_open = run.status == OPEN
        self._present.settle(float(run.arrival_s[is_open].min(initial=run.last_event_s)))
        # A request that is being decoded goes on to a last token that nobody knows yet.
        last_token_s = known(run.last_token_s[is_open])
        self._times.fold(run, float(last_token_s.min(initial=min(settled_s, self._last_end_s))))

    @property
    def device_times_s(self) -> tuple[float, float]:
        """Device time of the verify works that were folded, and of the works that drafted, in seconds."""
        return self._times.verify_s, self._times.draft_s

    def tally(self, rest: RunData) -> Tally:
        """Of the whole run, of which `rest` came since the last fold."""
        return copy.deepcopy(self)._finish(rest)

    def _finish(self, rest: RunData) -> Tally:
        self._add(rest)
        num_open, num_completed, num_aborted, num_errors = self._num_requests.tolist()
        start_s = self._start_s
        stop_s = max(start_s, rest.last_event_s if num_open else self._last_end_s)
        times = self._times
        target_busy_s, draft_busy_s = times.busy_until(rest, stop_s)
        times.fold(rest, math.inf)
        return Tally(
            num_requests=(num_open, num_completed, num_aborted, num_errors),
            num_good=self._num_good,
            total_input_tokens=self._tokens_in,
            total_output_tokens=self._tokens_out,
            start_s=start_s,
            last_arrival_s=max(start_s, self._backlog.last_s),
            stop_s=stop_s,
            makespan=self._last_completed_s - start_s if num_completed else 0.0,
            max_concurrent=self._present.most(),
            backlog_by_tenth=self._backlog.by_tenth(),
            latencies={name: histogram.stats() for name, histogram in self._histograms.items()},
            percentile_error=PERCENTILE_ERROR,
            rounds=times.num_verify_works,
            verify_s=times.verify_s,
            num_draft_works=times.num_draft_works,
            draft_s=times.draft_s,
            target_utilisation=_share(target_busy_s, stop_s - start_s),
            draft_utilisation=_share(draft_busy_s, stop_s - start_s),
            overlapped_draft_share=_share(times.overlapped_s, times.draft_s),
            decode_verify_share=_share(times.decode_busy_s, times.decode_s),
        )

    def _add(self, run: RunData) -> None:
        done, is_open = run.status == COMPLETED, run.status == OPEN
        self._num_requests[OPEN] = 0  # those of the last time came again
        self._num_requests += num_by_status(run)
        latencies = latencies_s(run, done)
        self._num_good += num_good(self._slo, latencies)
        self._tokens_in += int(run.prompt_len[done].sum())
        self._tokens_out += int(run.output_len[done].sum())
        for name, values_s in latencies.items():
            self._histograms[name].add(known(values_s))
        self._histograms["itl"].add(run.gaps_s)
        self._start_s = float(run.arrival_s.min(initial=self._start_s))
        self._last_end_s = float(run.end_s[~is_open].max(initial=self._last_end_s))
        self._last_completed_s = float(run.end_s[done].max(initial=self._last_completed_s))
        first_s = float(run.arrival_s[done | is_open].min(initial=math.inf))
        self._present.add(run.arrival_s[done], run.end_s[done], first_s)
        self._backlog.add(run.arrival_s, run.end_s, is_open)


class _Present:
    """Completed requests that are present in each whole second, counted from the first arrival of one of them."""

    def __init__(self) -> None:
        self._origin_s = math.inf
        self._second = 0  # all before this one are settled
        self._before = 0  # present in the one before it
        self._change: Ints = np.zeros(0, dtype=np.int64)  # by second, from that one on
        self._most = 0

    def add(self, arrival_s: Floats, end_s: Floats, origin_s: float) -> None:
        """Take completed requests.

        Args:
            arrival_s: of each.
            end_s: of each.
            origin_s: first arrival of all that have completed or still may, as far as is known; asked once.
        """
        if not arrival_s.size:
            return
        if not math.isfinite(self._origin_s):
            self._origin_s = origin_s
        enter = np.maximum(np.floor(arrival_s - self._origin_s).astype(np.int64) - self._second, 0)
        leave = np.maximum(np.floor(end_s - self._origin_s).astype(np.int64) - self._second, 0) + 1
        size = max(len(self._change), int(leave.max()) + 1)
        change = np.bincount(enter, minlength=size) - np.bincount(leave, minlength=size)
        change[: len(self._change)] += self._change
        self._change = change

    def settle(self, moment_s: float) -> None:
        """Nobody who is added later arrived before this moment."""
        if not math.isfinite(self._origin_s):
            return
        num = max(0, math.floor(moment_s - self._origin_s) - self._second)
        self._most = self._most_before(num)
        self._before += int(self._change[:num].sum())
        self._change = self._change[num:]
        self._second += num

    def most(self) -> int:
        """The most in any second."""
        return self._most_before(len(self._change))

    def _most_before(self, num: int) -> int:
        return int((self._before + self._change[:num].cumsum()).max(initial=self._most))


class _Backlog:
    """`steady_state.backlog_by_tenth` of any number of requests: mean backlogs over blocks of arrivals.

    Blocks are of one length, which doubles when there are too many of them. A tenth that begins or ends within a block
    gets its share of it.

    Attributes:
        last_s: last arrival; -inf before any.
    """

    def __init__(self) -> None:
        self._num_arrived = 0
        self._num_gone = 0
        self._num_open = 0  # of those that arrived; they are told again
        self._first_s = math.inf
        self.last_s = -math.inf
        self._block_len = 1
        self._sums = np.zeros(0)  # of whole blocks
        self._rest = np.zeros(0)  # fewer than a block

    def add(self, arrival_s: Floats, end_s: Floats, is_open: Bools) -> None:
        """Take requests: those that were open the last time, in the same order, then those that arrived since."""
        new_s = np.sort(arrival_s[self._num_open :])
        gone = np.searchsorted(np.sort(end_s[~is_open]), new_s, side="right")
        order = self._num_arrived + np.arange(len(new_s))
        self._append(np.maximum(order - self._num_gone - gone, 0).astype(np.float64))
        self._num_arrived += len(new_s)
        self._num_open = int(is_open.sum())
        self._num_gone += len(is_open) - self._num_open
        self._first_s = float(new_s.min(initial=self._first_s))
        self.last_s = float(new_s.max(initial=self.last_s))

    def _append(self, values: Floats) -> None:
        values = np.concatenate([self._rest, values])
        whole = len(values) - len(values) % self._block_len
        self._rest = values[whole:]
        self._sums = np.concatenate([self._sums, values[:whole].reshape(-1, self._block_len).sum(axis=1)])
        while len(self._sums) > MAX_BLOCKS:
            if len(self._sums) % 2:  # half a block of the new length
                self._rest = np.concatenate([np.full(self._block_len, self._sums[-1] / self._block_len), self._rest])
            pairs = len(self._sums) // 2
            self._sums = self._sums[: 2 * pairs].reshape(pairs, 2).sum(axis=1)
            self._block_len *= 2

    def by_tenth(self) -> tuple[float, ...]:
        """See `backlog_by_tenth`."""
        number = self._num_arrived
        if number < NUM_PARTS or self._first_s == self.last_s:
            return ()
        places = np.append(np.arange(len(self._sums) + 1) * self._block_len, number)
        sums = np.concatenate([[0.0], self._sums, [self._rest.sum()]]).cumsum()
        sizes = [len(part) for part in np.array_split(np.empty(number, dtype=np.bool_), NUM_PARTS)]
        edges = np.concatenate([[0], np.cumsum(sizes)])
        return tuple((np.diff(np.interp(edges, places, sums)) / sizes).tolist())


class _Times:
    """Seconds of work, and how much of them overlap what else.

    Attributes:
        num_verify_works: that came back.
        verify_s: their device time, summed.
        num_draft_works: that came back, and asked for drafts.
        draft_s: their device time, summed.
        overlapped_s: seconds of drafting, up to the settled moment, while the target was verifying.
        decode_s: seconds up to there in which at least one request was between its first and its last token.
        decode_busy_s: of those, seconds in which the target was verifying.
    """

    def __init__(self) -> None:
        self.num_verify_works = 0
        self.verify_s = 0.0
        self.num_draft_works = 0
        self.draft_s = 0.0
        self.overlapped_s = 0.0
        self.decode_s = 0.0
        self.decode_busy_s = 0.0
        self._target_busy_s = 0.0  # up to the settled moment, as is the next
        self._draft_busy_s = 0.0
        self._settled_s = -math.inf
        # What lies after that moment.
        self._verify = self._draft = self._drafter = self._decode = np.empty((0, 2))

    def fold(self, run: RunData, settled_s: float) -> None:
        """Take works, and the times in which requests were decoded; see `Folded.fold`."""
        settled_s = max(settled_s, self._settled_s)
        self.num_verify_works += len(run.verify_spans_s)
        self.verify_s += length_s(run.verify_spans_s)
        self.num_draft_works += len(run.draft_spans_s)
        self.draft_s += length_s(run.draft_spans_s)
        verify = np.concatenate([self._verify, run.verify_spans_s])
        draft = np.concatenate([self._draft, run.draft_spans_s])
        drafter = np.concatenate([self._drafter, drafter_spans_s(run)])
        is_open = run.status == OPEN
        decode = part_after(decode_spans(run.first_token_s, run.last_token_s), self._settled_s)
        ended = decode_spans(run.first_token_s[~is_open], run.last_token_s[~is_open])
        settled_verify, settled_draft = part_before(verify, settled_s), part_before(draft, settled_s)
        settled_decode = union(part_before(np.concatenate([self._decode, decode]), settled_s))
        busy = BusyTime(settled_verify)
        self._target_busy_s += length_s(union(settled_verify))
        self._draft_busy_s += length_s(union(part_before(drafter, settled_s)))
        self.overlapped_s += busy.within_s(settled_draft)
        self.decode_s += length_s(settled_decode)
        self.decode_busy_s += busy.within_s(settled_decode)
        self._verify, self._draft = part_after(verify, settled_s), part_after(draft, settled_s)
        self._drafter = part_after(drafter, settled_s)
        self._decode = union(part_after(np.concatenate([self._decode, ended]), settled_s))
        self._settled_s = settled_s

    def busy_until(self, rest: RunData, stop_s: float) -> tuple[float, float]:
        """Seconds up to a moment, which is not before the settled one, in which the target and the drafter worked."""
        verify = part_before(np.concatenate([self._verify, rest.verify_spans_s]), stop_s)
        drafter = part_before(np.concatenate([self._drafter, drafter_spans_s(rest)]), stop_s)
        return self._target_busy_s + length_s(union(verify)), self._draft_busy_s + length_s(union(drafter))


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0

"""What the requests and works of a run come to (`Tally`), and how it is computed from a run that was kept whole.

Law of this file: pure functions of arrays; `minedraft.folding` computes the same of a run that wasn't kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from minedraft.intervals import BusyTime, length_s, union
from minedraft.run_data import ABORTED, COMPLETED, ERROR, OPEN, Bools, Floats, Ints, LatencyStats, RunData
from minedraft.slo import Slo
from minedraft.steady_state import backlog_by_tenth

LATENCIES: Final = ("ttft", "tpot", "e2el", "queue", "service")


@dataclass(frozen=True, slots=True)
class Tally:
    """Totals and distributions over requests, and shares of time; see `Summary` for what they mean.

    Attributes:
        num_requests: by how they stand, indexed by OPEN, COMPLETED, ABORTED and ERROR.
        num_good: of those completed, requests that keep the `Slo`; 0 without one.
        total_input_tokens: prompt tokens of completed requests.
        total_output_tokens: their committed tokens.
        start_s: first arrival.
        last_arrival_s: last arrival.
        stop_s: end of the last request, or the last event if some request has not ended.
        makespan: see `Summary`.
        max_concurrent: see `Summary.max_concurrent_requests`.
        backlog_by_tenth: see `Summary`.
        latencies: by name, those in `LATENCIES`, and "itl".
        percentile_error: see `Summary`.
        rounds: verify works that came back.
        verify_s: their device time, summed.
        num_draft_works: works that came back with what they were asked to draft.
        draft_s: their device time, summed.
        target_utilisation: see `Summary`, as are the next three.
        draft_utilisation: see there.
        overlapped_draft_share: see there.
        decode_verify_share: see there.
    """

    num_requests: tuple[int, int, int, int]
    num_good: int
    total_input_tokens: int
    total_output_tokens: int
    start_s: float
    last_arrival_s: float
    stop_s: float
    makespan: float
    max_concurrent: int
    backlog_by_tenth: tuple[float, ...]
    latencies: Mapping[str, LatencyStats]
    percentile_error: float
    rounds: int
    verify_s: float
    num_draft_works: int
    draft_s: float
    target_utilisation: float
    draft_utilisation: float
    overlapped_draft_share: float
    decode_verify_share: float


def tally(run: RunData, slo: Slo | None = None) -> Tally:
    """Of a run that was kept whole."""
    done = run.status == COMPLETED
    start_s, stop_s = window(run)
    latencies = latencies_s(run, done)
    busy = BusyTime(run.verify_spans_s)
    return Tally(
        num_requests=num_by_status(run),
        num_good=num_good(slo, latencies),
        total_input_tokens=int(run.prompt_len[done].sum()),
        total_output_tokens=int(run.output_len[done].sum()),
        start_s=start_s,
        last_arrival_s=float(run.arrival_s.max(initial=start_s)),
        stop_s=stop_s,
        makespan=float(run.end_s[done].max() - start_s) if done.any() else 0.0,
        max_concurrent=_max_concurrent(run.arrival_s[done], run.end_s[done]),
        backlog_by_tenth=backlog_by_tenth(run.arrival_s, run.end_s),
        latencies={
            **{name: LatencyStats.of_seconds(known(values)) for name, values in latencies.items()},
            "itl": LatencyStats.of_seconds(run.gaps_s),
        },
        percentile_error=0.0,
        rounds=len(run.verify_spans_s),
        verify_s=length_s(run.verify_spans_s),
        num_draft_works=len(run.draft_spans_s),
        draft_s=length_s(run.draft_spans_s),
        target_utilisation=busy.share_of(np.array([[start_s, stop_s]])),
        draft_utilisation=BusyTime(drafter_spans_s(run)).share_of(np.array([[start_s, stop_s]])),
        overlapped_draft_share=busy.share_of(run.draft_spans_s),
        decode_verify_share=busy.share_of(union(decode_spans(run.first_token_s, run.last_token_s))),
    )


def drafter_spans_s(run: RunData) -> Floats:
    """When the drafter was busy, whatever with."""
    return np.concatenate([run.draft_spans_s, run.ingest_spans_s])


def num_by_status(run: RunData) -> tuple[int, int, int, int]:
    """How many requests are OPEN, COMPLETED, ABORTED and ERROR."""
    num_open, num_completed, num_aborted, num_errors = [
        int((run.status == status).sum()) for status in (OPEN, COMPLETED, ABORTED, ERROR)
    ]
    return num_open, num_completed, num_aborted, num_errors


def latencies_s(run: RunData, done: Bools) -> dict[str, Floats]:
    """Those in `LATENCIES`, in seconds, one per request that is done; NaN where a request lacks one."""
    arrival_s, end_s, first_scheduled_s = run.arrival_s[done], run.end_s[done], run.first_scheduled_s[done]
    ttft = run.first_token_s[done] - arrival_s
    e2el = end_s - arrival_s
    return {
        "ttft": ttft,
        "tpot": _tpot(ttft, e2el, run.output_len[done]),
        "e2el": e2el,
        "queue": first_scheduled_s - arrival_s,
        "service": end_s - first_scheduled_s,
    }


def num_good(slo: Slo | None, latencies: Mapping[str, Floats]) -> int:
    """How many requests keep the limits, if there are any."""
    return 0 if slo is None else slo.num_good(latencies["ttft"], latencies["tpot"], latencies["e2el"])


def known(values: Floats) -> Floats:
    """Those that are not NaN."""
    return values[~np.isnan(values)]


def window(run: RunData) -> tuple[float, float]:
    """First arrival, and the end of `Summary.duration`."""
    if not run.arrival_s.size:
        return 0.0, 0.0
    start_s = float(run.arrival_s.min())
    stop_s = run.last_event_s if (run.status == OPEN).any() else float(run.end_s.max())
    return start_s, max(start_s, stop_s)


def decode_spans(first_token_s: Floats, last_token_s: Floats) -> Floats:
    """From the first to the last token so far of each request that has one."""
    decoding = ~np.isnan(first_token_s)
    return np.column_stack([first_token_s[decoding], last_token_s[decoding]])


def _tpot(ttft: Floats, e2el: Floats, tokens: Ints) -> Floats:
    """Seconds per token after the first; NaN for a request with fewer than two."""
    several = tokens > 1
    tpot = np.full(len(tokens), np.nan)
    tpot[several] = (e2el[several] - ttft[several]) / (tokens[several] - 1)
    return tpot


def _max_concurrent(arrival_s: Floats, end_s: Floats) -> int:
    """Most intervals that touch one whole second since the first of them begins."""
    if not arrival_s.size:
        return 0
    first = arrival_s.min()
    enter, leave = np.floor(arrival_s - first), np.floor(end_s - first) + 1.0
    times = np.concatenate([leave, enter])  # leave first: a stable sort keeps that among equal times
    change = np.concatenate([np.full(len(leave), -1), np.full(len(enter), 1)])
    return int(change[np.argsort(times, kind="stable")].cumsum().max())

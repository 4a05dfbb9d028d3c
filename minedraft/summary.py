"""The figures of a run: what each means, and how it is computed from columns.

Names are those of `vllm bench serve --save-result` (vLLM 0.32, `vllm/benchmarks/serve.py`) where it has the
figure; latencies in milliseconds, everything else in seconds, tokens and shares (0 to 1) unless said
otherwise. A figure of nothing (the mean of no values, a rate over no time) is 0.0, as in vLLM.

Law of this file: pure functions of arrays; nothing here knows events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from minedraft.intervals import BusyTime, length_s, union
from minedraft.run_data import ABORTED, COMPLETED, ERROR, OPEN, Floats, Ints, LatencyStats, RunData
from minedraft.work import ZeroDraft


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps, in milliseconds; None is no limit. As vLLM's `--goodput`."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run. Token totals, throughputs and latencies are those of completed requests.

    Attributes:
        duration: seconds from the first arrival to the end of the last request, or to the last event if some
            request has not ended.
        completed: requests that ended by a stop or by length.
        failed: all others.
        num_aborted: of those failed: the client went away.
        num_errors: of those failed: refused, or failed by the devices.
        num_unfinished: of those failed: still there when the stream ended.
        total_input_tokens: prompt tokens.
        total_output_tokens: committed tokens.
        request_throughput: requests per second.
        request_goodput: requests per second that keep the `Slo`; None without one. A request with one token
            keeps any TPOT limit.
        output_throughput: committed tokens per second.
        total_token_throughput: prompt and committed tokens per second.
        max_output_tokens_per_s: most tokens committed, for any request, within one whole second counted from
            the first arrival (vLLM counts chunks here).
        max_concurrent_requests: most completed requests present during a whole second, as vLLM counts them.
        ttft: from arrival to the event that brings the first committed token.
        tpot: per request with two tokens or more, (e2el - ttft) / (tokens - 1).
        itl: between two chunks of a request. A chunk is what one verification commits; never read as per
            token.
        e2el: from arrival to the end.
        queue: from arrival to the submission of the first target work that names the request.
        service: from there to the end.
        makespan: seconds from the first arrival to the end of the last completed request.
        spec_decode_acceptance_rate: accepted per verified draft token, in percent.
        spec_decode_acceptance_length: 1 + accepted tokens per draft.
        spec_decode_num_drafts: verified entries with drafts.
        spec_decode_draft_tokens: draft tokens verified.
        spec_decode_accepted_tokens: draft tokens accepted (before a cut at a stop boundary).
        spec_decode_per_position_acceptance_rates: share of drafts whose token at this position was accepted;
            unconditional, never increasing.
        num_drafted_tokens: tokens that the drafter made; more than were verified if some went to waste.
        rounds: verify works that came back.
        mean_batch_size: entries per verify work.
        mean_running_requests: requests in sub-batches, mean over verify works.
        max_running_requests: the most.
        mean_imbalance: largest minus smallest sub-batch, mean over verify works; 0 with one sub-batch.
        zero_draft_causes: entries without drafts by cause (`ZeroDraft`, lower case).
        num_preemptions: times that a request was given to the target in a new stay in the running set. A
            preempted request that never runs again isn't seen.
        num_failed_works: works that came to nothing.
        num_drafter_losses: times the drafter was lost.
        mean_verify_ms: device time of a verify work.
        mean_draft_ms: device time of a draft work.
        target_utilisation: busy share of `duration` of the target's device group.
        draft_utilisation: the same of the drafter's.
        overlapped_draft_share: seconds of drafting while the target was verifying / seconds of drafting. 0
            for sequential speculative decoding, 1 if all drafting hides behind verification.
        decode_verify_share: busy share of the target while at least one request was between its first and its
            last token.
        num_target_devices: devices of the target's group.
        num_draft_devices: devices of the drafter's group.
        request_throughput_per_device: over all devices of both groups, as are the next two.
        output_throughput_per_device: see above.
        total_token_throughput_per_device: see above.
    """

    duration: float
    completed: int
    failed: int
    num_aborted: int
    num_errors: int
    num_unfinished: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    queue: LatencyStats
    service: LatencyStats
    makespan: float
    spec_decode_acceptance_rate: float
    spec_decode_acceptance_length: float
    spec_decode_num_drafts: int
    spec_decode_draft_tokens: int
    spec_decode_accepted_tokens: int
    spec_decode_per_position_acceptance_rates: tuple[float, ...]
    num_drafted_tokens: int
    rounds: int
    mean_batch_size: float
    mean_running_requests: float
    max_running_requests: int
    mean_imbalance: float
    zero_draft_causes: Mapping[str, int]
    num_preemptions: int
    num_failed_works: int
    num_drafter_losses: int
    mean_verify_ms: float
    mean_draft_ms: float
    target_utilisation: float
    draft_utilisation: float
    overlapped_draft_share: float
    decode_verify_share: float
    num_target_devices: int
    num_draft_devices: int
    request_throughput_per_device: float
    output_throughput_per_device: float
    total_token_throughput_per_device: float

    def to_dict(self) -> dict[str, Any]:
        """Flat and ready for JSON: `ttft` becomes `mean_ttft_ms`, `p99_ttft_ms` and so on."""
        flat: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LatencyStats):
                flat[f"mean_{field.name}_ms"] = value.mean
                flat[f"median_{field.name}_ms"] = value.median
                flat[f"std_{field.name}_ms"] = value.std
                for p, point in value.percentiles.items():
                    flat[f"p{p}_{field.name}_ms"] = point
            elif isinstance(value, tuple):
                flat[field.name] = list(value)
            elif isinstance(value, Mapping):
                flat[field.name] = dict(value)
            else:
                flat[field.name] = value
        return flat


def summarize(
    run: RunData, *, slo: Slo | None = None, num_target_devices: int = 1, num_draft_devices: int = 1
) -> Summary:
    """All figures of a run."""
    done = run.status == COMPLETED
    num_done = int(done.sum())
    start_s, stop_s = _window(run)
    duration = stop_s - start_s
    tokens_in, tokens_out = int(run.prompt_len[done].sum()), int(run.output_len[done].sum())
    rates = [_ratio(n, duration) for n in (num_done, tokens_out, tokens_in + tokens_out)]
    num_devices = num_target_devices + num_draft_devices
    per_device = [_ratio(rate, num_devices) for rate in rates]
    e2el = run.end_s[done] - run.arrival_s[done]
    ttft = run.first_token_s[done] - run.arrival_s[done]
    tpot = _tpot(ttft, e2el, run.output_len[done])
    queue = run.first_scheduled_s[done] - run.arrival_s[done]
    service = run.end_s[done] - run.first_scheduled_s[done]
    accepted = int(run.num_accepted_at.sum())
    rounds = len(run.verify_spans_s)
    sizes = _Sizes.of(run.batch_sizes)
    busy = BusyTime(run.verify_spans_s)
    return Summary(
        duration=duration,
        completed=num_done,
        failed=len(done) - num_done,
        num_aborted=int((run.status == ABORTED).sum()),
        num_errors=int((run.status == ERROR).sum()),
        num_unfinished=int((run.status == OPEN).sum()),
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=rates[0],
        request_goodput=None if slo is None else _ratio(_num_good(slo, ttft, tpot, e2el), duration),
        output_throughput=rates[1],
        total_token_throughput=rates[2],
        max_output_tokens_per_s=float(run.max_tokens_in_a_second),
        max_concurrent_requests=_max_concurrent(run.arrival_s[done], run.end_s[done]),
        ttft=LatencyStats.of_seconds(_known(ttft)),
        tpot=LatencyStats.of_seconds(_known(tpot)),
        itl=run.itl,
        e2el=LatencyStats.of_seconds(e2el),
        queue=LatencyStats.of_seconds(_known(queue)),
        service=LatencyStats.of_seconds(_known(service)),
        makespan=float(run.end_s[done].max() - start_s) if num_done else 0.0,
        spec_decode_acceptance_rate=100.0 * _ratio(accepted, run.num_draft_tokens),
        spec_decode_acceptance_length=1.0 + _ratio(accepted, run.num_drafts),
        spec_decode_num_drafts=run.num_drafts,
        spec_decode_draft_tokens=run.num_draft_tokens,
        spec_decode_accepted_tokens=accepted,
        spec_decode_per_position_acceptance_rates=tuple([_ratio(int(n), run.num_drafts) for n in run.num_accepted_at]),
        num_drafted_tokens=run.num_drafted_tokens,
        rounds=rounds,
        mean_batch_size=_ratio(run.num_entries, rounds),
        mean_running_requests=sizes.mean_running,
        max_running_requests=sizes.max_running,
        mean_imbalance=sizes.mean_imbalance,
        zero_draft_causes={
            cause.name.lower(): run.zero_draft[cause] for cause in ZeroDraft if cause is not ZeroDraft.NONE
        },
        num_preemptions=run.num_preemptions,
        num_failed_works=run.num_failed_works,
        num_drafter_losses=run.num_drafter_losses,
        mean_verify_ms=1000.0 * _ratio(length_s(run.verify_spans_s), rounds),
        mean_draft_ms=1000.0 * _ratio(length_s(run.draft_spans_s), len(run.draft_spans_s)),
        target_utilisation=busy.share_of(np.array([[start_s, stop_s]])),
        draft_utilisation=BusyTime(run.draft_spans_s).share_of(np.array([[start_s, stop_s]])),
        overlapped_draft_share=busy.share_of(run.draft_spans_s),
        decode_verify_share=busy.share_of(_decode_spans(run)),
        num_target_devices=num_target_devices,
        num_draft_devices=num_draft_devices,
        request_throughput_per_device=per_device[0],
        output_throughput_per_device=per_device[1],
        total_token_throughput_per_device=per_device[2],
    )


def detailed(run: RunData) -> dict[str, list[Any]]:
    """The per-request lists of `--save-detailed`, all requests in order of arrival, in seconds and tokens.

    `start_times` are arrivals. What a request doesn't have is 0.0, and `errors` says why, as in vLLM.
    """
    names = {OPEN: "unfinished", COMPLETED: "", ABORTED: "aborted", ERROR: "error"}
    columns = {
        "ttfts": run.first_token_s - run.arrival_s,
        "latencies": run.end_s - run.arrival_s,
        "queue_times": run.first_scheduled_s - run.arrival_s,
    }
    return {
        "input_lens": run.prompt_len.tolist(),
        "output_lens": run.output_len.tolist(),
        "start_times": run.arrival_s.tolist(),
        **{name: np.nan_to_num(column).tolist() for name, column in columns.items()},
        "errors": [names[status] for status in run.status.tolist()],
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _tpot(ttft: Floats, e2el: Floats, tokens: Ints) -> Floats:
    """Seconds per token after the first; NaN for a request with fewer than two."""
    several = tokens > 1
    tpot = np.full(len(tokens), np.nan)
    tpot[several] = (e2el[several] - ttft[several]) / (tokens[several] - 1)
    return tpot


def _num_good(slo: Slo, ttft: Floats, tpot: Floats, e2el: Floats) -> int:
    good = np.ones(len(e2el), dtype=np.bool_)
    for limit_ms, values_s in ((slo.ttft_ms, ttft), (slo.tpot_ms, tpot), (slo.e2el_ms, e2el)):
        if limit_ms is not None:
            good &= ~(values_s * 1000.0 > limit_ms)  # NaN keeps every limit
    return int(good.sum())


def _window(run: RunData) -> tuple[float, float]:
    """First arrival, and the end of `Summary.duration`."""
    if not run.arrival_s.size:
        return 0.0, 0.0
    start_s = float(run.arrival_s.min())
    stop_s = run.last_event_s if (run.status == OPEN).any() else float(run.end_s.max())
    return start_s, max(start_s, stop_s)


def _max_concurrent(arrival_s: Floats, end_s: Floats) -> int:
    """Most intervals that touch one whole second since the first of them begins."""
    if not arrival_s.size:
        return 0
    first = arrival_s.min()
    enter, leave = np.floor(arrival_s - first), np.floor(end_s - first) + 1.0
    times = np.concatenate([leave, enter])  # leave first: a stable sort keeps that among equal times
    change = np.concatenate([np.full(len(leave), -1), np.full(len(enter), 1)])
    return int(change[np.argsort(times, kind="stable")].cumsum().max())


def _decode_spans(run: RunData) -> Floats:
    """Disjoint spans in which at least one request is between its first and its last token."""
    decoding = ~np.isnan(run.first_token_s)
    return union(np.column_stack([run.first_token_s[decoding], run.last_token_s[decoding]]))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Means over verify works of what the sizes of the sub-batches say."""

    mean_running: float
    max_running: int
    mean_imbalance: float

    @classmethod
    def of(cls, counts: Mapping[tuple[int, ...], int]) -> _Sizes:
        seen = {sizes: n for sizes, n in counts.items() if sizes}
        works = sum(seen.values())
        running = sum(n * sum(sizes) for sizes, n in seen.items())
        spread = sum(n * (max(sizes) - min(sizes)) for sizes, n in seen.items())
        most = max((sum(sizes) for sizes in seen), default=0)
        return cls(_ratio(running, works), most, _ratio(spread, works))

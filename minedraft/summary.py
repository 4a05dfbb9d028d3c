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

from minedraft.folding import Folded
from minedraft.run_data import ABORTED, COMPLETED, ERROR, OPEN, LatencyStats, RunData
from minedraft.slo import Slo
from minedraft.tally import tally
from minedraft.work import ZeroDraft

__all__ = ["Slo", "Summary", "detailed", "summarize"]


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
        slo_attainment: requests that keep the `Slo`, as a share of all that arrived; None without one. Who failed,
            for whatever reason, has not kept it.
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
        empty_batch_share: verify works that saw another sub-batch empty when they were submitted, as a share of all;
            0 with one sub-batch. Near 1 psd is sd.
        backlog_by_tenth: see `minedraft.steady_state.backlog_by_tenth`; it keeps rising under overload.
        arrival_span: from the first arrival to the last, in seconds.
        zero_draft_causes: entries without drafts by cause (`ZeroDraft`, lower case).
        num_preemptions: times that a request was given to the target in a new stay in the running set. A
            preempted request that never runs again isn't seen.
        num_failed_works: works that came to nothing.
        num_drafter_losses: times the drafter was lost.
        mean_verify_ms: device time of a verify work.
        mean_draft_ms: device time of a work that drafts.
        target_utilisation: share of `duration` in which the target was busy.
        draft_utilisation: the same of the drafter. Devices that both share were busy for the sum of the two.
        overlapped_draft_share: seconds of drafting while the target was verifying / seconds of drafting. 0
            for sequential speculative decoding, 1 if all drafting hides behind verification. Works in which the drafter
            only takes tokens in are no drafting; they count in draft_utilisation.
        decode_verify_share: busy share of the target while at least one request was between its first and its
            last token.
        num_target_devices: devices of the target's group.
        num_draft_devices: devices of the drafter's group.
        request_throughput_per_device: over all devices of both groups, as are the next two.
        output_throughput_per_device: see above.
        total_token_throughput_per_device: see above.
        percentile_error: largest relative error of medians and percentiles; 0 where all values were kept, which is so
            unless a run is long (see `MetricsCollector`).
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
    slo_attainment: float | None
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
    empty_batch_share: float
    backlog_by_tenth: tuple[float, ...]
    arrival_span: float
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
    percentile_error: float = 0.0

    @property
    def filling_share(self) -> float:
        """One mean service time as a share of `arrival_span`: while an empty system fills up."""
        return _ratio(self.service.mean / 1000.0, self.arrival_span)

    @property
    def waiting_share(self) -> float:
        """Mean time from arrival to service, as a share of the mean service time."""
        return _ratio(self.queue.mean, self.service.mean)

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
    run: RunData,
    *,
    slo: Slo | None = None,
    num_target_devices: int = 1,
    num_draft_devices: int = 1,
    folded: Folded | None = None,
) -> Summary:
    """All figures of a run; with `folded`, of a run of which `run` is what has not been folded."""
    total = tally(run, slo) if folded is None else folded.tally(run)
    num_open, num_done, num_aborted, num_errors = total.num_requests
    duration = total.stop_s - total.start_s
    tokens_in, tokens_out = total.total_input_tokens, total.total_output_tokens
    rates = [_ratio(n, duration) for n in (num_done, tokens_out, tokens_in + tokens_out)]
    num_devices = num_target_devices + num_draft_devices
    per_device = [_ratio(rate, num_devices) for rate in rates]
    accepted = int(run.num_accepted_at.sum())
    sizes = _Sizes.of(run.batch_sizes)
    return Summary(
        duration=duration,
        completed=num_done,
        failed=num_open + num_aborted + num_errors,
        num_aborted=num_aborted,
        num_errors=num_errors,
        num_unfinished=num_open,
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=rates[0],
        request_goodput=None if slo is None else _ratio(total.num_good, duration),
        slo_attainment=None if slo is None else _ratio(total.num_good, sum(total.num_requests)),
        output_throughput=rates[1],
        total_token_throughput=rates[2],
        max_output_tokens_per_s=float(run.max_tokens_in_a_second),
        max_concurrent_requests=total.max_concurrent,
        ttft=total.latencies["ttft"],
        tpot=total.latencies["tpot"],
        itl=total.latencies["itl"],
        e2el=total.latencies["e2el"],
        queue=total.latencies["queue"],
        service=total.latencies["service"],
        makespan=total.makespan,
        spec_decode_acceptance_rate=100.0 * _ratio(accepted, run.num_draft_tokens),
        spec_decode_acceptance_length=1.0 + _ratio(accepted, run.num_drafts),
        spec_decode_num_drafts=run.num_drafts,
        spec_decode_draft_tokens=run.num_draft_tokens,
        spec_decode_accepted_tokens=accepted,
        spec_decode_per_position_acceptance_rates=tuple([_ratio(int(n), run.num_drafts) for n in run.num_accepted_at]),
        num_drafted_tokens=run.num_drafted_tokens,
        rounds=total.rounds,
        mean_batch_size=_ratio(run.num_entries, total.rounds),
        mean_running_requests=sizes.mean_running,
        max_running_requests=sizes.max_running,
        mean_imbalance=sizes.mean_imbalance,
        empty_batch_share=sizes.empty_share,
        backlog_by_tenth=total.backlog_by_tenth,
        arrival_span=total.last_arrival_s - total.start_s,
        zero_draft_causes={
            cause.name.lower(): run.zero_draft[cause] for cause in ZeroDraft if cause is not ZeroDraft.NONE
        },
        num_preemptions=run.num_preemptions,
        num_failed_works=run.num_failed_works,
        num_drafter_losses=run.num_drafter_losses,
        mean_verify_ms=1000.0 * _ratio(total.verify_s, total.rounds),
        mean_draft_ms=1000.0 * _ratio(total.draft_s, total.num_draft_works),
        target_utilisation=total.target_utilisation,
        draft_utilisation=total.draft_utilisation,
        overlapped_draft_share=total.overlapped_draft_share,
        decode_verify_share=total.decode_verify_share,
        num_target_devices=num_target_devices,
        num_draft_devices=num_draft_devices,
        request_throughput_per_device=per_device[0],
        output_throughput_per_device=per_device[1],
        total_token_throughput_per_device=per_device[2],
        percentile_error=total.percentile_error,
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


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Means over verify works of what the sizes of the sub-batches say."""

    mean_running: float
    max_running: int
    mean_imbalance: float
    empty_share: float

    @classmethod
    def of(cls, counts: Mapping[tuple[int, ...], int]) -> _Sizes:
        seen = {sizes: n for sizes, n in counts.items() if sizes}
        works = sum(seen.values())
        running = sum(n * sum(sizes) for sizes, n in seen.items())
        spread = sum(n * (max(sizes) - min(sizes)) for sizes, n in seen.items())
        most = max((sum(sizes) for sizes in seen), default=0)
        empty = sum(n for sizes, n in seen.items() if 0 in sizes)
        return cls(_ratio(running, works), most, _ratio(spread, works), _ratio(empty, works))

"""A run as columns: what the collector hands to those who compute figures from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PERCENTILES: Final = (50, 90, 95, 99)

# How a request stands.
OPEN: Final = 0
COMPLETED: Final = 1
ABORTED: Final = 2
ERROR: Final = 3


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Distribution of one latency, in milliseconds; percentiles interpolate linearly.

    Attributes:
        mean: arithmetic mean.
        median: the middle one.
        std: standard deviation of the population.
        percentiles: by number, those in `PERCENTILES`.
    """

    mean: float
    median: float
    std: float
    percentiles: Mapping[int, float]

    @classmethod
    def of_seconds(cls, values_s: Floats) -> LatencyStats:
        """Statistics of values given in seconds; all 0.0 if there are none."""
        if not values_s.size:
            return cls(0.0, 0.0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
        ms = values_s * 1000.0
        points = np.percentile(ms, PERCENTILES)
        percentiles = {p: float(value) for p, value in zip(PERCENTILES, points, strict=True)}
        return cls(float(ms.mean()), float(np.median(ms)), float(ms.std()), percentiles)


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as columns: one row per request in order of arrival, then spans of work, then counts.

    Times are seconds on the backend's clock, NaN where something didn't happen.

    Attributes:
        status: OPEN, COMPLETED, ABORTED or ERROR.
        arrival_s: `Request.arrival_s`.
        prompt_len: prompt tokens.
        output_len: committed tokens.
        first_scheduled_s: when the first target work that names the request was submitted.
        first_token_s: when the core saw the first committed token.
        last_token_s: when it saw the last one so far.
        end_s: when the request ended.
        gaps_s: seconds between two chunks of a request, of completed requests.
        verify_spans_s: (start, end) on the device of each verify work that came back, one row each.
        draft_spans_s: the same for draft works that asked for drafts.
        ingest_spans_s: the same for those that asked for none: the drafter only took tokens in.
        last_event_s: time of the last event.
        max_tokens_in_a_second: most tokens committed within a whole second since the first arrival.
        num_drafts: verified entries with at least one draft.
        num_draft_tokens: drafts verified.
        num_accepted_at: entries whose draft at position i was accepted, i from 0; as long as the longest
            draft.
        num_drafted_tokens: tokens that the drafter made, verified or not.
        num_entries: entries of all verify works.
        num_preemptions: see `Summary`.
        num_failed_works: works that came to nothing.
        num_drafter_losses: times the drafter was lost.
        zero_draft: entries by cause, indexed by `ZeroDraft`.
        batch_sizes: how many verify works saw these sizes of all sub-batches.
    """

    status: Ints
    arrival_s: Floats
    prompt_len: Ints
    output_len: Ints
    first_scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    end_s: Floats
    gaps_s: Floats
    verify_spans_s: Floats
    draft_spans_s: Floats
    ingest_spans_s: Floats
    last_event_s: float
    max_tokens_in_a_second: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_at: Ints
    num_drafted_tokens: int
    num_entries: int
    num_preemptions: int
    num_failed_works: int
    num_drafter_losses: int
    zero_draft: tuple[int, ...]
    batch_sizes: Mapping[tuple[int, ...], int]

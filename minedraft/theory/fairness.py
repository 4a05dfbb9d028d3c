"""Comparisons that the paper leaves out: per device, per request, and against a sequential batch of 2m requests.

PSD(m) has a drafter on devices of its own and keeps 2m requests in flight; SD(m), with which the paper compares it,
drafts on the target's devices and keeps m.
"""

from __future__ import annotations

import math

from minedraft.theory.stages import StageTimes


def per_device_gain(gain: float, target_devices: int, draft_devices: int) -> float:
    """A throughput gain per device: (1 + gain) D / (D + d) - 1; for the paper's 4 + 1 devices 0.8 (1 + gain) - 1.

    Args:
        gain: of PSD over SD, as `StageTimes.gain`.
        target_devices: D, which SD has all of, drafter included.
        draft_devices: d, which PSD has besides.
    """
    _check_devices(target_devices, draft_devices)
    return (1.0 + gain) * target_devices / (target_devices + draft_devices) - 1.0


def per_device_reduction(reduction: float, target_devices: int, draft_devices: int) -> float:
    """The same for a share of time saved: 1 - (1 - reduction) (D + d) / D; 1 - 1.25 (1 - reduction) for 4 + 1."""
    _check_devices(target_devices, draft_devices)
    return 1.0 - (1.0 - reduction) * (target_devices + draft_devices) / target_devices


def break_even_gain(target_devices: int, draft_devices: int) -> float:
    """The gain that pays for the drafter's devices: d / D, so 25 % for 4 + 1 (and 20 % less time)."""
    _check_devices(target_devices, draft_devices)
    return draft_devices / target_devices


def break_even_draft_range(
    verify_s: float, overhead_s: float, target_devices: int, draft_devices: int
) -> tuple[float, float] | None:
    """The drafting times t at which PSD has the throughput per device of SD or more.

    From (V + t + o) / (max(V, t) + o) >= 1 + d/D: (d/D) (V + o) <= t <= (D/d) V - o. A short t leaves too little to
    hide, a long one makes the target wait.

    Returns:
        Both ends in seconds; None if no t is enough. Without drafter devices every t pays: (0, infinity).
    """
    _check_devices(target_devices, draft_devices)
    if draft_devices == 0:
        return 0.0, math.inf
    share = draft_devices / target_devices
    low_s, high_s = share * (verify_s + overhead_s), verify_s / share - overhead_s
    # Both ends exist, or neither: each says that the best t, t = V, is good enough.
    return (low_s, high_s) if low_s <= verify_s <= high_s else None


def psd_over_sd_2m(at_m: StageTimes, at_2m: StageTimes) -> float:
    """Throughput of PSD(m) over that of SD(2m), which keeps as many requests in flight, at equal k.

    (V(2m) + t(2m) + o(2m)) / (2 (max(V(m), t(m)) + o(m))): 2m requests are verified once in the one, by halves in two
    rounds in the other. Above 1 only where verification or drafting takes longer for more requests; with stage times
    that don't grow with the batch, as section 4 of the paper assumes, never.

    Args:
        at_m: stages of a round with m requests.
        at_2m: with 2m.
    """
    return at_2m.sd_s / (2.0 * at_m.psd_s)


def break_even_sequential_s(at_m: StageTimes) -> float:
    """The V(2m) + t(2m) beyond which PSD(m) beats SD(2m): 2 max(V(m), t(m)) + o.

    o is the same for both: SD(2m) pays it once where PSD(m) pays it twice.
    """
    return 2.0 * at_m.psd_s - at_m.overhead_s


def request_period_s(stages: StageTimes) -> tuple[float, float]:
    """Seconds between a request's own rounds, in SD and in PSD: V + t + o and 2 (max(V, t) + o).

    The second is never the smaller: PSD verifies a request every other round. Only the wait in the queue gets shorter,
    and with it the makespan over the number of requests, which the authors' notebook reports as end-to-end latency.
    """
    return stages.sd_s, 2.0 * stages.psd_s


def _check_devices(target_devices: int, draft_devices: int) -> None:
    if target_devices < 1:
        raise ValueError(f"target_devices is {target_devices}, must be >= 1")
    if draft_devices < 0:
        raise ValueError(f"draft_devices is {draft_devices}, must be >= 0")

"""All closed forms for one setting: what `minedraft theory` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from minedraft.theory.draft_length import BestLength, best_draft_length
from minedraft.theory.fairness import (
    break_even_draft_range,
    break_even_gain,
    break_even_sequential_s,
    per_device_gain,
    psd_over_sd_2m,
)
from minedraft.theory.jitter import gain_with_jitter
from minedraft.theory.stages import StageLines, StageTimes, decode_s
from minedraft.theory.star import Star, best_num_replicas, break_even_num_replicas
from minedraft.theory.tokens import check_rates, tokens_per_round, tokens_per_round_without_bonus


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """A mode at the k of the setting, in steady state with full batches.

    Attributes:
        name: as in `psd(16+16)`.
        step_requests: verified in one step.
        num_in_flight: kept running.
        num_devices: of both groups.
        tokens: E[N], per request and round.
        step_s: seconds of a step.
        period_s: seconds between a request's own rounds.
    """

    name: str
    step_requests: int
    num_in_flight: int
    num_devices: int
    tokens: float
    step_s: float
    period_s: float

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.step_requests * self.tokens / self.step_s

    @property
    def throughput_per_device(self) -> float:
        """Tokens per second and device."""
        return self.throughput / self.num_devices

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token of one request."""
        return self.period_s / self.tokens

    def time_s(self, num_tokens: int) -> float:
        """T: seconds for so many tokens of all requests together."""
        return decode_s(num_tokens, self.step_requests * self.tokens, self.step_s)


@dataclass(frozen=True)
class Study:
    """A setting, and its figures.

    Attributes:
        lines: stage times over k, with m requests.
        num_draft: k, at least 1.
        rates: acceptance, for k and for every longer round to try; see `minedraft.theory.tokens`.
        batch_size: m, requests per verification.
        at_2m: stage times at this k with 2m requests.
        target_devices: D.
        draft_devices: d, which PSD has besides.

    Raises:
        ValueError: a field is out of range, or there are fewer rates than drafts.
    """

    lines: StageLines
    num_draft: int
    rates: tuple[float, ...]
    batch_size: int
    at_2m: StageTimes
    target_devices: int
    draft_devices: int

    def __post_init__(self) -> None:
        check_rates(self.rates)
        if not 1 <= self.num_draft <= len(self.rates):
            raise ValueError(f"num_draft is {self.num_draft}, must be in [1, {len(self.rates)}], the number of rates")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, must be >= 1")
        break_even_gain(self.target_devices, self.draft_devices)

    @cached_property
    def stages(self) -> StageTimes:
        """Of a round with k drafts and m requests."""
        return self.lines.at(self.num_draft)

    @property
    def tokens(self) -> float:
        """E[N] at k."""
        return tokens_per_round(self.rates[: self.num_draft])

    @property
    def tokens_without_bonus(self) -> float:
        """E[N] at k if k accepted drafts are not followed by a token of the target."""
        return tokens_per_round_without_bonus(self.rates[: self.num_draft])

    @cached_property
    def modes(self) -> tuple[ModeFigures, ...]:
        """Plain decoding, SD(m), PSD(m) and SD(2m)."""
        m, tokens, plain_s = self.batch_size, self.tokens, self.lines.at(0).sd_s
        targets, devices = self.target_devices, self.target_devices + self.draft_devices
        sd_s, psd_s, sd_2m_s = self.stages.sd_s, self.stages.psd_s, self.at_2m.sd_s
        return (
            ModeFigures(f"ar({m})", m, m, targets, 1.0, plain_s, plain_s),
            ModeFigures(f"sd({m})", m, m, targets, tokens, sd_s, sd_s),
            ModeFigures(f"psd({m}+{m})", m, 2 * m, devices, tokens, psd_s, 2.0 * psd_s),
            ModeFigures(f"sd({2 * m})", 2 * m, 2 * m, targets, tokens, sd_2m_s, sd_2m_s),
        )

    @property
    def gain(self) -> float:
        """Of PSD(m) over SD(m)."""
        return self.stages.gain

    @property
    def per_device_gain(self) -> float:
        """The same per device."""
        return per_device_gain(self.gain, self.target_devices, self.draft_devices)

    @property
    def break_even_gain(self) -> float:
        """The gain that pays for the drafter's devices."""
        return break_even_gain(self.target_devices, self.draft_devices)

    @property
    def break_even_draft_range(self) -> tuple[float, float] | None:
        """The drafting times that pay per device, in seconds."""
        stages = self.stages
        return break_even_draft_range(stages.verify_s, stages.overhead_s, self.target_devices, self.draft_devices)

    @property
    def over_sd_2m(self) -> float:
        """Throughput of PSD(m) over that of SD(2m)."""
        return psd_over_sd_2m(self.stages, self.at_2m)

    @property
    def break_even_sequential_s(self) -> float:
        """The V(2m) + t(2m) beyond which PSD(m) beats SD(2m), if o doesn't change."""
        return break_even_sequential_s(self.stages)

    @cached_property
    def best_sd(self) -> BestLength:
        """SD at its own best k."""
        return best_draft_length(self.rates, lambda k: self.lines.at(k).sd_s)

    @cached_property
    def best_psd(self) -> BestLength:
        """PSD at its own best k."""
        return best_draft_length(self.rates, lambda k: self.lines.at(k).psd_s)

    @property
    def gain_at_best(self) -> float:
        """Of PSD(m) over SD(m), each at its own best k."""
        return self.best_sd.seconds_per_token / self.best_psd.seconds_per_token - 1.0

    def gains_with_jitter(self, cvs: Sequence[float]) -> tuple[float, ...]:
        """Gains at k if both stages vary with these coefficients of variation."""
        stages = self.stages
        return tuple(gain_with_jitter(stages.verify_s, cv, stages.draft_s, cv, stages.overhead_s) for cv in cvs)

    def stars(self, most: int) -> tuple[Star, ...]:
        """One drafter for n = 1 … `most` targets."""
        return tuple(Star(self.stages, n, self.target_devices, self.draft_devices) for n in range(1, most + 1))

    @property
    def best_num_replicas(self) -> int | None:
        """The n of the star with the largest gain per device; None if every further target adds to it."""
        return best_num_replicas(self.stages, self.target_devices, self.draft_devices)

    @property
    def break_even_num_replicas(self) -> int | None:
        """The smallest n of the star that pays per device; None if none does."""
        return break_even_num_replicas(self.stages, self.target_devices, self.draft_devices)

"""Workloads: what arrives when, how long prompts are, and how long the answers will turn out to be.

A workload is any iterable of `SimRequest` in order of arrival; everything here is lazy, so that a million
requests cost no memory. Randomness comes from one seed through *named streams* (one numpy generator each for
arrivals, prompt lengths, output lengths and aborts): drawing more from one never shifts another, and
workloads that share a seed and differ only in the arrival rate have the same requests.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from pathlib import Path
from typing import Final, NoReturn, Protocol

import numpy as np

from minedraft.request import Request, RequestId

_CHUNK: Final = 1024  # draws per call into numpy; a stream's values do not depend on it

# Far beyond any workload, and near enough that clocks and counters are right: a clock at 10^10 s (in 317 years) still
# tells 2 microseconds apart, one at 10^18 s (nanoseconds that were taken for seconds) doesn't tell steps apart.
LAST_ARRIVAL_S: Final = 1e10
LOWEST_RATE: Final = 1e-9  # requests per second
MOST_REQUESTS: Final = 10**15
LONGEST_PROMPT: Final = 2**53
WIDEST_SIGMA: Final = 100.0
_MOST_DIGITS: Final = 100  # Python refuses to read thousands of them
LOWEST_CV: Final = 1e-6
HIGHEST_CV: Final = 1e6


class WorkloadError(ValueError):
    """Requests that can't be served as they come: out of order, out of range, or two of one name alive at once."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request together with what only the world knows of it.

    Attributes:
        request_id: unique among the requests that are alive.
        arrival_s: when it arrives, in seconds.
        prompt_len: prompt tokens, at least 1.
        output_len: tokens the model would write before it stops by itself, at least 1. The core never sees
            it.
        max_tokens: the user's limit, at least 1. If it is not above `output_len` it ends the request instead.
        priority: see `Request`.
        max_draft_tokens: see `Request`.
        abort_after_s: the client leaves this many seconds after the arrival; None if it stays.

    Raises:
        WorkloadError: a field is out of range.
    """

    request_id: RequestId
    arrival_s: float
    prompt_len: int
    output_len: int
    max_tokens: int
    priority: int = 0
    max_draft_tokens: int | None = None
    abort_after_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_len <= LONGEST_PROMPT:
            self._refuse("prompt_len", f"from 1 to {LONGEST_PROMPT}")
        if self.output_len < 1:
            self._refuse("output_len", ">= 1")
        if self.max_tokens < 1:
            self._refuse("max_tokens", ">= 1")
        if self.max_draft_tokens is not None and self.max_draft_tokens < 0:
            self._refuse("max_draft_tokens", ">= 0 (0 opts out of speculation)")
        if not 0.0 <= self.arrival_s <= LAST_ARRIVAL_S:
            self._refuse("arrival_s", f"from 0 to {LAST_ARRIVAL_S:g} seconds")
        if self.abort_after_s is not None and not self.abort_after_s >= 0.0:
            self._refuse("abort_after_s", ">= 0")

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise WorkloadError(f"request {self.request_id!r}: {name} is {getattr(self, name)}, must be {wanted}")

    def to_request(self, arrival_s: float | None = None) -> Request:
        """What the core may know of it.

        Args:
            arrival_s: the actual arrival where it differs from the planned one (a concurrency limit held it
                back).
        """
        return Request(
            self.request_id,
            self.prompt_len,
            self.max_tokens,
            self.arrival_s if arrival_s is None else arrival_s,
            self.priority,
            self.max_draft_tokens,
        )


def random_stream(seed: int, name: str) -> np.random.Generator:
    """The generator of a named stream; the same on every platform (PCG64)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))


def _endless(draw: Callable[[int], np.ndarray]) -> Iterator[float]:
    """Values of a vectorised draw, chunk by chunk, without end."""
    while True:
        yield from draw(_CHUNK).tolist()


def _running_sum(gaps: Iterator[float]) -> Iterator[float]:
    now = 0.0
    for gap in gaps:
        now += gap
        yield now


def check_rate(owner: object, rate: float) -> None:
    """Refuse a rate of arrivals that is none.

    Raises:
        ValueError: it is not finite, or below `LOWEST_RATE`.
    """
    _check_positive(owner, rate=rate)
    if rate < LOWEST_RATE:
        raise ValueError(f"{type(owner).__name__}.rate is {rate}, must be >= {LOWEST_RATE:g} requests per second")


def whole_number(text: str) -> int | None:
    """A number written in decimal digits; None if it isn't one, or has more digits than anybody needs."""
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _check_positive(owner: object, **values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{type(owner).__name__}.{name} is {value}, must be finite and > 0")


class Arrivals(Protocol):
    """An arrival process."""

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Arrival times in seconds, never decreasing, without end."""
        ...


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests arrive at one moment: an offline batch.

    With the backend's `max_concurrency` it makes a closed loop.

    Attributes:
        at_s: that moment, in seconds.
    """

    at_s: float = 0.0

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """See `Arrivals`; draws nothing."""
        return repeat(self.at_s)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Memoryless arrivals: exponential gaps.

    Attributes:
        rate: mean requests per second, at least `LOWEST_RATE`.

    Raises:
        ValueError: the rate is out of range.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self, self.rate)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """See `Arrivals`."""
        return _running_sum(_endless(lambda size: rng.exponential(1.0 / self.rate, size)))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps: bursty above a coefficient of variation of 1, regular below, Poisson at 1.

    vLLM's `--burstiness` b is the shape, so cv = 1 / sqrt(b).

    Attributes:
        rate: mean requests per second, at least `LOWEST_RATE`.
        cv: standard deviation of the gaps divided by their mean, from `LOWEST_CV` to `HIGHEST_CV`.

    Raises:
        ValueError: a field is out of range.
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        check_rate(self, self.rate)
        _check_positive(self, cv=self.cv)
        if not LOWEST_CV <= self.cv <= HIGHEST_CV:
            raise ValueError(f"Gamma.cv is {self.cv}, must be from {LOWEST_CV:g} to {HIGHEST_CV:g}")

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """See `Arrivals`."""
        shape = self.cv**-2
        scale = 1.0 / (self.rate * shape)
        return _running_sum(_endless(lambda size: rng.gamma(shape, scale, size)))


class Lengths(Protocol):
    """A distribution of token counts."""

    def values(self, rng: np.random.Generator) -> Iterator[int]:
        """Lengths of at least 1, without end."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same length.

    Attributes:
        tokens: the length, at least 1.

    Raises:
        ValueError: it is below 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"FixedLength.tokens is {self.tokens}, must be >= 1")

    def values(self, rng: np.random.Generator) -> Iterator[int]:
        """See `Lengths`; draws nothing."""
        return repeat(self.tokens)


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """Lognormal lengths, rounded and clipped.

    The spread is given by the median or by sigma: with mean M and median P, sigma = sqrt(2 ln(M / P)). Mean
    and median are those before clipping; a tight clip moves them.

    Attributes:
        mean: mean length in tokens, above 0.
        p50: median in tokens, above 0 and at most the mean; or None.
        sigma: standard deviation of the logarithm, in [0, `WIDEST_SIGMA`]; or None. Exactly one of the two is given.
        min_tokens: shortest length, at least 1.
        max_tokens: longest length, at least `min_tokens`; None for no limit.

    Raises:
        ValueError: a field is out of range, or not exactly one of `p50` and `sigma` is given.
    """

    mean: float
    p50: float | None = None
    sigma: float | None = None
    min_tokens: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self, mean=self.mean)
        if (self.p50 is None) == (self.sigma is None):
            raise ValueError("LognormalLength needs exactly one of p50 and sigma")
        if self.p50 is not None and not 0.0 < self.p50 <= self.mean:
            raise ValueError(f"LognormalLength.p50 is {self.p50}, must be in (0, mean = {self.mean}]")
        if self.p50 is not None and self.mean / self.p50 == math.inf:
            raise ValueError(f"LognormalLength.p50 is {self.p50}, too small for mean = {self.mean}")
        if self.sigma is not None and not 0.0 <= self.sigma <= WIDEST_SIGMA:
            raise ValueError(f"LognormalLength.sigma is {self.sigma}, must be in [0, {WIDEST_SIGMA:g}]")
        if self.min_tokens < 1:
            raise ValueError(f"LognormalLength.min_tokens is {self.min_tokens}, must be >= 1")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"LognormalLength.max_tokens is {self.max_tokens}, below min_tokens {self.min_tokens}")

    def values(self, rng: np.random.Generator) -> Iterator[int]:
        """See `Lengths`."""
        sigma = self.sigma
        if sigma is None:
            assert self.p50 is not None
            sigma = math.sqrt(2.0 * math.log(self.mean / self.p50))
        mu = math.log(self.mean) - sigma**2 / 2.0
        top = self.max_tokens if self.max_tokens is not None else 2**53  # the largest exact float

        def draw(size: int) -> np.ndarray:
            return np.clip(np.rint(rng.lognormal(mu, sigma, size)), self.min_tokens, top)

        return map(int, _endless(draw))


@dataclass(frozen=True, slots=True)
class EmpiricalLength:
    """Lengths drawn with replacement from observed ones.

    Attributes:
        tokens: the observed lengths, each at least 1.

    Raises:
        ValueError: no lengths, or one below 1.
    """

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("EmpiricalLength.tokens is empty; give at least one observed length")
        if min(self.tokens) < 1:
            raise ValueError(f"EmpiricalLength.tokens holds {min(self.tokens)}, every length must be >= 1")

    @classmethod
    def from_csv(cls, path: str | Path, column: str) -> EmpiricalLength:
        """The observed lengths in a column of a CSV file with a header line.

        Raises:
            ValueError: no such column, or a value that is no whole number >= 1; with file and line.
        """
        lengths = []
        try:
            with Path(path).open(newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                if column not in (rows.fieldnames or ()):
                    known = ", ".join(rows.fieldnames or ("none",))
                    raise ValueError(f"{path}: no column {column!r}; it has {known}")
                for row in rows:
                    length = whole_number(row[column] or "")
                    if length is None or not 1 <= length <= LONGEST_PROMPT:
                        where = f"{path}:{rows.line_num}"
                        wanted = f"a whole number from 1 to {LONGEST_PROMPT}"
                        raise ValueError(f"{where}: {column} is {row[column] or ''!r}, must be {wanted}")
                    lengths.append(length)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; check the path") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8; convert the file to UTF-8") from error
        return cls(tuple(lengths))

    def values(self, rng: np.random.Generator) -> Iterator[int]:
        """See `Lengths`."""
        pool: Sequence[int] = self.tokens
        return map(pool.__getitem__, map(int, _endless(lambda size: rng.integers(len(pool), size=size))))


@dataclass(frozen=True, slots=True)
class Aborts:
    """Some clients leave early, each after an exponential time.

    Attributes:
        probability: share of the requests whose client has limited patience, in [0, 1].
        mean_patience_s: mean time after which such a client leaves, in seconds, above 0.

    Raises:
        ValueError: a field is out of range.
    """

    probability: float
    mean_patience_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"Aborts.probability is {self.probability}, must be in [0, 1]")
        _check_positive(self, mean_patience_s=self.mean_patience_s)

    def patience_s(self, rng: np.random.Generator) -> Iterator[float | None]:
        """Per request the time after which its client leaves, None if it stays; without end."""
        coins = _endless(lambda size: rng.random(2 * size))
        for coin, spread in zip(coins, coins, strict=True):
            yield -self.mean_patience_s * math.log1p(-spread) if coin < self.probability else None


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Requests from an arrival process and two length distributions; iterate it as often as you like.

    Attributes:
        arrivals: when requests arrive.
        prompt_lens: prompt lengths.
        output_lens: true output lengths.
        num_requests: how many; None for no end.
        seed: of all named streams, at least 0.
        max_tokens: the user's limit per request. None gives each request its own true length as limit
            (benchmarks with `ignore_eos`): requests then end by LENGTH, and policies can see what is left of
            them.
        max_draft_tokens: see `Request`.
        aborts: clients that leave early.
        id_prefix: request ids are this and a running number.

    Raises:
        ValueError: a count or the seed is out of range.
    """

    arrivals: Arrivals
    prompt_lens: Lengths
    output_lens: Lengths
    num_requests: int | None = None
    seed: int = 0
    max_tokens: int | None = None
    max_draft_tokens: int | None = None
    aborts: Aborts | None = None
    id_prefix: str = "r"

    def __post_init__(self) -> None:
        if self.num_requests is not None and not 0 <= self.num_requests <= MOST_REQUESTS:
            raise ValueError(f"SyntheticWorkload.num_requests is {self.num_requests}, must be in [0, {MOST_REQUESTS}]")
        if self.seed < 0:
            raise ValueError(f"SyntheticWorkload.seed is {self.seed}, must be >= 0")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"SyntheticWorkload.max_tokens is {self.max_tokens}, must be >= 1")
        if self.max_draft_tokens is not None and self.max_draft_tokens < 0:
            raise ValueError(
                f"SyntheticWorkload.max_draft_tokens is {self.max_draft_tokens}, must be >= 0, which opts out of "
                "speculation"
            )

    def __iter__(self) -> Iterator[SimRequest]:
        """A fresh pass, the same every time."""
        times = self.arrivals.times_s(random_stream(self.seed, "arrivals"))
        prompts = self.prompt_lens.values(random_stream(self.seed, "prompt_lens"))
        outputs = self.output_lens.values(random_stream(self.seed, "output_lens"))
        patience: Iterator[float | None] = repeat(None)
        if self.aborts is not None:
            patience = self.aborts.patience_s(random_stream(self.seed, "aborts"))
        rows = zip(count(), times, prompts, outputs, patience, strict=False)
        prefix, limit, drafts = self.id_prefix, self.max_tokens, self.max_draft_tokens
        for i, at_s, prompt, output, leaves_s in islice(rows, self.num_requests):
            yield SimRequest(
                f"{prefix}{i}",
                at_s,
                prompt,
                output,
                limit if limit is not None else output,
                0,
                drafts,
                leaves_s,
            )


def azure_conv_like(
    num_requests: int | None = None, *, seed: int = 0, rate: float = 5.53, max_tokens: int = 1000
) -> SyntheticWorkload:
    """Chat traffic with the statistics of the Azure LLM inference trace 2023, conversation part.

    Prompts: mean 1155, median 1020, at most 14,050 tokens. Outputs: mean 211, median 129, at most 1000 (the clip
    lowers the synthetic mean to about 200). Arrivals: Gamma, 5.53 requests/s, CV 1.09. Synthetic: only these figures
    are taken from the trace (AzurePublicDataset, AzureLLMInferenceTrace_conv, CC-BY-4.0; published with Splitwise, ISCA
    2024). The real lengths are not lognormal: prompts and outputs are correlated and have modes at common prompt
    templates.

    Args:
        num_requests: how many; None for no end.
        seed: of all streams.
        rate: requests per second; the burstiness stays.
        max_tokens: the user's limit.
    """
    return SyntheticWorkload(
        arrivals=Gamma(rate, cv=1.09),
        prompt_lens=LognormalLength(1155, p50=1020, max_tokens=14_050),
        output_lens=LognormalLength(211, p50=129, max_tokens=1000),
        num_requests=num_requests,
        seed=seed,
        max_tokens=max_tokens,
    )


def azure_code_like(
    num_requests: int | None = None, *, seed: int = 0, rate: float = 2.57, max_tokens: int = 2000
) -> SyntheticWorkload:
    """Code-completion traffic with the statistics of the Azure LLM inference trace 2023, code part.

    Prompts: mean 2048, median 1469, at most 7437 tokens (the clip lowers the synthetic mean by 4 %). Outputs: mean 28,
    median 13, at most 1899. Arrivals: Gamma, 2.57 requests/s, CV 13.2, i.e. bursts of dozens within moments. Source and
    licence as for `azure_conv_like` (AzureLLMInferenceTrace_code).

    Args:
        num_requests: how many; None for no end.
        seed: of all streams.
        rate: requests per second; the burstiness stays.
        max_tokens: the user's limit.
    """
    return SyntheticWorkload(
        arrivals=Gamma(rate, cv=13.2),
        prompt_lens=LognormalLength(2048, p50=1469, max_tokens=7437),
        output_lens=LognormalLength(28, p50=13, max_tokens=1899),
        num_requests=num_requests,
        seed=seed,
        max_tokens=max_tokens,
    )


NAMED_WORKLOADS: Final[Mapping[str, Callable[..., SyntheticWorkload]]] = {
    "azure-conv-like": azure_conv_like,
    "azure-code-like": azure_code_like,
}
"""By name: functions of (num_requests, *, seed, rate, max_tokens)."""


def with_arrivals(requests: Iterator[SimRequest], arrivals: Arrivals, seed: int = 0) -> Iterator[SimRequest]:
    """The same requests with other arrival times, for traces that have none or the wrong load.

    Args:
        requests: in any order of arrival; their `arrival_s` is ignored.
        arrivals: the process that replaces it.
        seed: of the stream "arrivals".
    """
    times = arrivals.times_s(random_stream(seed, "arrivals"))
    for request, at_s in zip(requests, times, strict=False):
        yield SimRequest(
            request.request_id,
            at_s,
            request.prompt_len,
            request.output_len,
            request.max_tokens,
            request.priority,
            request.max_draft_tokens,
            request.abort_after_s,
        )

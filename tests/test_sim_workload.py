"""Workloads: statistics, determinism, independence of the named streams, laziness."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minedraft.request import Request
from minedraft.sim.workload import (
    HIGHEST_CV,
    LONGEST_PROMPT,
    LOWEST_CV,
    LOWEST_RATE,
    NAMED_WORKLOADS,
    WIDEST_SIGMA,
    Aborts,
    Arrivals,
    AtOnce,
    EmpiricalLength,
    FixedLength,
    Gamma,
    LognormalLength,
    Poisson,
    SimRequest,
    SyntheticWorkload,
    random_stream,
    with_arrivals,
)


def gaps(workload: SyntheticWorkload) -> list[float]:
    times = [request.arrival_s for request in workload]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize(("arrivals", "cv"), [(Poisson(5.0), 1.0), (Gamma(5.0, 2.0), 2.0), (Gamma(5.0, 0.5), 0.5)])
def test_arrival_rate_and_variation(arrivals: Poisson | Gamma, cv: float) -> None:
    found = gaps(SyntheticWorkload(arrivals, FixedLength(1), FixedLength(1), 50_000, seed=1))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.2, rel=0.04)
    assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.04)


def test_lognormal_mean_and_median() -> None:
    values = list(itertools.islice(LognormalLength(211, p50=129).values(random_stream(0, "x")), 50_000))
    assert statistics.fmean(values) == pytest.approx(211, rel=0.03)
    assert statistics.median(values) == pytest.approx(129, rel=0.03)
    by_sigma = itertools.islice(LognormalLength(100, sigma=0.5).values(random_stream(0, "x")), 50_000)
    assert statistics.fmean(by_sigma) == pytest.approx(100, rel=0.03)


def test_lognormal_is_clipped() -> None:
    lengths = LognormalLength(100, p50=50, min_tokens=40, max_tokens=60)
    values = list(itertools.islice(lengths.values(random_stream(0, "x")), 1000))
    assert min(values) == 40
    assert max(values) == 60
    assert all(type(value) is int for value in values)


def test_empirical_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("a,tokens\n1,10\n2,20\n3,20\n")
    lengths = EmpiricalLength.from_csv(path, "tokens")
    assert lengths.tokens == (10, 20, 20)
    values = list(itertools.islice(lengths.values(random_stream(0, "x")), 9000))
    assert values.count(10) / len(values) == pytest.approx(1 / 3, abs=0.02)
    assert values.count(10) + values.count(20) == len(values)


@pytest.mark.parametrize(
    ("text", "message"), [("a\n1\n", "no column 'tokens'; it has a"), ("tokens\n5\nx\n", "csv:3: tokens is 'x'")]
)
def test_empirical_refusals(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        EmpiricalLength.from_csv(path, "tokens")


def test_same_seed_same_requests_and_iteration_is_repeatable() -> None:
    workload = SyntheticWorkload(Poisson(1.0), LognormalLength(100, p50=80), LognormalLength(9, p50=5), 3000, seed=7)
    assert list(workload) == list(workload)
    other = SyntheticWorkload(Poisson(1.0), LognormalLength(100, p50=80), LognormalLength(9, p50=5), 3000, seed=8)
    assert list(workload) != list(other)


def test_streams_are_independent() -> None:
    outputs = LognormalLength(50, p50=40)
    one = SyntheticWorkload(Poisson(1.0), LognormalLength(100, p50=80), outputs, 2000, seed=7)
    other = SyntheticWorkload(Gamma(9.0, 3.0), FixedLength(5), outputs, 2000, seed=7, aborts=Aborts(0.5, 1.0))
    assert [r.output_len for r in one] == [r.output_len for r in other]


def test_aborts() -> None:
    workload = SyntheticWorkload(Poisson(1.0), FixedLength(1), FixedLength(1), 20_000, aborts=Aborts(0.25, 3.0))
    patience = [r.abort_after_s for r in workload if r.abort_after_s is not None]
    assert len(patience) / 20_000 == pytest.approx(0.25, abs=0.01)
    assert statistics.fmean(patience) == pytest.approx(3.0, rel=0.05)


def test_an_endless_workload_is_lazy() -> None:
    workload = SyntheticWorkload(Poisson(100.0), LognormalLength(100, p50=80), FixedLength(20))
    assert [r.request_id for r in itertools.islice(workload, 3)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("name", NAMED_WORKLOADS)
def test_named_workloads(name: str) -> None:
    requests = list(NAMED_WORKLOADS[name](20_000, seed=3))
    prompts = statistics.fmean(r.prompt_len for r in requests)
    outputs = statistics.fmean(r.output_len for r in requests)
    expected = {"azure-conv-like": (1155, 211), "azure-code-like": (2048, 28)}[name]
    assert (prompts, outputs) == pytest.approx(expected, rel=0.06)
    if name == "azure-conv-like":
        assert requests[-1].arrival_s / len(requests) == pytest.approx(1 / 5.53, rel=0.05)


def test_with_arrivals_changes_nothing_else() -> None:
    requests = [SimRequest("a", 5.0, 10, 20, 30, 1, 2, 3.0), SimRequest("b", 9.0, 11, 21, 31)]
    moved = list(with_arrivals(iter(requests), AtOnce(2.0)))
    assert [r.arrival_s for r in moved] == [2.0, 2.0]
    assert moved[0] == SimRequest("a", 2.0, 10, 20, 30, 1, 2, 3.0)


def test_the_core_does_not_learn_the_output_length() -> None:
    request = SimRequest("a", 5.0, 10, 20, 30, 1, 2)
    assert request.to_request() == Request("a", 10, 30, 5.0, 1, 2)
    assert request.to_request(6.0).arrival_s == 6.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimRequest("a", 0.0, 1, 0, 1), "'a': output_len is 0"),
        (lambda: SimRequest("a", 0.0, 0, 1, 1), "'a': prompt_len is 0"),
        (lambda: SimRequest("a", 0.0, 10**20, 1, 1), "'a': prompt_len is 100000000000000000000, must be from 1 to"),
        (lambda: SimRequest("a", 0.0, 1, 1, 0), "'a': max_tokens is 0"),
        (lambda: SimRequest("a", 0.0, 1, 1, 1, max_draft_tokens=-1), "'a': max_draft_tokens is -1"),
        (lambda: SimRequest("a", 1e18, 1, 1, 1), r"'a': arrival_s is 1e\+18, must be from 0 to 1e\+10 seconds"),
        (lambda: SimRequest("a", float("nan"), 1, 1, 1), "'a': arrival_s is nan"),
        (lambda: SimRequest("a", -1.0, 1, 1, 1), "'a': arrival_s is -1.0"),
        (lambda: SimRequest("a", 0.0, 1, 1, 1, abort_after_s=-1.0), "'a': abort_after_s is -1.0"),
        (lambda: Poisson(0.0), "Poisson.rate is 0.0"),
        (lambda: Poisson(1e-320), "Poisson.rate is 1e-320, must be >= 1e-09"),
        (lambda: Gamma(1e-300, 1.0), "Gamma.rate is 1e-300, must be >= 1e-09"),
        (lambda: Gamma(1.0, 1e-300), "Gamma.cv is 1e-300, must be from 1e-06 to"),
        (lambda: Gamma(1.0, 1e200), r"Gamma.cv is 1e\+200, must be from 1e-06 to"),
        (lambda: Gamma(1.0, float("nan")), "Gamma.cv is nan"),
        (lambda: LognormalLength(10, sigma=1e200), r"LognormalLength.sigma is 1e\+200, must be in \[0, 100\]"),
        (lambda: LognormalLength(1e300, p50=1e-300), "LognormalLength.p50 is 1e-300, too small for mean"),
        (lambda: FixedLength(0), "FixedLength.tokens is 0"),
        (lambda: LognormalLength(10), "exactly one of p50 and sigma"),
        (lambda: LognormalLength(10, p50=11), "LognormalLength.p50 is 11"),
        (lambda: LognormalLength(10, sigma=-1), "LognormalLength.sigma is -1"),
        (lambda: LognormalLength(10, p50=9, min_tokens=0), "LognormalLength.min_tokens is 0"),
        (lambda: LognormalLength(10, p50=9, min_tokens=5, max_tokens=4), "LognormalLength.max_tokens is 4"),
        (lambda: EmpiricalLength(()), "EmpiricalLength.tokens is empty"),
        (lambda: EmpiricalLength((3, 0)), "EmpiricalLength.tokens holds 0"),
        (lambda: Aborts(1.5, 1.0), "Aborts.probability is 1.5"),
        (lambda: Aborts(0.5, 0.0), "Aborts.mean_patience_s is 0.0"),
        (lambda: SyntheticWorkload(AtOnce(), FixedLength(1), FixedLength(1), -1), "num_requests is -1"),
        (lambda: SyntheticWorkload(AtOnce(), FixedLength(1), FixedLength(1), seed=-1), "seed is -1"),
        (lambda: SyntheticWorkload(AtOnce(), FixedLength(1), FixedLength(1), max_tokens=0), "max_tokens is 0"),
    ],
)
def test_refusals_name_the_field(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "arrivals",
    [
        Poisson(LOWEST_RATE),
        Poisson(1e308),
        Gamma(LOWEST_RATE, LOWEST_CV),
        Gamma(LOWEST_RATE, HIGHEST_CV),
        Gamma(1e308, LOWEST_CV),
        Gamma(1e308, HIGHEST_CV),
    ],
)
def test_arrivals_at_the_ends_of_their_ranges_are_times(arrivals: Arrivals) -> None:
    times = list(itertools.islice(arrivals.times_s(random_stream(1, "arrivals")), 3000))
    assert all(0.0 <= a <= b < math.inf for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("lengths", [LognormalLength(1e300, sigma=WIDEST_SIGMA), LognormalLength(1e300, p50=1e-5)])
def test_the_widest_lengths_are_counts(lengths: LognormalLength) -> None:
    with np.errstate(over="ignore"):
        drawn = list(itertools.islice(lengths.values(random_stream(1, "lengths")), 3000))
    assert all(1 <= length <= LONGEST_PROMPT for length in drawn)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"n\n99999999999999999999\n", ":2: n is '99999999999999999999'"),
        (b"n\n\xff\n", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, fault: str) -> None:
    path = tmp_path / "lens.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"lens.csv.*{fault}"):
        EmpiricalLength.from_csv(path, "n")

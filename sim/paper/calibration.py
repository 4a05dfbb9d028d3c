"""The numbers that are fitted, and to what (`Calibration`). All else that the claims need is an input or follows.

1. **Host work per request and step**, one number per setting whose gains are published: such that the largest Delta
   over k and over MineDraft's variants on Spec-Bench, where the stage times were measured, is the paper's. The other
   data sets, latencies, sizes and settings are predicted; S4 and S8 get the mean of S1 to S3.
   That it is *per request* is an assumption: what the plugin does between two steps is per request or per row (pickled
   sequence data, input preparation, fp32 probabilities of the whole vocabulary sent and judged), so it grows with m.
2. **One mean acceptance rate** for all draft models: such that plain SD in S2 on Arena at k = 2 makes the 310 tokens/s
   of the authors' blog. It cancels out of every Delta without TETRIS.

How requests differ in their rates, and EAGLE's mean, are read off a log of a real drafter (`paper.toml`, acceptance).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from minedraft.sim.paper.bench import Bench
from minedraft.sim.paper.setup import QWEN, load_setting, paper, published, published_gain
from minedraft.sim.paper.trial import Trial
from minedraft.sim.presets import read_presets
from minedraft.theory.extra import brentq

FITTED_ON: Final = "spec-bench"
ANCHOR: Final = ("S2", "arena", 2)
MOST_HOST_ROW_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted.

    Attributes:
        host_row_s: by setting; seconds per request and step.
        mean_rate: acceptance of a draft model, mean over requests.
        head_rate: of an EAGLE head; not fitted.
        concentration: how alike requests are, see `BetaRate`; not fitted.
    """

    host_row_s: Mapping[str, float]
    mean_rate: float
    head_rate: float
    concentration: float

    def host_row_of(self, setting: str) -> float:
        """Fitted, or `borrowed_host_row_s`."""
        return self.host_row_s.get(setting, self.borrowed_host_row_s)

    @property
    def borrowed_host_row_s(self) -> float:
        """The mean of S1 to S3: for settings that nothing can be fitted to, and to see what the others are without."""
        return fmean(self.host_row_s[name] for name in QWEN)

    def without_host_work(self) -> Calibration:
        """What the runs had that the host work was fitted with."""
        return replace(self, host_row_s=dict.fromkeys(self.host_row_s, 0.0), mean_rate=first_guess())

    def trial(self, setting: str, dataset: str, mode: str, num_draft: int, num_requests: int, **options: Any) -> Trial:
        """A trial of a setting with what was fitted; `options` are further fields of `Trial`."""
        fields: dict[str, Any] = {
            "host_row_s": self.host_row_of(setting),
            "mean_rate": self.head_rate if load_setting(setting).has_head else self.mean_rate,
            "concentration": self.concentration,
            **options,
        }
        return Trial(setting, dataset, mode, num_draft, num_requests, **fields)


def calibrate(bench: Bench, settings: Iterable[str] = QWEN) -> Calibration:
    """Fit, by simulation.

    Args:
        bench: where to run.
        settings: with published gains; S1 to S3 are always among those that are fitted.

    Raises:
        MissingTheoryExtraError: scipy isn't there.
    """
    names = tuple(dict.fromkeys((*QWEN, *settings)))
    head_rate, concentration = spread_of_log()
    guess = Calibration(dict.fromkeys(names, 0.0), first_guess(), head_rate, concentration)
    bench.prepare([trial for name in names for trial in spec_bench(bench, guess, name)], "fitting host work")
    host_row_s = {name: _host_row_s(bench, guess, name) for name in names}
    return replace(guess, host_row_s=host_row_s, mean_rate=_mean_rate(bench, replace(guess, host_row_s=host_row_s)))


def first_guess() -> float:
    """The mean acceptance rate with which host work is fitted, before the rate is."""
    rate: float = paper()["acceptance"]["first_guess"]
    return rate


def spread_of_log() -> tuple[float, float]:
    """Mean and concentration of the Beta distribution whose conditional rates start and end like the log's.

    c_j = (a + j) / (a + b + j): with first rate f and last rate l at position j, a + b = j (1 - l) / (l - f).
    """
    rates = read_presets("acceptance.toml")[paper()["acceptance"]["log"]]["conditional"]
    first, last, j = rates[0], rates[-1], len(rates) - 1
    return first, j * (1.0 - last) / (last - first)


def variants(bench: Bench) -> Iterator[tuple[int, int]]:
    """All (k, e)."""
    for k in bench.scale.draft_lengths:
        for extra in bench.scale.extras:
            yield k, extra


def spec_bench(bench: Bench, guess: Calibration, name: str) -> list[Trial]:
    """The data set that is fitted to: plain SD at every k, then every variant."""
    size = bench.scale.num_requests(FITTED_ON)
    plain = [guess.trial(name, FITTED_ON, "sd", k, size) for k in bench.scale.draft_lengths]
    return plain + [guess.trial(name, FITTED_ON, "psd", k, size, extra=extra) for k, extra in variants(bench)]


def gains_with(bench: Bench, bare: Calibration, name: str, host_row_s: float) -> dict[tuple[int, int], float]:
    """Delta by (k, e) on the data set that is fitted to, of runs without host work had they had some.

    See `Figures.throughput_with`; `bare` is what these runs had.
    """
    found = [(trial, bench[trial]) for trial in spec_bench(bench, bare, name)]
    plain = {trial.num_draft: figures for trial, figures in found if trial.mode == "sd"}
    return {
        (trial.num_draft, trial.extra): figures.throughput_with(host_row_s)
        / plain[trial.num_draft].throughput_with(host_row_s)
        - 1.0
        for trial, figures in found
        if trial.mode == "psd"
    }


def largest_gain(bench: Bench, bare: Calibration, name: str, host_row_s: float) -> float:
    """The largest of `gains_with`."""
    return max(gains_with(bench, bare, name, host_row_s).values())


def _host_row_s(bench: Bench, bare: Calibration, name: str) -> float:
    """The root in the host's time of (largest Delta) = (the paper's); 0 if even without any it is no larger."""
    paper_gain = published_gain(name, "throughput_delta", FITTED_ON) / 100.0

    def beyond(host_row_s: float) -> float:
        return largest_gain(bench, bare, name, host_row_s) - paper_gain

    return brentq(beyond, 0.0, MOST_HOST_ROW_S) if beyond(0.0) > 0.0 else 0.0


def _mean_rate(bench: Bench, guess: Calibration) -> float:
    """Two steps of the secant method on tokens per second, which are nearly linear in the rate."""
    setting, dataset, k = ANCHOR
    size = bench.scale.num_requests(dataset)

    def miss(rate: float) -> float:
        trial = guess.trial(setting, dataset, "sd", k, size, mean_rate=rate)
        return bench[trial].throughput - published("blog_sd")

    before, now = guess.mean_rate, guess.mean_rate + 0.05
    miss_before, miss_now = miss(before), miss(now)
    for _ in range(2):
        after = now - miss_now * (now - before) / (miss_now - miss_before)
        before, miss_before = now, miss_now
        now = round(min(0.99, max(0.01, after)), 4)
        if now == before:
            break
        miss_now = miss(now)
    return now

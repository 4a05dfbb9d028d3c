"""minedraft's numbers in vLLM's own Prometheus endpoint: a stat logger, which vLLM's API server loads as a plugin.

The scheduler reports with each step's statistics (`Counters.report`, carried by `compat.put_report`); this logger, in
the process of the front end, takes the report out and adds it to series in Prometheus' registry, under vLLM's labels
`model_name` and `engine`. The values are those at the end of the engine's last step, but for `minedraft_drafter_up`,
which is brought up to date every VLLM_LOG_STATS_INTERVAL seconds (10) as well, since drafters die in idle engines too.
An offline engine (`LLM`) loads no such plugins: see `attach`.

Where any stat-logger plugin is installed, vLLM collects statistics even with `--disable-log-stats`, in every engine,
and a plugin can't tell it not to. So this one has a name of its own, `minedraft_metrics`: it is not loaded where
VLLM_PLUGINS names others only, as VLLM_PLUGINS=minedraft does. `minedraft serve --disable-log-stats` sees to that.

Law of this file: it does nothing in an engine that has no settings under `minedraft`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from minedraft.backends.vllm import compat
from minedraft.backends.vllm.drafter_status import read_status, status_path
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.settings import KEY, parse_settings
from minedraft.policy import Mode

LABELS: Final = ("model_name", "engine")

T = TypeVar("T", Counter, Gauge)


class CounterSpec(NamedTuple):
    """A series that only grows: its name without `_total`, its meaning, and how much of it one reported unit is."""

    name: str
    help: str
    unit: float = 1


COUNTERS: Final = {
    "waits": CounterSpec("minedraft_draft_waits", "Times that scheduling waited for the drafter."),
    "wait_s": CounterSpec("minedraft_draft_wait_seconds", "Time that scheduling waited for the drafter.", 1e-6),
    "empty_plans": CounterSpec("minedraft_empty_plans", "Waits for drafts given up after max_wait_s: an empty step."),
    "draft_s": CounterSpec("minedraft_draft_seconds", "Time the drafter spent on answered jobs.", 1e-6),
    "overlap_s": CounterSpec(
        "minedraft_draft_overlapped_seconds", "The part of minedraft_draft_seconds in which a verification ran.", 1e-6
    ),
    "strays": CounterSpec("minedraft_plan_mismatches", "Requests that vLLM treated otherwise than planned."),
    "late_drafts": CounterSpec("minedraft_late_drafts", "Draft jobs given up after deadline_s."),
    "drafters_lost": CounterSpec("minedraft_drafters_lost", "Times that the drafter went away."),
    "preemptions": CounterSpec("minedraft_preemptions", "Requests that lost their KV by the core's decision."),
    "trims": CounterSpec("minedraft_trims", "Requests that gave back KV blocks of rejected drafts."),
    "journals_lost": CounterSpec(
        "minedraft_journals_lost", "Journals given up: their file took no more, or a policy was replaced."
    ),
    "policies_replaced": CounterSpec(
        "minedraft_policies_replaced", "Policies that failed and gave way to the default."
    ),
}
"""By key of a report. The share of drafting that is hidden is overlapped seconds over seconds."""

GAUGES: Final = {
    "drafter_up": ("minedraft_drafter_up", "1 if drafts can be had, else 0."),
    "batch_imbalance": ("minedraft_batch_imbalance", "Largest sub-batch less the smallest, in requests."),
}
_ROUNDS: Final = CounterSpec("minedraft_rounds", "Verifications that ran, by the mode in force.")
_BATCH_SIZE: Final = ("minedraft_batch_size", "Requests in a sub-batch.")

_registered: list[Counter | Gauge] = []  # of the last logger made here: a name can be registered once


class PSDStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """Named by the entry-point group `vllm.stat_logger_plugins`.

    Args:
        vllm_config: of the engine.
        engine_indexes: engines that this front end speaks to.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._series: dict[int, dict[str, Callable[[int], object]]] = {}
        settings = vllm_config.additional_config
        if not isinstance(settings, dict) or KEY not in settings:
            return
        for collector in _registered:
            REGISTRY.unregister(collector)
        _registered.clear()
        labels = {i: (vllm_config.model_config.served_model_name, str(i)) for i in engine_indexes}
        self._series = {i: {} for i in labels}
        self._status = status_path(vllm_config.instance_id)
        self._make(labels, parse_settings(settings).num_batches)
        self.log()

    def _make(self, labels: dict[int, tuple[str, str]], num_batches: int) -> None:
        for key, spec in COUNTERS.items():
            counter = _new(Counter(spec.name, spec.help, LABELS))
            for i, values in labels.items():
                self._series[i][key] = _adder(counter.labels(*values), spec.unit)
        for key, (name, text) in GAUGES.items():
            gauge = _new(Gauge(name, text, LABELS, multiprocess_mode="mostrecent"))
            for i, values in labels.items():
                self._series[i][key] = gauge.labels(*values).set
        rounds = _new(Counter(_ROUNDS.name, _ROUNDS.help, (*LABELS, "mode")))
        sizes = _new(Gauge(*_BATCH_SIZE, (*LABELS, "batch"), multiprocess_mode="mostrecent"))
        for i, values in labels.items():
            for mode in Mode:
                self._series[i][f"rounds/{mode}"] = rounds.labels(*values, str(mode)).inc
            for batch in range(num_batches):
                self._series[i][f"batch_size/{batch}"] = sizes.labels(*values, str(batch)).set

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """See vLLM: called with what a step reports."""
        series = self._series.get(engine_idx)
        if series is None or scheduler_stats is None:
            return
        for key, value in compat.take_report(scheduler_stats).items():
            if (put := series.get(key)) is not None:
                put(value)

    def log(self) -> None:
        """See vLLM: called from time to time, also while the engine is idle."""
        is_up = read_status(self._status) if self._series else None
        if is_up is not None:
            for series in self._series.values():
                series["drafter_up"](is_up)

    def log_engine_initialized(self) -> None:
        """There is nothing to tell."""


def attach(llm: Any) -> None:
    """Give an offline engine these metrics too; they are then in `prometheus_client.REGISTRY`.

    Args:
        llm: a vLLM `LLM` or `LLMEngine`, in one process or several.

    Raises:
        VllmWorldError: the engine keeps no statistics, or isn't minedraft's.
    """
    engine = getattr(llm, "llm_engine", llm)
    manager = engine.logger_manager
    if manager is None:
        raise VllmWorldError("this engine keeps no statistics; make it with disable_log_stats=False")
    stat_logger = PSDStatLogger(engine.vllm_config, manager.engine_indexes)
    if not stat_logger._series:
        raise VllmWorldError(f"this engine has no settings under {KEY!r} in additional_config")
    manager.stat_loggers.insert(0, stat_logger)  # first, since it takes the report out of what the others see


def _new(collector: T) -> T:
    _registered.append(collector)
    return collector


def _adder(series: Counter, unit: float) -> Callable[[int], object]:
    return series.inc if unit == 1 else lambda value: series.inc(value * unit)

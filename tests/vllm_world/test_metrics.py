"""minedraft's numbers in vLLM's Prometheus registry, from an engine in this process and from one in others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import Engine, Job, make_requests, minedraft_options, renamed


def test_overlap() -> None:
    """Hidden is what of a job lies within verifications, each of which may serve two jobs."""
    from minedraft.backends.vllm.counters import Counters

    counters = Counters()
    counters.verified(0.0, 1.0, drafting=True)
    counters.verified(2.0, 3.0, drafting=True)
    counters.drafted(0.5, 2.25)
    assert (counters.draft_s, counters.overlap_s) == (1.75, 0.75)
    counters.drafted(2.5, 4.0)  # began during the same verification
    assert (counters.draft_s, counters.overlap_s) == (3.25, 1.25)
    counters.verified(5.0, 6.0, drafting=True)
    counters.verified(6.0, 7.0, drafting=False)  # the job out at 5 was given up
    counters.drafted(5.0, 8.0)
    assert (counters.draft_s, counters.overlap_s) == (6.25, 1.25)
    counters.verified(9.0, 10.0, drafting=True)
    counters.verified(10.0, 11.0, drafting=True)
    counters.ingested(10.5)  # which is no drafting
    counters.drafted(10.75, 12.0)
    assert (counters.draft_s, counters.overlap_s) == (7.5, 1.5)


def test_reports_add_up() -> None:
    """Counters are told once, gauges every time, and what rounding hides comes later."""
    from minedraft.backends.vllm.counters import TOTALS, TOTALS_S, Counters
    from minedraft.backends.vllm.stat_logger import COUNTERS
    from minedraft.policy import Mode

    assert {*TOTALS, *TOTALS_S} == set(COUNTERS)
    counters = Counters()
    sums: dict[str, int] = {}
    for i in range(30):
        counters.started(Mode.PSD if i % 3 else Mode.SD)
        counters.wait_s += 0.4e-6
        counters.waits += 1
        for key, value in counters.report(True, (2, 5), 2).items():
            sums[key] = sums.get(key, 0) + value
    assert sums.pop("drafter_up") == 30
    assert sums.pop("batch_imbalance") == 90
    assert (sums.pop("batch_size/0"), sums.pop("batch_size/1")) == (60, 150)
    assert sums == {"waits": 30, "wait_s": 12, "rounds/psd": 20, "rounds/sd": 10}
    assert counters.report(False, (3, 0), 1) == {
        "drafter_up": 0,
        "batch_size/0": 3,
        "batch_size/1": 0,
        "batch_imbalance": 0,
    }


def test_the_report_survives_the_way_to_the_front_end() -> None:
    """vLLM's encoding keeps it; its loggers, with and without MFU metrics, take no notice of it."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.perf import DebugPerfStats, PerfMetricsDebugLogging, PerfStats
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from minedraft.backends.vllm import compat

    report = {"rounds/psd": 1, "drafter_up": 0, "wait_s": 2**40}
    debug = DebugPerfStats(0.0, 1, 2, {"prefill": 3}, {}, {}, {})
    for perf_stats in (None, PerfStats(1, 2, 3), PerfStats(1, 2, 3, debug)):
        stats = SchedulerStats(num_running_reqs=5, perf_stats=perf_stats)
        compat.put_report(stats, report)
        frames = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
        stats = MsgpackDecoder(EngineCoreOutputs).decode(frames).scheduler_stats
        assert stats.num_running_reqs == 5
        PerfMetricsDebugLogging().observe(stats.perf_stats.debug_stats)
        assert compat.take_report(stats) == report
        assert compat.take_report(stats) == {}
        if perf_stats is not None:
            assert (stats.perf_stats.num_flops_per_gpu, stats.perf_stats.num_write_bytes_per_gpu) == (1, 3)
    assert stats.perf_stats.debug_stats.context_breakdown == {"prefill": 3}
    assert compat.take_report(SchedulerStats()) == {}


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Engine]:
    options = minedraft_options(models / "noisy", mode="psd", drafter={"restart_backoff_s": 0.01})
    with Engine(models / "target", num_gpu_blocks_override=18, **options) as engine:
        yield engine


def value(name: str, **labels: str) -> float:
    """Of one series of the only engine here."""
    from prometheus_client import REGISTRY

    found = [
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels["engine"] == "0" and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def check_sums(engine: Engine) -> None:
    """Between steps, what is exposed is all that was counted."""
    from minedraft.backends.vllm.stat_logger import COUNTERS

    counters = engine.conductor.counters
    for key, spec in COUNTERS.items():
        assert value(f"{spec.name}_total") == pytest.approx(getattr(counters, key), abs=2e-6), key
    for mode, count in counters.rounds.items():
        assert value("minedraft_rounds_total", mode=str(mode)) == count
    sizes = engine.conductor.core.state.batches.sizes()
    assert [value("minedraft_batch_size", batch=str(i)) for i in range(len(sizes))] == list(sizes)


def test_engine_in_this_process(engine: Engine, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY, generate_latest

    from minedraft.backends.vllm import conductor
    from minedraft.backends.vllm.stat_logger import attach

    monkeypatch.setattr(conductor, "REPORT_PERIOD_S", 0.0)

    attach(engine.llm)
    assert value("minedraft_drafter_up") == 1.0  # though nothing ran yet
    sizes: list[tuple[float, ...]] = []

    def look(step: int) -> None:
        if step:
            check_sums(engine)
            sizes.append((value("minedraft_batch_size", batch="0"), value("minedraft_batch_size", batch="1")))
            assert value("minedraft_batch_imbalance") == abs(sizes[-1][0] - sizes[-1][1])

    assert len(engine.run(make_requests(), on_step=look)) == len(make_requests())
    assert max(sum(pair) for pair in sizes) == 6.0
    assert value("minedraft_drafter_up") == 1.0
    assert value("minedraft_rounds_total", mode="psd") > 30
    assert value("minedraft_rounds_total", mode="ar") == 0.0
    assert value("minedraft_preemptions_total") > 0
    assert value("minedraft_trims_total") > 0
    engine.run(renamed(make_requests(), "again"))  # with nobody looking between two steps, while drafts come in
    assert 0.0 < value("minedraft_draft_overlapped_seconds_total") <= value("minedraft_draft_seconds_total")
    assert value("minedraft_plan_mismatches_total") == 0.0
    check_sums(engine)
    text = generate_latest(REGISTRY).decode()
    assert f'minedraft_drafter_up{{engine="0",model_name="{models / "target"}"}} 1.0' in text
    assert "# TYPE minedraft_draft_wait_seconds_total counter" in text
    # vLLM's own, beside ours.
    metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
    state = engine.conductor.core.state
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == state.num_draft_tokens  # type: ignore[attr-defined]
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == state.num_accepted_tokens  # type: ignore[attr-defined]


def test_reports_are_few_and_whole_at_the_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from minedraft.backends.vllm import conductor

    monkeypatch.setattr(conductor, "REPORT_PERIOD_S", 1e6)
    put = compat_puts(monkeypatch)
    steps = engine.conductor.counters.steps
    engine.run(renamed(make_requests(), "few"))
    assert engine.conductor.counters.steps > steps + 30
    assert 1 <= len(put) <= 2  # the first was due; the last comes with the end of all requests
    check_sums(engine)


def compat_puts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Reports that go out from now on."""
    from minedraft.backends.vllm import compat

    put, found = compat.put_report, []

    def watched(stats: Any, report: dict[str, int]) -> None:
        found.append(report)
        put(stats, report)

    monkeypatch.setattr(compat, "put_report", watched)
    return found


def test_a_lost_drafter_shows(engine: Engine) -> None:
    os.kill(engine.conductor.drafter_pid, signal.SIGKILL)
    deadline = time.monotonic() + 240.0
    number = 0
    while value("minedraft_drafters_lost_total") < 1.0:
        assert time.monotonic() < deadline
        engine.run([Job(f"lost{number}", [5, 6], 2)])
        number += 1
    assert value("minedraft_drafter_up") == 0.0
    engine.run([Job("alone", [5, 6, 7], 8)])
    check_sums(engine)


def test_an_idle_engine_tells_of_its_drafter(engine: Engine) -> None:
    """No step tells that the drafter is gone, and that it is back."""

    def await_value(wanted: float) -> None:
        deadline = time.monotonic() + 240.0
        while value("minedraft_drafter_up") != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            engine.engine.do_log_stats()  # as a server's timer does

    await_value(1.0)
    os.kill(engine.conductor.drafter_pid, signal.SIGKILL)
    await_value(0.0)
    await_value(1.0)


def test_the_drafter_s_status_is_for_display_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from minedraft.backends.vllm.drafter_status import DrafterStatus, read_status

    path = tmp_path / "status"
    assert read_status(path) is None
    path.symlink_to(tmp_path / "somebody else's")  # whoever it was that left it there
    status = DrafterStatus(path)
    assert read_status(path) is False
    status.tell(is_up=True)
    assert read_status(path) is True
    assert path.stat().st_mode & 0o777 == 0o600
    status.close()
    status.close()
    status.tell(is_up=True)
    assert not list(tmp_path.iterdir())
    status = DrafterStatus(tmp_path / "no folder" / "status")
    assert "out of date" in caplog.text
    status.tell(is_up=True)
    status.close()


def test_a_second_logger_takes_the_names_over(engine: Engine) -> None:
    """As a second engine in a process does; vLLM's own series change hands in the same way."""
    from minedraft.backends.vllm.stat_logger import PSDStatLogger

    PSDStatLogger(engine.engine.vllm_config, [0])
    assert value("minedraft_rounds_total", mode="psd") == 0.0


def test_engines_without_statistics_or_without_minedraft(models: Path) -> None:
    from prometheus_client import REGISTRY

    from minedraft.backends.vllm.errors import VllmWorldError
    from minedraft.backends.vllm.stat_logger import attach

    jobs = [Job("x", [5, 6, 7], 5)]
    options = minedraft_options(None, mode="ar", k=1)
    with Engine(models / "target", disable_log_stats=True, **options) as engine:
        assert len(engine.run(jobs)["x"]) == 5
        with pytest.raises(VllmWorldError, match="disable_log_stats"):
            attach(engine.llm)
    before = [metric.name for metric in REGISTRY.collect() if metric.name.startswith("minedraft")]
    with Engine(models / "target") as engine:
        with pytest.raises(VllmWorldError, match="no settings"):
            attach(engine.llm)
        assert len(engine.run(jobs)["x"]) == 5
    assert [metric.name for metric in REGISTRY.collect() if metric.name.startswith("minedraft")] == before


def test_engine_in_other_processes(models: Path) -> None:
    """As `vllm serve` has it: the API server's half here, the engine's and the worker's elsewhere."""
    text = asyncio.run(serve_one(models))
    lines = [line for line in text.splitlines() if line.startswith("minedraft_")]
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if 'mode="ar"' not in line}
    assert found["minedraft_drafter_up"] == 1.0
    assert sum(line.startswith("minedraft_rounds_total") and not line.endswith(" 0.0") for line in lines) == 1
    assert found["minedraft_draft_seconds_total"] > 0.0
    assert found["minedraft_plan_mismatches_total"] == 0.0
    assert 'vllm:spec_decode_num_draft_tokens_total{engine="0"' in text


async def serve_one(models: Path) -> str:
    """Metrics after two requests. The plugin is found by vLLM: nobody names the logger here."""
    from prometheus_client import generate_latest
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    arguments = {
        "model": str(models / "target"),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 6,
        "block_size": 32,
        "num_gpu_blocks_override": 65,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        **minedraft_options(models / "target", mode="psd"),
    }
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        lines = generate_latest(get_prometheus_registry()).decode().splitlines()
        (up,) = [line for line in lines if line.startswith("minedraft_drafter_up{")]
        assert up.endswith(" 1.0")  # though the engine has had nothing to do

        async def generate(number: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
            outputs = llm.generate({"prompt_token_ids": [5, 6, number]}, params, f"q{number}")
            return len([output async for output in outputs][-1].outputs[0].token_ids)

        assert await asyncio.gather(generate(7), generate(8)) == [20, 20]
        return generate_latest(get_prometheus_registry()).decode()
    finally:
        llm.shutdown()


# --- The plugins.


def test_vllm_finds_the_plugins() -> None:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase, load_stat_logger_plugin_factories

    from minedraft.backends.vllm.plugin import METRICS_PLUGIN, register
    from minedraft.backends.vllm.stat_logger import PSDStatLogger

    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["minedraft"] is register
    assert METRICS_PLUGIN in load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP)
    assert PSDStatLogger in load_stat_logger_plugin_factories()
    assert issubclass(PSDStatLogger, AggregateStatLoggerBase)


def test_statistics_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM collects them for any stat logger; ours can be left out, and nothing else with it."""
    from importlib.metadata import EntryPoint, EntryPoints

    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    from minedraft.backends.vllm import plugin
    from minedraft.backends.vllm.stat_logger import PSDStatLogger

    before = load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
    allowed = plugin.without_metrics(None)
    assert allowed is not None
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert PSDStatLogger not in load_stat_logger_plugin_factories()
    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP) == before
    assert plugin.without_metrics("a,minedraft_metrics, b") == "a, b"
    assert plugin.without_metrics("") == ""
    # Routes of an endpoint plugin must not be opened by the way, just since it shares its name with a harmless one.
    monkeypatch.setattr(plugin, "entry_points", lambda group: EntryPoints([EntryPoint("both", "x:y", group)]))
    assert plugin.without_metrics(None) is None


def test_the_short_paths() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    import minedraft.backends.vllm as package
    from minedraft.backends.vllm.null_proposer import NullProposer
    from minedraft.backends.vllm.scheduler import PSDScheduler

    assert resolve_obj_by_qualname("minedraft.backends.vllm.PSDScheduler") is PSDScheduler
    assert package.NullProposer is NullProposer
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


def run_script(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_general_plugin_is_silent_and_loads_nothing() -> None:
    """It must mean nothing to those who don't use minedraft."""
    run_script(
        "import sys, logging\n"
        "from minedraft.backends.vllm.plugin import register\n"
        "register(); register()\n"
        "heavy = [name for name in ('torch', 'vllm', 'numpy', 'prometheus_client') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert not logging.getLogger('minedraft').handlers\n"
        "assert not logging.getLogger().handlers\n"
    )


def test_the_general_plugin_lets_us_log_as_vllm_does() -> None:
    run_script(
        "import logging\n"
        "from minedraft.backends.vllm.plugin import register\n"
        "ours, theirs = logging.getLogger('minedraft'), logging.getLogger('vllm')\n"
        "handler = logging.StreamHandler()\n"
        "theirs.addHandler(handler)\n"
        "theirs.setLevel('INFO')\n"
        "theirs.propagate = False\n"
        "for _ in range(2):\n"
        "    register()\n"
        "    assert (ours.handlers, ours.level, ours.propagate) == ([handler], logging.INFO, False)\n"
        "ours.setLevel('DEBUG')  # somebody's own choice stays\n"
        "register()\n"
        "assert ours.level == logging.DEBUG\n"
    )

"""`minedraft compare` over seeds and loads: pairing, intervals, files, jobs, interruption, the highest rate."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minedraft.cli import run_cli
from minedraft.commands.arrival_rate import at_rate
from minedraft.commands.compare_options import CompareOptions
from minedraft.commands.compare_seeds import run_seeds
from minedraft.commands.figures import BY_DEFAULT, OVER_LOAD, all_names, chosen
from minedraft.commands.many_runs import carry_out, run_once
from minedraft.commands.rate_search import NUM_HALVINGS, Found, Search, search
from minedraft.commands.repeated import Repeated, with_seed
from minedraft.commands.seeds_report import blocks_table, notes, sweep_table
from minedraft.commands.variants import Axes, make_variants
from minedraft.config import RunConfig, load_config
from minedraft.config_tree import Override
from minedraft.statistics import mean_estimate, pairing

ROOT = Path(__file__).parent.parent
SMALL = ("--num-requests", "30", "--set", "workload.output_lens={mean=24,p50=20}")
POISSON = ("--set", 'workload.arrivals={kind="poisson",rate=8}')


@dataclass
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join(self.out.split())


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `minedraft compare` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Ran:
        code = run_cli(["compare", *map(str, arguments)])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def config(**settings: Any) -> RunConfig:
    return load_config(None, [Override(key.replace("__", "."), value, key) for key, value in settings.items()])


def refused(ran: Ran) -> str:
    assert ran.code == 2, ran
    assert ran.err.count("\n") == 1
    return ran.err.removeprefix("minedraft: error: ").rstrip("\n")


# --- common random numbers


def test_every_variant_has_the_same_requests_and_luck_under_a_seed(compare: Any) -> None:
    found = json.loads(compare(*SMALL, "--seeds", 4, "--seed", 7, "--json", "-").out)["variants"]
    assert [one["name"] for one in found] == ["ar", "sd", "psd"]
    for one in found:
        assert one["seeds"] == [run["seed"] for run in one["runs"]] == [7, 8, 9, 10]
    tokens = [[run["total_output_tokens"] for run in one["runs"]] for one in found]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens[0])) > 1, "seeds differ"
    accepted = [[run["spec_decode_accepted_tokens"] for run in one["runs"]] for one in found[1:]]
    assert accepted[0] == accepted[1]


def test_estimates_and_pairs_are_those_of_the_runs(compare: Any) -> None:
    found = json.loads(compare(*SMALL, *POISSON, "--seeds", 5, "--confidence", 0.9, "--json", "-").out)
    assert (found["baseline"], found["confidence"], found["x_name"]) == ("ar", 0.9, None)
    base, other = found["variants"][0], found["variants"][2]
    for name in ("output_throughput", "p99_ttft_ms", "target_utilisation"):
        a, b = ([run[name] for run in one["runs"]] for one in (base, other))
        estimate = mean_estimate(b, 0.9)
        assert other["estimates"][name] == {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        pair, told = pairing(a, b, 0.9), other["against_baseline"][name]
        assert told["difference"]["low"] == pair.difference.low
        assert told["difference"]["decided"] == pair.difference.excludes(0.0)
        assert pair.ratio is not None
        assert told["ratio"]["value"] == pair.ratio.value
        assert told["seeds_saved"] == pair.seeds_saved
    assert base["against_baseline"] == {}
    assert "request_goodput" not in base["estimates"]


def test_pairs_are_narrower_than_independent_runs(compare: Any) -> None:
    found = json.loads(compare(*SMALL, *POISSON, "--seeds", 8, "--json", "-", "--mode", "sd", "--mode", "psd").out)
    base, other = found["variants"]
    for name in ("output_throughput", "mean_e2el_ms", "total_output_tokens"):
        pair = other["against_baseline"][name]["difference"]
        apart = math.hypot(*((one["estimates"][name]["high"] - one["estimates"][name]["low"]) for one in (base, other)))
        assert pair["high"] - pair["low"] < 0.5 * apart
    assert other["against_baseline"]["output_throughput"]["correlation"] > 0.9
    equal = other["against_baseline"]["total_output_tokens"]
    assert (equal["difference"]["value"], equal["difference"]["decided"], equal["seeds_saved"]) == (0.0, False, None)


def test_the_baseline_may_be_chosen(compare: Any) -> None:
    one = json.loads(compare(*SMALL, "--seeds", 3, "--json", "-").out)["variants"]
    other = json.loads(compare(*SMALL, "--seeds", 3, "--baseline", "psd", "--json", "-").out)["variants"]
    forth = one[2]["against_baseline"]["makespan"]["ratio"]
    back = other[0]["against_baseline"]["makespan"]["ratio"]
    assert forth["value"] == pytest.approx(1.0 / back["value"])
    assert forth["low"] == pytest.approx(1.0 / back["high"])
    assert "Ratios are to the first column, 'sd'" in compare(*SMALL, "--baseline", "sd").words


# --- tables


def rendered(table: Any, width: int) -> list[str]:
    file = io.StringIO()
    Console(width=width, highlight=False, color_system=None, file=file).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.fixture(scope="module")
def sweep() -> list[Repeated]:
    """Three modes at a light load, a heavy one and an overload."""
    limits = [Override("slo.ttft_ms", 500.0, ""), Override("workload.output_lens", 32, "")]
    variants = make_variants(None, Axes(rates="64,1,16"), [Override("workload.num_requests", 100, ""), *limits])
    repeated, failure = run_seeds(variants, CompareOptions(num_seeds=3))
    assert failure is None
    return repeated


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_a_terminal(sweep: list[Repeated], width: int) -> None:
    blocks = rendered(blocks_table(sweep[::3], chosen((), BY_DEFAULT, slo=True), "ar", "title"), width)
    assert max(map(len, blocks)) <= width
    label = blocks.index("Output throughput (tok/s)")
    for line, name in zip(blocks[label + 1 : label + 4], ("ar", "sd", "psd"), strict=True):
        assert re.match(rf"  {name}, rate=1 +[\d,.]+ ± [\d,.]+", line), "one line each"
    for figure in chosen((), OVER_LOAD, slo=True):
        lines = rendered(sweep_table(sweep, figure, "ar", "rate"), width)
        assert max(map(len, lines)) <= width
        assert [line.split()[0] for line in lines[-3:]] == ["1", "16", "64"]


def test_a_sweep_compares_at_equal_load_and_marks_overload(sweep: list[Repeated]) -> None:
    names = {one.variant.name: one for one in sweep}
    assert [one.variant.x for one in sweep] == [1.0, 16.0, 64.0] * 3
    assert {name for name, one in names.items() if not one.steady} >= {"ar, rate=64", "sd, rate=64", "psd, rate=64"}
    assert all(one.steady for name, one in names.items() if name.endswith("rate=1"))
    figure = chosen(("p99_ttft_ms",), (), slo=True)[0]
    lines = rendered(sweep_table(sweep, figure, "ar", "rate"), 100)
    assert "*" not in lines[-3]
    assert lines[-1].count("*") == 3
    told = " ".join(notes(sweep, [figure], "ar", 0.95))
    assert re.search(r"\* Not in steady state: ar \([\d, ]*64\), sd \([\d, ]*64\), psd \([\d, ]*64\)\. ", told)
    assert "The pairs were worth" in told
    assert "A P99 over 100 requests" in told
    assert "psd 4 + 1 devices and up to 32 requests in flight" in told


def test_attainment_and_goodput_over_load(sweep: list[Repeated]) -> None:
    for one in sweep:
        for outcome in one.outcomes.values():
            summary = outcome.summary
            assert summary.slo_attainment is not None
            assert summary.request_goodput == pytest.approx(summary.slo_attainment * 100 / summary.duration)
    light, heavy = (sum(one.values("slo_attainment")[0] for one in sweep if one.variant.x == x) for x in (1.0, 64.0))
    assert light == pytest.approx(3.0)
    assert heavy < 2.0


def test_what_is_equal_and_what_is_undecided_is_marked(compare: Any) -> None:
    options = ("--seeds", 3, "--metric", "total_output_tokens", "--metric", "overlapped_draft_share")
    ran = compare(*SMALL, *options, "--mode", "sd", "--mode", "psd", "--policy", "admission=fcfs")
    assert re.search(r"total_output_tokens\s+sd +\d.*\s+psd +\d.* 1\.000x \[1\.000, 1\.000\] =", ran.out)
    assert re.search(r"psd +[\d.]+ ± [\d.]+ +\+[\d.]+ \[\+[\d.]+, \+[\d.]+\] *\n", ran.out), "points, decided"
    undecided = compare(*SMALL, *POISSON, "--seeds", 2, "--metric", "p99_ttft_ms", "--mode", "sd", "--mode", "psd")
    assert re.search(r"psd .*x \[.*\] \?", undecided.out), "two seeds decide little"


def test_a_trace_says_what_its_intervals_are(compare: Any, tmp_path: Path) -> None:
    lines = [{"arrival_s": i, "prompt_len": 20, "output_len": 12} for i in range(12)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ran = compare("--workload", "t.jsonl", "--seeds", 2)
    assert ran.code == 0
    assert "A recorded trace is the same under every seed" in ran.words


def test_one_seed_without_a_sweep_is_the_full_table_as_before(compare: Any) -> None:
    ran = compare(*SMALL)
    assert "Mean imbalance of the batches" in ran.out
    assert "±" not in ran.out


# --- files


@pytest.mark.slow
def test_jobs_change_nothing(compare: Any, tmp_path: Path) -> None:
    options = ("--mode", "ar", "--mode", "psd", "--rates", "4,30", "--seeds", 2, "--goodput", "ttft:300,tpot:60")
    printed = {}
    for jobs in (1, 2):
        names = [f"--{kind}={jobs}.{ending}" for kind, ending in (("json", "json"), ("csv", "csv"), ("figure", "svg"))]
        ran = compare(*SMALL, *options, "--jobs", jobs, *names)
        assert ran.code == 0, ran.err
        printed[jobs] = ran.out
    assert printed[1] == printed[2]
    for ending in ("json", "csv", "svg"):
        assert (tmp_path / f"1.{ending}").read_bytes() == (tmp_path / f"2.{ending}").read_bytes(), ending
    assert compare(*SMALL, "--jobs", 2).out == compare(*SMALL).out


def test_csv_has_a_row_per_variant_and_figure(compare: Any, tmp_path: Path) -> None:
    ran = compare(*SMALL, "--rates", "4,8", "--seeds", 3, "--csv", "a.csv", "--json", "a.json")
    assert ran.code == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    variants = {one["name"]: one for one in json.loads((tmp_path / "a.json").read_text())["variants"]}
    assert len({(row["variant"], row["metric"]) for row in rows}) == len(rows)
    assert {row["variant"] for row in rows} == variants.keys()
    assert {row["metric"] for row in rows} == set(all_names()) - {"request_goodput", "slo_attainment"}
    for row in rows:
        one = variants[row["variant"]]
        assert float(row["mean"]) == one["estimates"][row["metric"]]["value"]
        assert (row["line"], float(row["x"]), row["x_name"]) == (one["line"], one["x"], "rate")
        assert bool(row["baseline"]) == (one["line"] != "ar")
        if row["baseline"]:
            assert row["baseline"] == f"ar, rate={one['x']:g}"
            ratio = one["against_baseline"][row["metric"]]["ratio"]
            assert row["ratio"] == ("" if ratio is None else str(ratio["value"]))


@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_figures_are_drawn(compare: Any, tmp_path: Path, ending: str) -> None:
    options = ("--over", "workload.arrivals.concurrency=1,2,4", "--metric", "output_throughput")
    arrivals = ("--set", 'workload.arrivals={kind="closed-loop",concurrency=1}')
    ran = compare(*SMALL, *arrivals, *options, "--figure", f"a.{ending}")
    assert ran.code == 0, ran.err
    magic = {"png": b"\x89PNG", "pdf": b"%PDF"}[ending]
    assert (tmp_path / f"a.{ending}").read_bytes().startswith(magic)
    assert re.search(r"^ *concurrency +ar +sd +psd", ran.out, re.MULTILINE)


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", 0), "--seeds 0: must be a whole number >= 1"),
        (("--jobs", 0), "--jobs 0: must be a whole number >= 1"),
        (("--confidence", 1), "--confidence 1: must be at least 0.5 and below 1"),
        (("--baseline", "x"), "--baseline x: no such variant; there are 'ar', 'sd', 'psd'"),
        (("--metric", "p99_ttf"), "--metric p99_ttf: no such figure; did you mean p99_ttft_ms"),
        (("--metric", "slo_attainment"), "--metric slo_attainment: needs limits to keep; add --goodput"),
        (("--rates", "1,x"), "--rates 1,x: 'x' is no number"),
        (("--rates", "0,1"), "--rates 0,1: must be above 0"),
        (("--rates", "1", "--over", "seed=1"), "--rates and --over: a table has one axis"),
        (("--over", "scheduler.block_size=a"), "--over scheduler.block_size=a: 'a' is no number"),
        (("--over", "scheduler.block_size=0"), "--over scheduler.block_size=0: scheduler.block_size: is 0"),
        (("--over", "seed=1,2"), "its seed is 2, that of ar, seed=1 is 1"),
        (("--mode", "sd", "--mode", "sd"), "--mode sd: is given twice; leave one out"),
        (("--rates", "1,2,1.0"), "--rates 1: is given twice; leave one out"),
        (("--over", "scheduler.max_batch_size=4,8,4"), "--over scheduler.max_batch_size=4: is given twice"),
        (("--vary", "scheduler.max_batch_size=4,4"), "--vary scheduler.max_batch_size=4: is given twice"),
        (("--policy", "selection=all", "--policy", "selection=all"), "--policy selection=all: is given twice"),
        (("--figure", "a.png"), "--figure: draws figures over an axis; add --rates"),
        (("--rates", "1", "--figure", "a.gif"), "--figure a.gif: must end in .png, .svg, .pdf"),
        (("--csv", "no/a.csv"), "no/a.csv: no such folder"),
        (("--goodput", "ttft=4"), "--goodput 'ttft=4': write it as ttft:500"),
        (("--goodput", "ttft:-1"), "--goodput 'ttft:-1': write it as ttft:500"),
        (("--find-rate", "0.9"), "--find-rate: needs limits to keep; add --goodput"),
        (("--find-rate", "2"), "--find-rate 2: is a share of the requests"),
        (("--find-rate", "0.9", "--goodput", "ttft:9", "--rates", "1"), "--find-rate: looks for a rate itself"),
        (
            ("--rates", "1", "--set", 'workload.arrivals={kind="closed-loop",concurrency=4}'),
            "workload.arrivals: a closed loop has no arrival rate; sweep its clients",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(compare: Any, options: tuple[object, ...], message: str) -> None:
    assert message in refused(compare(*SMALL, *options))


NOT_STEADY = "Not in steady state"


@pytest.mark.parametrize("seeds", [1, 3])
def test_filling_an_empty_system_is_no_overload(compare: Any, seeds: int) -> None:
    for rate in (0.5, 1):
        ran = compare("--rates", rate, "--num-requests", 20, "--seeds", seeds)
        assert (ran.code, NOT_STEADY in ran.words) == (0, False), rate


@pytest.mark.slow
def test_a_rate_that_keeps_the_slo_is_no_overload(compare: Any, tmp_path: Path) -> None:
    slo = ("--goodput", "ttft:1000,tpot:100", "--num-requests", 60)
    ran = compare("--find-rate", 0.9, *slo, "--json", "a.json")
    assert NOT_STEADY not in ran.words
    found = json.loads((tmp_path / "a.json").read_text())["variants"]
    assert [variant["steady_state"] for variant in found] == [True] * 3
    for variant in found:
        rate = variant["highest_rate"]["value"]
        assert NOT_STEADY not in compare("--mode", variant["name"], "--rates", rate, *slo).words
        assert NOT_STEADY in compare("--mode", variant["name"], "--rates", 2 * rate, "--num-requests", 200).words


@pytest.mark.parametrize("more", [(), ("--seeds", 2), ("--over", "workload.arrivals.concurrency=30,40")])
@pytest.mark.parametrize("num_requests", [20, 60])
def test_a_closed_loop_is_no_overload(compare: Any, more: tuple[object, ...], num_requests: int) -> None:
    """Who waits for an answer sends no more, however many wait, and at whatever length of the run."""
    loop = ("--set", 'workload.arrivals={kind="closed-loop",concurrency=40}', "--num-requests", num_requests)
    ran = compare(*loop, *more)
    assert (ran.code, NOT_STEADY in ran.words) == (0, False)


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize(
    ("settings", "own"),
    [((), True), (("devices.colocated=true",), False), (("drafting.method=ngram",), False)],
)
def test_what_the_modes_are_given_is_true(compare: Any, settings: tuple[str, ...], own: bool, seeds: int) -> None:
    options = [part for setting in settings for part in ("--set", setting)]
    words = compare(*SMALL, "--mode", "sd", "--mode", "psd", *options, "--seeds", seeds).words
    assert "since psd keeps several batches in flight" in words
    assert f"psd 4 + {int(own)} devices and up to 32 requests" in words
    assert ("devices of its own" in words) is own


def test_pearl_alone_is_told_of_its_devices_and_not_of_psd(compare: Any) -> None:
    words = compare(*SMALL, "--mode", "sd", "--mode", "pearl").words
    assert "since a drafter with devices of its own adds to the target's (target + drafter): sd 4 + 0 dev" in words
    assert "psd" not in words


def test_two_variants_of_one_name_are_refused(compare: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[[variants]]\nname = 'm'\n[[variants]]\nname = 'm'\nmode = 'sd'\n")
    assert "run.toml: two variants are called 'm'; give each a name" in refused(compare("run.toml"))


def test_a_missing_extra_is_named_before_anything_runs(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from minedraft import statistics

    statistics._t.cache_clear()
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    assert "--seeds 2: this needs the theory extra (scipy is missing)" in refused(compare(*SMALL, "--seeds", 2))
    assert compare(*SMALL, "--rates", "4,8").code == 0, "one seed needs none"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'minedraft[plot]'" in refused(compare(*SMALL, "--rates", "4,8", "--figure", "a.png"))


# --- failures


def test_a_variant_that_fails_is_named_and_the_others_stay(compare: Any, tmp_path: Path) -> None:
    (tmp_path / "broken_policy.py").write_text(
        "class Broken:\n    def num_draft_tokens(self, seq, batch, load):\n        return -1\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        policies = ("--policy", "draft_length=broken_policy:Broken", "--policy", "draft_length=fixed")
        ran = compare(*SMALL, *policies, "--seeds", 2, "--json", "a.json")
    finally:
        sys.path.remove(str(tmp_path))
    assert "broken_policy:Broken, seed 0: draft_length policy" in refused(ran)
    runs = json.loads((tmp_path / "a.json").read_text())["variants"]
    assert [len(one["runs"]) for one in runs] == [0, 2]
    assert "-" in ran.out


INTERRUPTING = """
import os, signal
num_calls = 0
class Interrupting:
    def num_draft_tokens(self, seq, batch, load):
        global num_calls
        num_calls += 1
        if num_calls == {calls}:
            os.kill({process}, signal.SIGINT)
        return 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_keeps_what_was_finished(tmp_path: Path, jobs: int) -> None:
    """The signal goes to the command's process, sent from a run in progress."""
    process = "os.getpid()" if jobs == 1 else "os.getppid()"
    (tmp_path / "interrupting.py").write_text(INTERRUPTING.format(calls=3000, process=process))
    options = ("--policy", "draft_length=interrupting:Interrupting", "--set", "workload.output_lens=24")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from minedraft.cli import main; main()",
            *("compare", "--mode", "sd", "--num-requests", "60", *options),
            *("--seeds", "60", "--jobs", str(jobs), "--json", "a.json"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        check=False,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else it is ignored where the tests ignore it
    )
    found = re.fullmatch(r"minedraft: error: interrupted: (\d+) of 60 runs were finished\n", done.stderr)
    assert done.returncode == 130, done.stderr
    assert found, done.stderr
    seeds = json.loads((tmp_path / "a.json").read_text())["variants"][0]["seeds"]
    assert 1 <= len(seeds) == int(found[1]) < 60
    assert "Output throughput" in done.stdout


def square(value: int) -> int:
    if value < 0:
        from minedraft.commands.errors import CommandError

        raise CommandError(f"{value} is negative")
    return value * value


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_after_a_failure_none_is_kept(jobs: int) -> None:
    found, failure = carry_out(square, [3, 2, -1, 5, -7, 6], jobs, "squaring")
    assert found == [9, 4, None, None, None, None]
    assert str(failure) == "-1 is negative"
    assert carry_out(square, [3, 2], jobs, "squaring") == ([9, 4], None)


def die(_: int) -> int:
    os._exit(3)


@pytest.mark.slow
def test_a_worker_that_dies_is_no_endless_wait() -> None:
    found, failure = carry_out(die, [1, 2], 2, "dying")
    assert found == [None, None]
    assert "a worker process died" in str(failure)


# --- arrival rates


@pytest.mark.parametrize(
    "workload",
    [
        {"arrivals": {"kind": "poisson", "rate": 1.0}},
        {"arrivals": {"kind": "gamma", "rate": 3.0, "cv": 4.0}},
        {"kind": "azure-conv-like", "rate": 1.0},
        {"kind": "azure-code-like"},
    ],
)
def test_another_rate_is_the_same_traffic_closer_together(workload: dict[str, Any]) -> None:
    base = config(workload={"num_requests": 200, **workload})
    slow, fast = (list(at_rate(base, rate).build_workload()) for rate in (2.0, 8.0))
    for one, other in zip(slow, fast, strict=True):
        assert other.arrival_s == pytest.approx(one.arrival_s / 4.0)
        assert (one.prompt_len, one.output_len, one.max_tokens) == (
            other.prompt_len,
            other.output_len,
            other.max_tokens,
        )
    long = list(at_rate(config(workload={**workload, "num_requests": 4000}), 2.0).build_workload())
    if "code" not in str(workload):  # whose cv of 13 takes far more
        assert len(long) / long[-1].arrival_s == pytest.approx(2.0, rel=0.2)


def test_a_rate_keeps_what_was_not_given() -> None:
    """Pools follow from the GPUs' memory unless they are given; a copy must not give them."""
    cost = {"kind": "roofline", "target": {"model": "qwen3-32b", "gpu": "h100", "tp": 4}}
    cost["draft"] = {"model": "qwen3-0.6b", "gpu": "h100"}
    base = config(cost=cost, mode="psd")
    changed = with_seed(at_rate(base, 3.0), 5)
    assert changed.scheduler_config() == base.scheduler_config()
    assert changed.scheduler_config().num_target_blocks != base.scheduler.num_target_blocks
    assert (changed.seed, changed.workload.arrivals.rate) == (5, 3.0)  # type: ignore[union-attr]


def test_all_at_once_becomes_poisson_and_a_trace_has_no_rate(compare: Any, tmp_path: Path) -> None:
    assert at_rate(config(), 3.0).workload.arrivals.kind == "poisson"  # type: ignore[union-attr]
    (tmp_path / "t.jsonl").write_text('{"arrival_s": 0, "prompt_len": 3, "output_len": 4}\n')
    assert "a recorded trace brings its own arrivals; sweep" in refused(compare("--workload", "t.jsonl", "--rates", 1))


# --- the highest rate


SERVED = {"workload__num_requests": 40, "workload__output_lens": 16, "slo": {"ttft_ms": 400.0}}


def kept(run: RunConfig, rate: float) -> float:
    return run_once(at_rate(run, rate)).summary.slo_attainment or 0.0


def test_the_highest_rate_is_where_the_slo_breaks() -> None:
    run = config(mode="ar", **SERVED)
    found = search(Search(run, 0.9))
    assert isinstance(found, Found)
    assert found.rate is not None
    assert found.outcome.summary.slo_attainment == kept(run, found.rate) >= 0.9
    assert kept(run, found.rate * 2.0 ** (2.0**-NUM_HALVINGS)) < 0.9
    assert kept(run, 2.0 * found.rate) < 0.9 <= kept(run, found.rate / 2.0)


def test_there_may_be_no_such_rate_or_no_end_to_it() -> None:
    hopeless = search(Search(config(mode="ar", **SERVED | {"slo": {"tpot_ms": 1.0}}), 0.9))
    assert (hopeless.rate, hopeless.kept) == (None, False)
    harmless = search(Search(config(mode="ar", **SERVED | {"slo": {"ttft_ms": 1e9}}), 0.9))
    assert (harmless.rate, harmless.kept) == (None, True)


@pytest.mark.slow
def test_find_rate_compares_pair_by_pair(compare: Any, tmp_path: Path) -> None:
    options = ("--goodput", "ttft:400,tpot:70", "--find-rate", 0.9, "--seeds", 2, "--mode", "ar", "--mode", "psd")
    size = ("--num-requests", 40, "--set", "workload.output_lens=16")
    ran = compare(*size, *options, "--json", "a.json", "--jobs", 2)
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "a.json").read_text())
    ar, psd = found["variants"]
    rates = [one["highest_rates"] for one in (ar, psd)]
    pair = pairing(*rates)
    assert pair.ratio is not None
    assert psd["ratio_to_baseline"]["value"] == pair.ratio.value > 1.0
    assert all(run["slo_attainment"] >= 0.9 for one in (ar, psd) for run in one["runs"])
    assert "90 % of the requests keep TTFT <= 400 ms, TPOT <= 70 ms; seeds 0 to 1" in ran.words
    assert re.search(r"psd +[\d.]+ ± [\d.]+ .* \d+\.\d\d\d +\d+\.\d+x \[", ran.out)
    assert compare(*size, *options, "--json", "b.json").out == ran.out
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_equal_variants_bear_exactly_the_same(compare: Any, tmp_path: Path) -> None:
    options = ("--vary", "scheduler.kv_watermark=0.01,0.02", "--goodput", "ttft:400", "--find-rate", 0.9)
    ran = compare(*SMALL, *options, "--seeds", 2, "--mode", "ar")
    assert "1.000x [1.000, 1.000] =" in ran.out


def test_a_search_without_end_says_so(compare: Any) -> None:
    ran = compare(*SMALL, "--mode", "ar", "--goodput", "ttft:1000000", "--find-rate", 0.9)
    assert ran.code == 0
    assert re.search(r"ar +above 16384", ran.out)
    assert "the SLO is kept however fast so few requests arrive" in ran.words
    ran = compare(*SMALL, "--mode", "ar", "--goodput", "tpot:1", "--find-rate", 0.9)
    assert re.search(r"ar +none above", ran.out)


def test_help_names_every_option(compare: Any) -> None:
    ran = compare("--help")
    for option in (
        "--rates",
        "--over",
        "--find-rate",
        "--goodput",
        "--seeds",
        "--confidence",
        "--baseline",
        "--metric",
    ):
        assert option in ran.out
    for option, other in itertools.pairwise(("--jobs", "--json", "--csv", "--figure")):
        assert ran.out.index(option) < ran.out.index(other)

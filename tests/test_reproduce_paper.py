"""`minedraft reproduce paper`: the pieces, how the command refuses, and the documented verdicts of a quick run."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft.cli import run_cli
from minedraft.commands.many_runs import carry_out
from minedraft.sim.acceptance import BetaRate
from minedraft.sim.cost import PAPER_MEDIANS
from minedraft.sim.models import load_model
from minedraft.sim.paper import claims_balance, claims_theory
from minedraft.sim.paper.bench import FULL, QUICK, Bench, Scale, one_by_one
from minedraft.sim.paper.calibration import (
    FITTED_ON,
    Calibration,
    calibrate,
    gains_with,
    largest_gain,
    spread_of_log,
)
from minedraft.sim.paper.gains import PUBLISHED, SCREEN, Cell, GainTable
from minedraft.sim.paper.reproduction import CLAIMS, EXPERIMENT, Reproduction, reproduce
from minedraft.sim.paper.setup import DATASETS, QWEN, load_prompts, load_setting, paper, published_gain
from minedraft.sim.paper.stages import NSIGHT_ROWS, PROMPT_BUDGET, NsightStages, PromptCost, stages_of
from minedraft.sim.paper.trial import FREE, Figures, Trial, run
from minedraft.sim.paper.verdict import PERCENT, Basis, Line, Shown, Tally, Verdict, figure, order, within
from minedraft.sim.presets import read_presets
from minedraft.theory.stages import StageTimes, psd_makespan_s, sd_makespan_s
from minedraft.work import DraftWork, VerifyWork

TINY = Scale("tiny", datasets=("arena", FITTED_ON), draft_lengths=(3,), extras=(0, 1), most_requests=96)
ALL_RIGHT: dict[str, Any] = {"mean_rate": 1.0, "concentration": None}
SPREAD: dict[str, Any] = {"mean_rate": 0.65, "concentration": 8.6}


# --- inputs


def test_every_setting_and_data_set_can_be_used() -> None:
    for name in paper()["settings"]:
        setting = load_setting(name)
        assert load_model(setting.target).num_layers > load_model(setting.draft).num_layers
        assert setting.nsight == (setting.draft in PAPER_MEDIANS)
        assert stages_of(setting).prompts_s([100]) > 0.0
    for name in PUBLISHED:
        for dataset in DATASETS:
            for metric in ("throughput", "latency"):
                delta = published_gain(name, f"{metric}_delta", dataset)
                assert 0.0 < published_gain(name, f"{metric}_up", dataset) < delta < 100.0


@pytest.mark.parametrize("dataset", DATASETS)
def test_prompts_are_cut_to_their_range(dataset: str) -> None:
    prompts = load_prompts(dataset)
    drawn = [length for _, length in zip(range(2000), prompts.values(np.random.default_rng(0)), strict=False)]
    assert prompts.least <= min(drawn)
    assert max(drawn) <= prompts.most
    # Cut, not clipped: nothing piles up at the ends.
    assert drawn.count(prompts.least) < 200
    assert drawn.count(prompts.most) < 20


def test_the_spread_of_requests_is_the_logs() -> None:
    mean, concentration = spread_of_log()
    log = read_presets("acceptance.toml")[paper()["acceptance"]["log"]]["conditional"]
    model = BetaRate(mean, concentration)
    slots = [(model.a + j) / (model.a + model.b + j) for j in range(len(log))]
    assert slots[0] == pytest.approx(log[0])
    assert slots[-1] == pytest.approx(log[-1])


# --- stage times


@pytest.mark.parametrize("name", QWEN)
def test_the_lines_go_through_the_published_medians(name: str) -> None:
    drafter = load_setting(name).draft
    stages = NsightStages.of(drafter, None)
    for k, medians in PAPER_MEDIANS[drafter].items():
        assert stages.at(NSIGHT_ROWS, k) == pytest.approx((medians.verify_s, medians.draft_s))


def verify_work(num_new: Sequence[int], num_draft: Sequence[int]) -> VerifyWork:
    size = len(num_new)
    ids = tuple(f"r{i}" for i in range(size))
    computed = tuple(0 if new > 1 else 100 + i for i, new in enumerate(num_new))
    columns = (ids, (0,) * size, (1,) * size, computed, tuple(num_new), tuple(num_draft), (True,) * size)
    return VerifyWork(0, 0, *columns, (0,) * 13, (size, 0), ())


def draft_work(num_new: Sequence[int], num_draft: Sequence[int]) -> DraftWork:
    size = len(num_new)
    computed = tuple(100 + i for i in range(size))
    ids = tuple(f"r{i}" for i in range(size))
    return DraftWork(0, 0, ids, (0,) * size, (1,) * size, computed, tuple(num_new), tuple(num_draft), ())


@pytest.mark.parametrize("name", ["S1", "S6"])
@given(
    prompts=st.lists(st.integers(2, 1500), max_size=4),
    drafts=st.lists(st.integers(0, 5), max_size=8),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_prompts_are_free_in_works(name: str, prompts: list[int], drafts: list[int], seed: Any) -> None:
    """A work costs what it would without the prompts in it, wherever they stand."""
    stages = stages_of(load_setting(name))
    rows = [(1, k, 100) for k in drafts]
    mixed = [*rows, *((new, 0, 0) for new in prompts)]
    without = verify_work([1] * len(rows), drafts)
    seed.shuffle(mixed)
    # Contexts follow the place in the work, so give each row the one that it has without prompts.
    kept = iter(without.num_computed)
    work = verify_work([new for new, _, _ in mixed], [k for _, k, _ in mixed])
    order_of_k = [k for new, k, _ in mixed if new == 1]
    work = work._replace(num_computed=tuple(next(kept) if new == 1 else 0 for new, _, _ in mixed))
    without = without._replace(num_draft=tuple(order_of_k))
    assert stages.verify_s(work) == pytest.approx(stages.verify_s(without))
    if any(drafts):
        alone = draft_work([1 for k in drafts if k], [k for k in drafts if k])
        beside = draft_work([1] * len(alone.num_new) + prompts, [*alone.num_draft, *([0] * len(prompts))])
        assert stages.draft_s(beside) == pytest.approx(stages.draft_s(alone))


def test_prompt_steps_hold_whole_prompts_within_the_budget() -> None:
    prompts = stages_of(load_setting("S1"))
    assert isinstance(prompts, NsightStages)
    cost = prompts.prompts
    assert isinstance(cost, PromptCost)
    assert cost.prompts_s([1200, 900]) == pytest.approx(cost.prompts_s([1200]) + cost.prompts_s([900]))
    together = cost.prompts_s([PROMPT_BUDGET // 2] * 2)
    assert cost.prompts_s([PROMPT_BUDGET // 2]) < together < 2.0 * cost.prompts_s([PROMPT_BUDGET // 2])
    assert cost.prompts_s([]) == 0.0


# --- the plugin's world


@pytest.mark.parametrize("host_row_s", [0.0, 0.0015])
@pytest.mark.parametrize("name", QWEN)
def test_a_step_is_the_longer_stage_and_the_hosts_time(name: str, host_row_s: float) -> None:
    """With every draft right the makespans are known to the last step."""
    m, k, rounds = 4, 3, 20
    stages = StageTimes(*NsightStages.of(load_setting(name).draft, None).at(m, k), m * host_row_s)
    fields: dict[str, Any] = {"batch_size": m, "output_len": 1 + rounds * (k + 1), **ALL_RIGHT}
    sd = run(Trial(name, FREE, "sd", k, m, host_row_s, **fields))
    psd = run(Trial(name, FREE, "psd", k, 2 * m, host_row_s, **fields))
    assert sd.decode_s == pytest.approx(sd_makespan_s(rounds, stages), rel=1e-9)
    # The host's time of the first verification passes before it, that of a sub-batch's prompts is apart.
    assert psd.decode_s == pytest.approx(psd_makespan_s(2 * rounds, stages), rel=0.01)
    assert (sd.overlapped, psd.overlapped) == (0.0, pytest.approx(1.0, abs=0.06))


@pytest.mark.parametrize("mode", ["sd", "psd", "pearl"])
def test_prompts_stall_everything_and_change_nothing_else(mode: str) -> None:
    fields: dict[str, Any] = {"batch_size": 4, "output_len": 40, **ALL_RIGHT}
    free = run(Trial("S1", FREE, mode, 3, 24, 0.0, **fields))
    paid = run(Trial("S1", "sharegpt", mode, 3, 24, 0.0, **fields))
    assert paid.prompt_s > 1.0
    assert free.prompt_s == 0.0
    assert paid.decode_s == pytest.approx(free.decode_s, rel=1e-9)
    assert (paid.num_rows, paid.num_tokens) == (free.num_rows, free.num_tokens)


@pytest.mark.parametrize(("mode", "extra"), [("sd", 0), ("psd", 0), ("psd", 1)])
@pytest.mark.parametrize("name", ["S2", "S7"])
def test_host_work_only_moves_a_run(name: str, mode: str, extra: int) -> None:
    """What calibration rests on: a run without host work tells what it would be with some."""
    bare = Trial(name, "arena", mode, 3, 48, 0.0, **SPREAD, extra=extra)
    loaded = run(replace(bare, host_row_s=0.002))
    assert run(bare).throughput_with(0.002) == pytest.approx(loaded.throughput, rel=1e-9)


def test_tokens_rows_and_shares() -> None:
    trial = Trial("S1", "arena", "psd", 3, 48, 0.001, **SPREAD)
    figures = run(trial)
    assert figures == run(trial)
    assert figures.num_tokens == 48 * 255
    assert figures.num_verified >= figures.num_accepted > 0
    assert figures.num_tokens <= figures.num_accepted + figures.num_rows
    assert 0.0 < figures.overlapped <= 1.0
    assert figures.makespan_s == pytest.approx(figures.decode_s + figures.prompt_s)
    assert figures != run(replace(trial, seed=2))


def test_tetris_verifies_no_more_than_k_per_request_in_full_batches() -> None:
    plain, chosen = (run(Trial("S1", "arena", "psd", 2, 96, 0.0, **SPREAD, extra=extra)) for extra in (0, 2))
    # Batches that aren't full, here the last third of the run, may have all four verified, as in the plugin.
    assert chosen.num_verified / chosen.num_rows <= 2.5
    assert chosen.num_accepted / chosen.num_rows > plain.num_accepted / plain.num_rows
    assert chosen.draft_s > 1.5 * plain.draft_s


# --- many runs, fits


def counting_bench(scale: Scale = TINY) -> tuple[Bench, list[Trial]]:
    seen: list[Trial] = []

    def run_all(trials: Sequence[Trial], label: str) -> list[Figures]:
        seen.extend(trials)
        return one_by_one(trials, label)

    return Bench(scale, run_all), seen


def test_no_trial_is_run_twice() -> None:
    bench, seen = counting_bench()
    trials = [Trial("S1", "arena", mode, 2, 8, 0.0, **SPREAD, output_len=20) for mode in ("sd", "psd")]
    bench.prepare([*trials, trials[0]], "")
    bench.prepare(trials, "")
    assert bench[trials[0]] == run(trials[0])
    assert sorted(map(repr, seen)) == sorted(map(repr, trials))
    assert [trial for trial, _ in bench.items()] == sorted(trials, key=repr)


@pytest.fixture(scope="module")
def fitted() -> tuple[Bench, Calibration]:
    bench = Bench(TINY)
    return bench, calibrate(bench, QWEN)


def test_the_fit_meets_what_it_is_fitted_to(fitted: tuple[Bench, Calibration]) -> None:
    """On Spec-Bench the run with the fitted host work has the paper's gain; acceptance cancels out but for a rest."""
    bench, calibration = fitted
    assert set(calibration.host_row_s) == set(QWEN)
    table = GainTable(bench, calibration, QWEN)
    table.prepare()
    for name in QWEN:
        wanted = published_gain(name, "throughput_delta", FITTED_ON) / 100.0
        bare = largest_gain(bench, calibration.without_host_work(), name, calibration.host_row_of(name))
        # So few requests may gain less than the paper's even without host work: then nothing is fitted.
        assert bare == pytest.approx(wanted, abs=1e-6) or calibration.host_row_of(name) == 0.0
        assert table.cells[name, FITTED_ON].delta == pytest.approx(bare, abs=0.04)


def test_the_acceptance_rate_meets_the_anchor(fitted: tuple[Bench, Calibration]) -> None:
    bench, calibration = fitted
    trial = calibration.trial("S2", "arena", "sd", 2, bench.scale.num_requests("arena"))
    assert bench[trial].throughput == pytest.approx(310.0, rel=0.02)
    assert 0.3 < calibration.mean_rate < 0.95


def test_settings_without_a_fit_borrow_the_mean(fitted: tuple[Bench, Calibration]) -> None:
    calibration = fitted[1]
    mean = sum(calibration.host_row_s[name] for name in QWEN) / 3
    assert calibration.host_row_of("S4") == pytest.approx(mean)
    assert calibration.trial("S6", "arena", "sd", 2, 8).mean_rate == calibration.head_rate
    assert calibration.trial("S4", "arena", "sd", 2, 8).mean_rate == calibration.mean_rate


def test_only_variants_near_the_best_are_run_again(fitted: tuple[Bench, Calibration]) -> None:
    bench, calibration = fitted
    table = GainTable(bench, calibration, ("S1",))
    table.prepare()
    gains = gains_with(bench, calibration.without_host_work(), "S1", calibration.host_row_of("S1"))
    assert set(gains) == {(3, 0), (3, 1)}
    wanted = {variant for variant, gain in gains.items() if not variant[1] or gain >= max(gains.values()) - SCREEN}
    assert set(table.cells["S1", FITTED_ON].psd) == set(table.cells["S1", "arena"].psd) == wanted


def cell_of(plain: float, psd: dict[tuple[int, int], float]) -> Cell:
    def figures(makespan_s: float) -> Figures:
        return Figures(10, makespan_s, 1.0, 100, 200, 300, 200, 1.0, 0.05, 0.05, 1.0)

    by_k = {k: figures(plain) for k, _ in psd}
    return Cell(by_k, {variant: figures(makespan_s) for variant, makespan_s in psd.items()})


def test_delta_is_the_largest_over_k_and_variants() -> None:
    cell = cell_of(11.0, {(2, 0): 9.0, (3, 0): 8.0, (3, 1): 6.0, (4, 0): 10.0})
    assert cell.best == (3, 1)
    assert cell.delta == pytest.approx(10.0 / 5.0 - 1.0)  # decoding only: a second of each run is prompts
    assert cell.delta_latency == pytest.approx(1.0 - 6.0 / 11.0)
    assert cell.curve() == pytest.approx({2: 0.25, 3: 1.0, 4: 1.0 / 9.0})
    assert cell.prompt_share == pytest.approx(0.1)


# --- verdicts


@pytest.mark.parametrize(
    ("ours", "shown", "tolerance", "verdict"),
    [
        (60.0, PERCENT, 10.0, "met"),
        (59.9, PERCENT, 10.0, "missed"),
        (80.0, PERCENT, 10.0, "met"),
        (77.0, Shown("tok/s", 0, relative=True), 0.1, "met"),
        (77.1, Shown("tok/s", 0, relative=True), 0.1, "missed"),
    ],
)
def test_a_figure_is_met_within_its_tolerance(ours: float, shown: Shown, tolerance: float, verdict: str) -> None:
    line = figure("E2", "a", 70.0, ours, tolerance, Basis.PREDICTED, shown)
    assert line.verdict == verdict
    assert (line.paper_value, line.our_value) == (70.0, ours)


@pytest.mark.parametrize(
    ("ours", "verdict"), [(-8.1, "missed"), (-7.9, "met"), (5.0, "met"), (11.9, "met"), (12.1, "missed")]
)
def test_a_range_is_widened_at_both_ends(ours: float, verdict: str) -> None:
    assert within("E15", "a", (-6.0, 10.0), ours, 2.0, Basis.PREDICTED, PERCENT).verdict == verdict


def test_what_cannot_be_compared_is_not_counted() -> None:
    met, missed = (order("E8", "a", "x", "y", holds, Basis.PREDICTED) for holds in (True, False))
    apart = replace(met, verdict=Verdict.NOT_COMPARABLE)
    assert str(Tally.of([met, missed, apart])) == "1 of 2"


# --- claims


def test_departures_leave_the_plugins_assignment_lopsided() -> None:
    lines = claims_balance.lines()
    assert [line.verdict for line in lines] == ["met"] * 3
    assert all(not line.is_number for line in lines)


def test_theory_without_runs() -> None:
    wanted = [f"T{i}" for i in (1, 2, 3, 4, 5, 6, 7, 9, 10, 12)]
    bench, seen = counting_bench()
    lines = claims_theory.lines(bench, wanted)
    assert {line.claim for line in lines} >= set(wanted)
    assert [line.what for line in lines if line.verdict != "met"] == []
    assert seen == []


@pytest.mark.slow
def test_theory_with_runs() -> None:
    found = reproduce(Bench(replace(FULL, identities=(("S1", 3), ("S3", 4)))), ["T8", "T11"])
    assert {line.claim for line in found.lines} == {"T8", "T11"}
    assert [line.what for line in found.lines if line.verdict != "met"] == []
    assert found.calibration is None


def test_claims_that_are_not_wanted_are_not_run() -> None:
    bench, seen = counting_bench()
    found = reproduce(bench, ["T4", "E17"])
    assert [line.claim for line in found.lines] == ["T4", "T4", "E17", "E17", "E17"]
    assert seen == []


# --- the command


def reproduce_paper(*arguments: object) -> int:
    return run_cli(["reproduce", "paper", *map(str, arguments)])


def test_it_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "found.json"
    assert reproduce_paper("--only", "t1,T6,E17", "--output-dir", tmp_path / "out", "--json", path) == 0
    text = capsys.readouterr().out
    assert "1.678347" in text
    assert "Theory: 7 of 7 met" in text
    with (tmp_path / "out" / "claims.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["claim"] for row in rows] == ["T1"] * 2 + ["T6"] * 5 + ["E17"] * 3
    assert {row["verdict"] for row in rows} == {"met"}
    assert json.loads(path.read_text())["claims"][0]["our_value"] == pytest.approx(1.678347)
    assert (tmp_path / "out" / "theorem.png").read_bytes().startswith(b"\x89PNG")


def test_json_on_stdout_is_all_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce_paper("--only", "T5", "--no-figures", "--output-dir", tmp_path, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert [claim["verdict"] for claim in found["claims"]] == ["met", "met"]
    assert found["calibration"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "E19"], "--only E19: there is no claim 'E19'; use T1 to T12 and E1 to E18"),
        (["--only", ","], "--only ',': names no claim; write it as E2,E3"),
        (["--only", "T1", "--jobs", "0"], "--jobs 0: must be >= 1"),
        (["--only", "T1", "--json", "nowhere/a.json"], "nowhere/a.json: no such folder; make it first"),
    ],
)
def test_it_refuses(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reproduce_paper(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert reproduce_paper("--only", "T1", "--output-dir", tmp_path / "file" / "out") == 2
    assert "check the path, its folder and the permissions" in capsys.readouterr().err


def test_figures_need_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minedraft.commands.reproduce.find_spec", lambda name: None)
    assert reproduce_paper("--only", "T1", "--output-dir", tmp_path) == 2
    assert "pip install 'minedraft[plot]', or add --no-figures" in capsys.readouterr().err


def test_a_run_that_fails_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a missed claim, but a run that doesn't come to its end."""
    monkeypatch.setattr("minedraft.sim.paper.trial.NUM_BLOCKS", 64)  # too little KV for a request of Spec-Bench
    arguments = ("--only", "E7", "--quick", "--jobs", "1", "--no-figures", "--output-dir", tmp_path)
    assert reproduce_paper(*arguments) == 1
    assert "a run failed" in capsys.readouterr().err


# --- all of it


@pytest.fixture(scope="module")
def quick() -> Reproduction:
    def run_all(trials: Sequence[Trial], label: str) -> list[Figures]:
        found, failure = carry_out(run, trials, 2, label)
        assert failure is None
        return [figures for figures in found if figures is not None]

    return reproduce(Bench(QUICK, run_all))


MISSED = {
    "E6 S5 arena: throughput Delta",
    "E6 S5 arena: time saved",
    "E6 S5 spec-bench: time saved",
    "E7 S6 spec-bench: throughput Delta, nothing fitted to S6",
    "E7 S7 arena: throughput Delta",
    "E7 S7 spec-bench: throughput Delta, nothing fitted to S7",
    "E9 flattest from k = 3 to 5",
    "E12 S2 arena k = 2: pearl / sd, tok/s",
    "E12 S2 arena k = 2: psd / sd, tok/s",
    "E13 S8 (235B), k = 4",
}
"""Figures that a quick run misses; the command says why."""


def missed(lines: Sequence[Line]) -> set[str]:
    return {f"{line.claim} {line.what}" for line in lines if line.verdict == "missed"}


@pytest.mark.slow
def test_a_quick_run_ends_as_documented(quick: Reproduction) -> None:
    assert tuple(dict.fromkeys(line.claim for line in quick.lines)) == CLAIMS
    assert missed(quick.lines) == MISSED
    for line in quick.lines:
        assert line.verdict == "met" or line.note, f"{line.claim} {line.what}: missed without a reason"


@pytest.mark.slow
def test_at_least_four_of_five_numbers_lie_within_tolerance(quick: Reproduction) -> None:
    numbers = [line for line in quick.lines if line.claim in EXPERIMENT and line.is_number]
    for basis in (Basis.PREDICTED, None):
        tally = Tally.of([line for line in numbers if basis in (None, line.basis)])
        assert tally.num_met >= 0.8 * tally.num_lines
    assert all(line.verdict == "met" for line in quick.lines if line.is_theory)

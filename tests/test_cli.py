"""The command line: what it prints and writes, how it fails, what it imports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minedraft
from minedraft.cli import run_cli
from minedraft.journal import Journal, read_journal

ROOT = Path(__file__).parent.parent


@dataclass
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Ran:
        code = run_cli([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def refused(ran: Ran) -> str:
    """The one line of a command that was refused."""
    assert ran.code == 2, ran
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("minedraft: error: ")
    return ran.err.removeprefix("minedraft: error: ").rstrip("\n")


def whole(path: Path) -> Journal:
    """A journal that can be read to its end, and has one."""
    journal = read_journal(path)
    assert list(journal)
    assert journal.complete
    return journal


SMALL = ("--num-requests", "12", "--set", "workload.output_lens=20")


# --- simulate


def test_simulate_prints_a_table(cli: Any) -> None:
    ran = cli("simulate", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    for text in (
        "Successful requests",
        "Mean TTFT (ms)",
        "Acceptance length",
        "overlapped",
        "per device",
        "Preemptions",
    ):
        assert text in ran.out
    assert re.search(r"Successful requests +│ +12 ", ran.out)
    assert "psd 4 + 1 devices and up to 32 requests in flight" in " ".join(ran.out.split())


def test_simulate_writes_json_journal_and_trace(cli: Any, tmp_path: Path) -> None:
    ran = cli("simulate", *SMALL, "--json", "a.json", "--journal", "a.jsonl", "--trace", "t.json", "--seed", 7)
    assert ran.code == 0
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["completed"] == 12
    assert (figures["mode"], figures["seed"], figures["error"]) == ("psd", 7, None)
    for name in ("output_throughput", "p99_tpot_ms", "mean_imbalance", "zero_draft_causes", "target_utilisation"):
        assert name in figures
    assert figures["config"]["workload"]["num_requests"] == 12
    assert whole(tmp_path / "a.jsonl").header.policies["mode"] == {"name": "fixed", "mode": "psd"}
    assert len(json.loads((tmp_path / "t.json").read_text())) > 12


def test_json_may_go_to_stdout_with_lists_per_request(cli: Any) -> None:
    ran = cli("simulate", *SMALL, "--json", "-", "--detailed", "--mode", "sd")
    figures = json.loads(ran.out)
    assert figures["num_draft_devices"] == 0
    assert len(figures["ttfts"]) == 12


def test_the_same_seed_gives_the_same_bytes(cli: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert cli("simulate", *SMALL, "--json", f"{name}.json", "--journal", f"{name}.jsonl").code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_options_win_over_the_file_and_set_over_both(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("mode = 'ar'\nseed = 3\n[workload]\nnum_requests = 4\noutput_lens = 5\n")
    options = ("--mode", "sd", "--policy", "draft-length=fixed,k=1", "--set", "seed=9")
    figures = json.loads(cli("simulate", "run.toml", *options, "--json", "-").out)
    assert (figures["mode"], figures["seed"], figures["total_output_tokens"]) == ("sd", 9, 20)
    assert len(figures["spec_decode_per_position_acceptance_rates"]) == 1


def test_a_workload_may_be_named_or_a_file(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"arrival_s": 0, "prompt_len": 3, "output_len": 4}\n')
    assert json.loads(cli("simulate", "--workload", "t.jsonl", "--json", "-").out)["total_output_tokens"] == 4
    ran = cli("simulate", "--workload", "azure-code-like", "--num-requests", 5, "--json", "-")
    assert json.loads(ran.out)["completed"] == 5


def test_requests_that_do_not_fit_are_named_below_the_table(cli: Any, tmp_path: Path) -> None:
    lines = [
        {"request_id": name, "arrival_s": 0, "prompt_len": n, "output_len": 4} for name, n in (("a", 3), ("b", 999))
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pool = ("--set", "scheduler.num_target_blocks=4")
    ran = cli("simulate", "--workload", "t.jsonl", *pool)
    assert ran.code == 0
    assert "requests not served: 1; the first: request 'b': prompt_len 999 leaves no room" in " ".join(ran.out.split())
    (tmp_path / "t.jsonl").write_text(json.dumps(lines[1]))
    assert "no request could be served: request 'b'" in refused(cli("simulate", "--workload", "t.jsonl", *pool))


def test_the_example_file_runs(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(cli("config").out)
    assert cli("simulate", "run.toml", *SMALL).code == 0


# --- compare


def test_compare_shows_the_modes_side_by_side(cli: Any) -> None:
    ran = cli("compare", *SMALL)
    assert ran.code == 0
    assert re.search(r"┃ +ar ┃ +sd ┃ +psd ┃", ran.out)
    assert "Ratios are to the first column, 'ar'" in ran.out
    assert "x │" in ran.out


def test_compare_runs_every_combination_over_the_same_requests(cli: Any) -> None:
    axes = ("--mode", "sd", "--mode", "psd", "--vary", "scheduler.max_batch_size=4,8")
    policies = ("--policy", "assignment=in-phase", "--policy", "assignment=fewest-requests")
    ran = cli("compare", *SMALL, *axes, *policies, "--json", "-")
    variants = json.loads(ran.out)["variants"]
    assert len(variants) == 8
    assert variants[0]["name"] == "sd, in-phase, max_batch_size=4"
    assert {variant["total_output_tokens"] for variant in variants} == {240}
    assert len({str(variant["config"]["workload"]) for variant in variants}) == 1
    table = cli("compare", *SMALL, *axes, *policies)
    assert table.code == 0
    assert "Makespan" in table.out


def test_compare_takes_variants_from_the_file(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "mode = 'sd'\n[[variants]]\nname = 'm'\n[[variants]]\nname = '2m'\nscheduler = { max_batch_size = 32 }\n"
    )
    names = [run["name"] for run in json.loads(cli("compare", "run.toml", *SMALL, "--json", "-").out)["variants"]]
    assert names == ["m", "2m"]


def test_a_sweep_over_clients_makes_a_closed_loop(cli: Any) -> None:
    sweep = ("--over", "workload.arrivals.concurrency=1,2", "--json", "-")
    ran = cli("compare", "--mode", "sd", "--mode", "psd", *SMALL, *sweep)
    assert ran.code == 0
    assert '"closed-loop"' in ran.out


def test_a_variant_is_named_in_its_fault(cli: Any) -> None:
    line = refused(cli("compare", "--vary", "scheduler.block_size=16,0"))
    assert line.startswith("--vary scheduler.block_size=0: scheduler.block_size: is 0, must be >= 1")
    assert "[variant block_size=0]" in line


# --- replay


def test_a_journal_replays_with_its_own_policies_and_limits(cli: Any) -> None:
    options = ("--policy", "draft_length=by-batch-size,table=2:3/9:1", "--policy", "assignment=in-phase")
    assert cli("simulate", *SMALL, *options, "--set", "scheduler.max_batch_size=3", "--journal", "a.jsonl").code == 0
    ran = cli("replay", "a.jsonl")
    assert ran.code == 0
    assert re.fullmatch(r"identical: \d+ decisions over \d+ events\n", ran.out)


def test_a_replay_that_differs_is_a_failed_check(cli: Any, tmp_path: Path) -> None:
    cli("simulate", *SMALL, "--journal", "a.jsonl")
    text = (tmp_path / "a.jsonl").read_text()
    assert '"num_speculative_tokens":3' in text
    (tmp_path / "a.jsonl").write_text(text.replace('"num_speculative_tokens":3', '"num_speculative_tokens":2'))
    ran = cli("replay", "a.jsonl")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert re.search(r"differs after .*: decision \d+ after \d+ events.*num_draft was", ran.err)


def test_a_killed_runs_journal_replays(cli: Any, tmp_path: Path) -> None:
    cli("simulate", *SMALL, "--journal", "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:5])
    ran = cli("replay", "a.jsonl")
    assert ran.code == 0
    assert "the journal has no end" in ran.out


def test_a_journal_cut_off_before_its_first_decision_proves_nothing(cli: Any, tmp_path: Path) -> None:
    cli("simulate", *SMALL, "--journal", "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith(b'["verify"'))
    for kept in range(1, first + 3):
        (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:kept]))
        ran = cli("replay", "a.jsonl")
        if kept <= first:
            assert (ran.code, ran.out) == (1, "")
            assert re.search(r"a.jsonl: nothing to compare: 0 decisions over \d+ events, .* no end", ran.err)
        else:
            assert ran.code == 0
            num_works = sum(line.startswith((b'["verify"', b'["draft"')) for line in lines[:kept])
            assert ran.out.startswith(f"identical: {num_works} decision")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hello\n", "a.jsonl:1: no journal header"),
        ('{"format": "other"}\n', "a.jsonl:1: not a journal of minedraft"),
    ],
)
def test_what_is_no_journal_is_refused(cli: Any, tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert part in refused(cli("replay", "a.jsonl"))


@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        ('"name":"fcfs"', '"name":"gone"', "header: policies.admission: no admission policy 'gone'"),
        ('"block_size":16', '"blok_size":16', "header: "),
        ('"block_size":16', '"block_size":0', "header: block_size is 0"),
        ('["end"]', '["end"]\n["end"]', "a line after the end"),
    ],
)
def test_a_journal_with_a_fault_is_refused(cli: Any, tmp_path: Path, before: str, after: str, part: str) -> None:
    cli("simulate", *SMALL, "--journal", "a.jsonl")
    text = (tmp_path / "a.jsonl").read_text()
    assert before in text
    (tmp_path / "a.jsonl").write_text(text.replace(before, after))
    assert part in refused(cli("replay", "a.jsonl"))


def test_a_missing_journal_is_refused(cli: Any) -> None:
    assert refused(cli("replay", "no.jsonl")).startswith("no.jsonl: No such file")


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "scheduler.max_batchsize=3"], "unknown key; did you mean 'max_batch_size'?"),
        (["--set", "cost.verify_base_ms=49", "--set", "cost.kind=constant"], "write verify_base_s = 0.049"),
        (["--set", "devices.round_overhead_s=-0.1"], "must be a number of seconds >= 0"),
        (["--set", "acceptance.synthetic_acceptance_rates=[0.5,0.7,0.1]"], "so they cannot rise"),
        (["--set", "scheduler.num_target_blocks=4"], "make it >= 20"),
        (["--set", "scheduler.num_speculative_tokens=-1"], "must be >= 0"),
        (["--policy", "draft_length=fixed,k=-1"], "k is -1, must be >= 0"),
        (["--policy", "admission=fcf"], "did you mean 'fcfs'?"),
        (["--policy", "fcfs"], "write it as SLOT=NAME"),
        (["--mode", "pds"], "did you mean 'psd'?"),
        (["--workload", "azure-cov-like"], "did you mean 'azure-conv-like'?"),
        (["--set", "mode"], "write it as dotted.key=value"),
        (["--json", "no/folder/a.json"], "no such folder"),
        (["--journal", "no/folder/a.jsonl"], "No such file or directory"),
        (["--journal", "-"], "--journal -: can't go to stdout; name a file"),
        (["--trace", "-"], "--trace -: can't go to stdout; name a file"),
        (["--set", "devices.num_replicas=5000"], "devices.num_replicas: is 5000, must be <= 1024"),
        (["--policy", "draft_length=fixed,k=abc"], "k is 'abc', must be a whole number or left out"),
        (["--policy", "draft_length=fixed,zz=1"], "no option 'zz'; its options are k"),
        (["--set", f"seed={'9' * 5000}"], "seed: is '9"),
        (["--set", f"seed={'[' * 5000}"], "seed: is '["),
        (["--seed", "x"], "--seed"),
        (["--sed", "1"], "No such option: --sed"),
        (["no.toml"], "no.toml: No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli: Any, arguments: Sequence[str], part: str) -> None:
    ran = cli("simulate", *arguments)
    assert part in refused(ran)
    assert ran.out == ""


@pytest.mark.parametrize("mode", ["ar", "sd", "psd", "pearl"])
def test_a_fixed_mode_policy_runs_in_every_mode(cli: Any, mode: str) -> None:
    plain = cli("simulate", *SMALL, "--mode", mode)
    ran = cli("simulate", *SMALL, "--mode", mode, "--policy", "mode=fixed")
    assert (ran.code, ran.err, ran.out) == (0, "", plain.out)


def test_a_star_names_the_journals_that_it_wrote(cli: Any, tmp_path: Path) -> None:
    ran = cli("simulate", *SMALL, "--set", "devices.num_replicas=3", "--journal", "run.jsonl", "--json", "-")
    assert ran.code == 0
    assert json.loads(ran.out)["completed"] == 12
    assert ran.err == "one journal per target: run.0.jsonl to run.2.jsonl\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run.{i}.jsonl" for i in range(3)]


def test_an_unknown_key_in_a_file_names_the_file(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[workload]\nnumrequests = 3\n")
    assert refused(cli("simulate", "run.toml")) == (
        "run.toml: workload.numrequests: unknown key; did you mean 'num_requests'?"
    )


@pytest.mark.parametrize("num_good", [0, 30])
def test_a_trace_line_that_does_not_parse_is_named(cli: Any, tmp_path: Path, num_good: int) -> None:
    good = [json.dumps({"arrival_s": float(i), "prompt_len": 3, "output_len": 4}) for i in range(num_good)]
    (tmp_path / "t.jsonl").write_text("\n".join([*good, "{oops"]))
    ran = cli("simulate", "--workload", "t.jsonl", "--journal", "a.jsonl", "--json", "a.json")
    assert refused(ran).startswith(f"t.jsonl:{num_good + 1}: not JSON")
    if num_good:  # what was done by then is there
        whole(tmp_path / "a.jsonl")
        figures = json.loads((tmp_path / "a.json").read_text())
        assert figures["completed"] > 0
        assert figures["error"].startswith("t.jsonl:31: not JSON")
        assert "stopped early" in ran.out


@pytest.mark.parametrize("command", [("simulate",), ("compare",), ("compare", "--seeds", "2")])
@pytest.mark.parametrize(
    ("name", "text"), [("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"), ("t.jsonl", ""), ("t.json", "[]")]
)
def test_a_trace_without_requests_is_one_line(
    cli: Any, tmp_path: Path, command: Sequence[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    ran = cli(*command, "--workload", name)
    assert refused(ran).startswith(f"{name}: no requests; ")
    assert ran.out == ""


def test_an_id_that_is_there_twice_is_named(cli: Any, tmp_path: Path) -> None:
    row = json.dumps({"request_id": "a", "arrival_s": 0.0, "prompt_len": 3, "output_len": 4})
    (tmp_path / "t.jsonl").write_text(f"{row}\n{row}\n")
    error = refused(cli("simulate", "--workload", "t.jsonl"))
    assert "'a' belongs to one that is still alive; give each its own id" in error


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "arrivals",
    [
        "{kind = 'at-once', at_s = 1e18}",  # the first request is looked at before anything runs
        "{kind = 'poisson', rate = 1e-9}",  # a later one, while it runs
    ],
)
def test_a_request_that_is_out_of_range_ends_the_run_with_one_line(cli: Any, replicas: int, arrivals: str) -> None:
    settings = (f"workload.arrivals={arrivals}", f"devices.num_replicas={replicas}")
    ran = cli("simulate", *[part for setting in settings for part in ("--set", setting)])
    assert "arrival_s is" in refused(ran)
    assert "must be from 0 to 1e+10 seconds" in ran.err


@pytest.mark.parametrize("text", [f"seed = {'9' * 5000}", f"seed = {'[' * 5000}", "seed = '\xff"])
def test_a_file_that_is_no_toml_is_one_line(cli: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_bytes(text.encode("latin-1"))
    assert refused(cli("simulate", "c.toml")).startswith("c.toml: not TOML: ")


class Foreign:
    """Moves a request that nobody knows."""

    def moves(self, batches: Sequence[Any]) -> Sequence[Any]:
        return [SimpleNamespace(seq=SimpleNamespace(request_id="nobody"), to_batch=0)] if _full(batches) else ()


class Duplicate:
    """Moves a request twice."""

    def moves(self, batches: Sequence[Any]) -> Sequence[Any]:
        if not _full(batches):
            return ()
        return [SimpleNamespace(seq=next(iter(batches[0].members())), to_batch=1)] * 2


class Raises:
    """Has a bug."""

    def moves(self, batches: Sequence[Any]) -> Sequence[Any]:
        if _full(batches):
            raise RuntimeError("a bug\nof two lines")
        return ()


class NoSuchBatch:
    """Chooses a batch that isn't there."""

    def choose_batch(self, seq: Any, batches: Sequence[Any]) -> int:
        return len(batches)


class NotAMethod:
    """Lacks what its slot needs."""


def _full(batches: Sequence[Any]) -> bool:
    return bool(batches[0].num_requests > 0) and batches[0].phase.name == "IDLE" and batches[1].num_requests > 0


@pytest.mark.parametrize(
    ("slot", "name", "part"),
    [
        ("rebalance", "Foreign", "which is not running"),
        ("rebalance", "Duplicate", "twice"),
        ("rebalance", "Raises", "rebalance policy failed: a bug of two lines"),
        ("assignment", "NoSuchBatch", "chose batch 2 of 2"),
    ],
)
def test_a_policy_that_misbehaves_ends_the_run_with_one_line(
    cli: Any, tmp_path: Path, slot: str, name: str, part: str
) -> None:
    spec = f"{__name__}:{name}"
    ran = cli("simulate", "--policy", f"{slot}={spec}", "--journal", "a.jsonl", "--json", "a.json", *SMALL)
    line = refused(ran)
    assert part in line
    assert line.endswith(f"; correct {spec!r}, or choose another {slot} policy")
    whole(tmp_path / "a.jsonl")
    assert part in " ".join(json.loads((tmp_path / "a.json").read_text())["error"].split())


def test_a_policy_without_its_method_is_refused_before_the_run(cli: Any, tmp_path: Path) -> None:
    ran = cli("simulate", "--policy", f"assignment={__name__}:NotAMethod", "--journal", "a.jsonl")
    assert "NotAMethod has no method 'choose_batch'" in refused(ran)
    assert not (tmp_path / "a.jsonl").exists()


# --- models and the torch world


def test_models_are_listed_without_torch(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINEDRAFT_CACHE", str(tmp_path))
    assert "smollm2-drop6" in cli("models").out
    assert "minedraft models get smollm2" in refused(cli("models", "path", "smollm2"))
    assert "known are smollm2" in refused(cli("models", "path", "smol"))
    (tmp_path / "smollm2").mkdir()
    assert cli("models", "path", "smollm2").out == f"{tmp_path}/smollm2\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--target", "folder"], "folder"),
        (["--target", "./folder"], "has no config.json"),
        (["--target", "smolm2"], "did you mean 'smollm2'?"),
        (["-k", "-1"], "-k -1: scheduler.num_speculative_tokens: is -1, must be >= 0"),
        (["--backend", "tpu"], "use torch or vllm"),
        (["--engine-arg", "block_size=32"], "--engine-arg: only with --backend vllm"),
        (["--draft-arg", "block_size=32"], "--draft-arg: only with --backend vllm"),
        (["--backend", "vllm", "--acceptance", "coupled"], "rejection sampling only"),
        (["--backend", "vllm", "--dtype", "float64"], "use one of auto, float32"),
        (["--backend", "vllm", "--engine-arg", "block_size"], "write it as dotted.key=value"),
        (["--mode", "sd", "--draft", ""], "needs a drafter"),
        (["--prompts", "none.txt"], "none.txt: No such file"),
        (["--prompts", "bad.jsonl"], 'bad.jsonl:2: no text "prompt"'),
        (["--prompts", "odd.jsonl"], "odd.jsonl:1: unknown field 'max_token'"),
        (["--prompts", "empty.txt"], "holds no prompt"),
    ],
)
def test_a_run_on_models_refuses_what_it_cannot_use(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], part: str
) -> None:
    monkeypatch.setenv("MINEDRAFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "odd.jsonl").write_text('{"prompt": "a", "max_token": 3}\n')
    (tmp_path / "empty.txt").write_text("\n")
    target = [] if "--target" in arguments else ["--target", "./model"]
    assert part in refused(cli("run", "--prompt", "Hello", *target, *arguments))


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed under that name, wherever the tests run."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "owner/target", "--draft", "owner/draft"),
        ("serve", "owner/target", "--help=all"),
        ("run", "--backend", "vllm", "--prompt", "Hello"),
        ("demo", "--backend", "vllm"),
    ],
)
def test_a_missing_vllm_is_named(cli: Any, arguments: Sequence[str]) -> None:
    line = refused(cli(*arguments))
    assert "vllm is missing" in line
    assert "pip install 'minedraft[vllm]'" in line


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize("arguments", [("serve", "--help"), ("serve", "target", "-h", "--port", "1")])
def test_help_of_serve_needs_no_vllm(cli: Any, arguments: Sequence[str]) -> None:
    ran = cli(*arguments)
    assert (ran.code, ran.err) == (0, "")
    for text in ("--draft", "-k", "--target-devices", "--draft-arg", "--set", "minedraft serve --help=all"):
        assert text in ran.out


def test_options_of_serve_are_checked_before_vllm_is_looked_for(cli: Any) -> None:
    assert "which target?" in refused(cli("serve", "--draft", "draft"))
    assert "write it as SLOT=NAME" in refused(cli("serve", "target", "--policy", "fixed"))
    assert "--set 'x'" in refused(cli("serve", "target", "--set", "x"))
    assert "--draft-arg" in refused(cli("serve", "target", "--draft-arg", "=3"))
    assert "-k" in refused(cli("serve", "target", "-k", "many"))


def test_the_vllm_demo_has_no_simulated_half(cli: Any) -> None:
    assert "drop one of them" in refused(cli("demo", "--backend", "vllm", "--simulate-only"))
    assert "use torch or vllm" in refused(cli("demo", "--backend", "jax"))


def test_a_run_without_a_prompt_is_refused(cli: Any) -> None:
    assert "--prompt TEXT or --prompts FILE" in refused(cli("run"))


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ('"max_tokens": 2.5', "max_tokens is 2.5, must be a whole number"),
        ('"max_tokens": null', "max_tokens is None, must be a whole number"),
        ('"top_k": "4"', "top_k is '4', must be a whole number"),
        ('"seed": 1.5', "seed is 1.5, must be a whole number"),
        ('"priority": [1]', "priority is [1], must be a whole number"),
        ('"max_draft_tokens": true', "max_draft_tokens is True, must be a whole number"),
        ('"temperature": "hot"', "temperature is 'hot', must be a number"),
        ('"arrival_s": null', "arrival_s is None, must be a number"),
        (f'"top_p": {"[" * 100_000}', "not JSON (nested too deeply"),
    ],
)
def test_a_field_of_a_prompt_that_is_none_is_named(cli: Any, tmp_path: Path, field: str, fault: str) -> None:
    good = '{"prompt": "a", "seed": null, "max_draft_tokens": null, "temperature": 1, "top_p": 0.5}'
    (tmp_path / "p.jsonl").write_text(f'{good}\n{{"prompt": "b", {field}}}\n')
    assert refused(cli("run", "--prompts", "p.jsonl")).startswith(f"p.jsonl:2: {fault}")


def test_the_demo_says_that_the_torch_extra_is_missing(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minedraft.commands.demo.has_torch_extra", lambda: False)
    line = refused(cli("demo"))
    assert "pip install 'minedraft[torch]'" in line
    assert "--simulate-only" in line


def test_the_simulated_demo_shows_gains_next_to_the_closed_form(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minedraft.commands.demo_paper.NUM_REQUESTS", 60)
    ran = cli("demo", "--simulate-only", "--output-dir", "files")
    assert ran.code == 0, ran.err
    assert "+99.5 %" in ran.out
    assert "ui.perfetto.dev" in ran.out
    for name in re.findall(r"^  (files/\S+)$", ran.out, re.MULTILINE):
        assert (tmp_path / name).stat().st_size
    journal = next((tmp_path / "files").glob("*.journal.jsonl"))
    assert cli("replay", journal).out.startswith("identical")


@pytest.mark.slow
def test_models_write_the_same_text_in_all_modes(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from torch_kit import ThreadWorker

    from minedraft.backends.torch.backend import TorchBackend
    from minedraft.backends.torch.surgery import make_noisy_copy, make_tiny_llama

    # Processes take ten seconds to start; they have tests of their own.
    defaults = {**(TorchBackend.__init__.__kwdefaults__ or {}), "launch": ThreadWorker}
    monkeypatch.setattr(TorchBackend.__init__, "__kwdefaults__", defaults)
    make_tiny_llama(tmp_path / "target", seed=1, vocab_size=64)
    words = {f"w{i}": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "target")
    make_noisy_copy(tmp_path / "target", tmp_path / "draft", 0.05)
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "w5 w6"}\n{"prompt": "w7", "max_tokens": 5}\n{"prompt": "w9 w3 w2"}\n'
    )
    files = ("--json", "a.json", "--journal", "a.jsonl", "--trace", "t.json")
    outputs = []
    for mode in ("ar", "sd", "psd"):
        ran = cli("run", "--target", "./target", "--draft", "./draft", "--prompts", "p.jsonl", "--mode", mode,
                  "--max-tokens", 12, "-k", 2, "--dtype", "float64", *files)  # fmt: skip
        assert ran.code == 0, ran.err
        figures = json.loads((tmp_path / "a.json").read_text())
        outputs.append(figures["outputs"])
        assert (figures["mode"], figures["num_draft_devices"] > 0) == (mode, mode != "ar" and os.cpu_count() != 1)
        assert outputs[-1][0]["text"] in ran.out
        assert cli("replay", "a.jsonl").out.startswith("identical")
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][1]["num_tokens"] <= 5


# --- the program


def test_version_and_help(cli: Any) -> None:
    assert cli("--version").out == f"minedraft {minedraft.__version__}{minedraft.BUILD.label}\n"
    for arguments in ((), ("--help",)):
        ran = cli(*arguments)
        assert ran.code == 0
        for command in ("simulate", "compare", "run", "serve", "replay", "models", "demo", "config", "theory"):
            assert re.search(rf"^  {command} ", ran.out, re.MULTILINE)
    assert "did you mean 'simulate'" in refused(cli("simulat")).lower()


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


def test_as_a_module() -> None:
    assert (
        python("-m", "minedraft", "--version").stdout == f"minedraft {minedraft.__version__}{minedraft.BUILD.label}\n"
    )
    assert python("-m", "minedraft", "simulat").returncode == 2


def test_the_core_imports_without_any_world() -> None:
    script = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'vllm', 'simpy', 'transformers'):\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import minedraft, minedraft.cli, minedraft.config, minedraft.commands.simulate, minedraft.commands.demo\n"
        "minedraft.load_policies()\n"
    )
    ran = python("-W", "error", "-c", script)
    assert ran.returncode == 0, ran.stderr


def required_distributions() -> set[str]:
    """minedraft and all that it can't be installed without, by normalised name."""
    found: set[str] = set()
    left = ["minedraft"]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform or Python
            continue
        left += [normalised(re.split(r"[^\w.-]", line)[0]) for line in lines if "extra ==" not in line]
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_simulate_imports_nothing_that_it_does_not_need() -> None:
    """What is typed most often answers at once: no extra is imported, nor what other commands need."""
    script = (
        "import sys\n"
        "before = {*sys.modules}\n"
        "from minedraft.cli import run_cli\n"
        "assert run_cli(['simulate', '--num-requests', '3', '--json', '-']) == 0\n"
        "print(*sorted(sys.modules.keys() - before), sep='\\n', file=sys.stderr)\n"
    )
    ran = python("-W", "error", "-c", script)
    assert ran.returncode == 0, ran.stderr
    modules = ran.stderr.split()
    assert "minedraft.sim.backend" in modules
    required, owners = required_distributions(), importlib.metadata.packages_distributions()
    assert {"numpy", "pydantic", "simpy"} < required
    assert not {"torch", "scipy", "matplotlib"} & required
    for root in {name.partition(".")[0] for name in modules}:
        if root in owners and root != "minedraft":
            assert {normalised(owner) for owner in owners[root]} & required, f"{root} is imported"
    others = ("backends", "theory", "sim.paper", "sim.measured", "sim.operator_tables", "replay")
    own = [name for name in modules if name.startswith(tuple(f"minedraft.{other}" for other in others))]
    slow = {"asyncio", "multiprocessing", "unittest", "xml", "http", "concurrent.futures.process"} & {*modules}
    assert not slow, slow
    assert not own, own
    commands = {name.rpartition(".")[2] for name in modules if name.startswith("minedraft.commands.")}
    assert not commands & {"compare", "demo", "find_rate", "serve", "theory", "torch_run", "validate", "vllm_run"}


MAIN = "from minedraft.cli import main; main()"


def test_a_policy_may_lie_in_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class First:\n    def rank(self, seq):\n        return 0.0\n")
    ran = python("-P", "-c", MAIN, "simulate", "--num-requests", "3", "--policy", "admission=mine:First", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def hear_ctrl_c() -> None:
    """In a child: a shell that starts tests in the background has them ignore the signal, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_leaves_whole_files(tmp_path: Path) -> None:
    journal, figures = tmp_path / "a.jsonl", tmp_path / "a.json"
    load = ["--num-requests", "1000000", "--set", "workload.arrivals={kind='poisson',rate=3}"]
    arguments = ["simulate", *load, "--journal", str(journal), "--json", str(figures)]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size > 1 << 20) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "minedraft: error: interrupted\n")
    assert "stopped early" in out
    whole(journal)
    assert json.loads(figures.read_text())["error"] == "interrupted"

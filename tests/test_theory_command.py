"""`minedraft theory`: what it prints, its JSON, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from minedraft.cli import run_cli


@pytest.fixture
def theory(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; returns exit code, stdout with its lines joined, and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run_cli(["theory", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), captured.err

    return call


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with `--json -`."""

    def call(*arguments: object) -> dict[str, Any]:
        assert run_cli(["theory", *map(str, arguments), "--json", "-"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_without_options_it_is_the_papers_setting(theory: Any) -> None:
    code, out, err = theory()
    assert (code, err) == (0, "")
    for text in (
        "V = 49.30 ms to verify, t = 49.53 ms to draft",
        "psd(16+16) has +99.5 % throughput over sd(16)",
        "+59.6 % per device",
        "if V(32) + t(32) is above 99.06 ms. It is 98.83 ms (assumed: V(32) = V(16), t(32) = t(16)",
        "psd does not win, with 0.998 times the throughput",
        "As stated that is false: at alpha V = 10 the exact ratio is 1.361",
        "the ratio is 1.59 or more exactly for 0.188 <= alpha V <= 5.211",
        "it reaches 2, 50 % less time, at alpha V = 1.2564",
        "a drafting pass takes at least 0.085 V",
    ):
        assert text in out


def test_json_has_the_figures(figures: Any) -> None:
    found = figures()
    assert found["gain"] == pytest.approx(0.995, abs=0.002)
    assert found["per_device_gain"] == pytest.approx(0.8 * (1 + found["gain"]) - 1)
    assert [mode["name"] for mode in found["modes"]] == ["ar(16)", "sd(16)", "psd(16+16)", "sd(32)"]
    steps_ms = [mode["step_ms"] for mode in found["modes"]]
    assert steps_ms == pytest.approx([49.30 - 3 * 1.40, 98.83, 49.53, 98.83])
    periods_ms = [mode["request_period_ms"] for mode in found["modes"]]
    assert periods_ms == pytest.approx([45.10, 98.83, 99.06, 98.83])
    assert [mode["num_in_flight"] for mode in found["modes"]] == [16, 16, 32, 32]
    throughputs = [16 / 0.04510, 16 * 2.533 / 0.09883, 16 * 2.533 / 0.04953, 32 * 2.533 / 0.09883]
    assert [mode["output_throughput"] for mode in found["modes"]] == pytest.approx(throughputs)
    per_device = [value / count for value, count in zip(throughputs, (4, 4, 5, 4), strict=True)]
    assert [mode["output_throughput_per_device"] for mode in found["modes"]] == pytest.approx(per_device)
    assert (found["best_sd"]["num_speculative_tokens"], found["best_psd"]["num_speculative_tokens"]) == (2, 3)
    assert found["gain_by_cv"]["0.0"] == pytest.approx(found["gain"])
    assert found["theorem_1"]["holds"] is False
    assert found["theorem_1"]["counter_example"]["ratio"] == pytest.approx(1.361, abs=1e-3)


def test_options_are_used(figures: Any) -> None:
    found = figures(
        *("--verify-ms", 40, "--draft-ms", 30, "--verify-2m-ms", 75, "--draft-2m-ms", 34, "--overhead-ms", 5, "-k", 2),
        *("--acceptance", "0.8,0.5,0.1", "-m", 8, "--target-devices", 2, "--draft-devices", 2),
    )
    assert found["setting"]["drafter"] is None
    assert found["setting"]["tokens_per_round"] == pytest.approx(2.3)
    assert found["setting"]["tokens_per_round_without_bonus"] == pytest.approx(1.8)
    assert found["gain"] == pytest.approx(75 / 45 - 1)
    assert found["per_device_gain"] == pytest.approx(75 / 45 / 2 - 1)
    assert found["break_even_gain"] == 1.0
    assert found["break_even_draft_ms"] is None
    assert found["over_sd_2m"] == pytest.approx(114 / 90)
    assert found["break_even_verify_plus_draft_2m_ms"] == pytest.approx(85)
    assert found["modes"][3]["step_ms"] == pytest.approx(114)
    # t in proportion to k, V and o the same for each: 45, 60, 75 and 90 ms for 1, 1.8, 2.3 and 2.4 tokens.
    assert found["best_sd"] == {
        "num_speculative_tokens": 2,
        "tokens_per_round": pytest.approx(2.3),
        "step_ms": pytest.approx(75),
        "step_per_token_ms": pytest.approx(75 / 2.3),
    }
    assert found["draft_pass_over_verify_for_37_percent"] is None


def test_the_star_pays_where_a_drafter_each_does_not(theory: Any, figures: Any) -> None:
    options = ("--verify-ms", 60, "--draft-ms", 11.4)
    star = figures(*options)["star"]
    assert [row["num_replicas"] for row in star["rows"]] == list(range(1, 9))
    assert star["rows"][0]["per_device_gain"] == pytest.approx(-0.048, abs=1e-3)
    assert star["rows"][2]["per_device_gain"] == pytest.approx(0.098, abs=1e-3)
    assert (star["break_even_num_replicas"], star["best_num_replicas"]) == (2, 5)
    assert "It pays per device from n = 2, and is best at n = 5" in theory(*options)[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--draft-ms", "0"), "and gains with every target more"),
        (("--draft-devices", "0"), "psd is given none besides"),
        (("--target-devices", "1", "--overhead-ms", "5"), "which no t reaches at this V and o"),
        (("--acceptance", "0.1"), "no drafter lets psd save 37 %"),
        (("--acceptance", "1"), "4.000 tokens per request and round"),
        (("--acceptance", "0"), "1.000 tokens per request and round"),
        (("-k", "2"), "extrapolated to k = 2 from k = 3 and 4"),
        (("--draft-ms", "20"), "V: medians for qwen3-1.7b"),
        (("--target-devices", "1", "--draft-devices", "2"), "It pays per device for no n"),
        (("--verify-ms", "1e9", "--draft-ms", "1e-6"), "Here it does not pay"),
    ],
)
def test_corner_cases_have_words(theory: Any, arguments: Sequence[str], text: str) -> None:
    code, out, err = theory(*arguments)
    assert (code, err) == (0, "")
    assert text in out
    assert run_cli(["theory", *arguments, "--json", "-"]) == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--acceptance", "high"), "--acceptance high: write a rate such as 0.7"),
        (("--acceptance", "1.5"), "--acceptance 1.5: alpha is 1.5"),
        (("--acceptance", "0.5,0.6,0.1"), "rates[1] is 0.6, above 0.5"),
        (("--acceptance", "0.7,0.5"), "2 rates for -k 3"),
        (("--verify-ms", "0"), "--verify-ms 0: must be from 1e-06"),
        (("--draft-ms", "-1"), "--draft-ms -1: must be 0, or from 1e-06"),
        (("--verify-2m-ms", "inf"), "--verify-2m-ms inf: must be"),
        (("--draft-2m-ms", "nan"), "--draft-2m-ms nan: must be"),
        (("--overhead-ms", "1e300"), "--overhead-ms 1e+300: must be"),
        (("-k", "0"), "-k 0: must be a whole number from 1 to 64"),
        (("-m", "0"), "-m 0: must be"),
        (("--target-devices", "0"), "--target-devices 0: must be"),
        (("--draft-devices", "-1"), "--draft-devices -1: must be"),
        (("--drafter", "gpt"), "known: qwen3-0.6b"),
        (("--json", "nowhere/x.json"), "no such folder"),
    ],
)
def test_bad_input_is_one_line(theory: Any, arguments: Sequence[str], part: str) -> None:
    code, out, err = theory(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert part in err


def test_a_missing_scipy_names_the_extra(theory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    code, out, err = theory()
    assert (code, out) == (2, "")
    assert "pip install 'minedraft[theory]'" in err


def test_simulate_does_not_import_scipy() -> None:
    script = (
        "import sys\n"
        "from minedraft.cli import run_cli\n"
        "assert run_cli(['simulate', '--num-requests', '3', '--json', '-']) == 0\n"
        "assert 'scipy' not in sys.modules and 'minedraft.theory' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr

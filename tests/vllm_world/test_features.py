"""What a client may ask of vLLM gives what stock vLLM gives, with drafts accepted and rejected all the while.

Every case is a list of requests. A stock engine answers all cases first; then one psd engine, whose drafter disagrees
now and then, answers each of them in a test of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tiny_tokenizer import add_tokenizer
from vllm_kit import Engine, Job, make_load, make_requests, minedraft_options, watch_chunks

K = 3
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{0,12}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
REGEX = r"(ab|ac)+d[0-9]{2,6}"
CHOICES = ["yes", "yesterday", "no", "perhaps not"]


class Ask(NamedTuple):
    prompt: list[int]
    options: dict[str, Any]


def parameters(options: dict[str, Any], **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = {"temperature": 0.0, **options, **more}
    if (grammar := options.get("structured_outputs")) is not None:
        options["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**options)


def answer(engine: Engine, asks: Sequence[Ask], **more: Any) -> list[Any]:
    """All requests at once; vLLM's own outputs, in order."""
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    return list(engine.llm.generate(prompts, [parameters(ask.options, **more) for ask in asks], use_tqdm=False))


def report(outputs: Sequence[Any]) -> list[list[object]]:
    return [[(list(one.token_ids), one.text, one.finish_reason, one.stop_reason) for one in o.outputs] for o in outputs]


def logprob_rows(outputs: Sequence[Any]) -> list[dict[int, tuple[float, int | None]]]:
    """Log-probability and rank by token id, a row per token, prompts first."""
    rows = []
    for output in outputs:
        each = [row for row in output.prompt_logprobs or () if row is not None]
        each += [row for one in output.outputs for row in one.logprobs or ()]
        rows += [{token: (entry.logprob, entry.rank) for token, entry in row.items()} for row in each]
    return rows


def make_cases(texts: list[list[int]], decode: Any) -> dict[str, list[Ask]]:
    """Requests by case.

    Args:
        texts: what the requests of `make_requests` say without any of this.
        decode: token ids to text.
    """
    prompts = [job.prompt for job in make_requests()]
    long = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if len(text) >= 25]
    words = [decode(text) for _, text in long]
    load = [job.prompt for job in make_load(24)]
    return {
        # Strings of one to three tokens, each ending at another place: at every offset within an accepted block.
        "stop": [
            Ask(prompt, {"max_tokens": 40, "stop": [word[max(0, end - width) : end]], "include_stop_str_in_output": w})
            for (prompt, _), word, w in zip(long[:4], words, (False, True, False, True), strict=False)
            for end, width in zip(range(3, 23), (1, 2, 3) * 7, strict=False)
        ],
        "stop_with_min_tokens": [
            Ask(prompt, {"max_tokens": 40, "min_tokens": 3 * i, "stop": [word[5:7], word[9:10]]})
            for i, ((prompt, _), word) in enumerate(zip(long, words, strict=True))
        ],
        "min_tokens": [Ask(prompt, {"max_tokens": 24, "min_tokens": i % 20}) for i, prompt in enumerate(load)],
        "min_tokens_and_stop_tokens": [
            Ask(prompt, {"max_tokens": 30, "min_tokens": 7 + i, "stop_token_ids": text[2:5], "ignore_eos": True})
            for i, (prompt, text) in enumerate(long)
        ],
        "penalties": [
            Ask(
                prompt,
                {
                    "max_tokens": 30,
                    "ignore_eos": True,
                    "presence_penalty": (0.0, 0.7, -0.4)[i % 3],
                    "frequency_penalty": (0.3, 0.0, 0.9)[i % 3],
                    "repetition_penalty": (1.0, 1.3, 0.9)[i // 3 % 3],
                },
            )
            for i, prompt in enumerate(prompts)
        ],
        "logprobs": [
            Ask(prompt, {"max_tokens": 20, "logprobs": i % 4, "ignore_eos": True}) for i, prompt in enumerate(prompts)
        ],
        "prompt_logprobs": [
            Ask(prompt, {"max_tokens": 6, "prompt_logprobs": i % 3, "ignore_eos": True})
            for i, prompt in enumerate(prompts[:8])
        ],
        "bad_words": [
            Ask(prompt, {"max_tokens": 30, "ignore_eos": True, "bad_words": [word[2], word[5:7], word[10:13]]})
            for (prompt, _), word in zip(long, words, strict=True)
        ],
        "allowed_tokens": [
            Ask(prompt, {"max_tokens": 20, "ignore_eos": True, "allowed_token_ids": list(range(i, 120, 3))})
            for i, prompt in enumerate(prompts)
        ],
        "n": [Ask(prompt, {"max_tokens": 15, "temperature": 1.0, "top_k": 1, "n": 3}) for prompt in prompts[:5]],
        "structured": make_structured(prompts),
        "all_together": [
            Ask(
                prompt,
                {
                    "max_tokens": 25,
                    "min_tokens": 4,
                    "stop": [word[8:10]],
                    "bad_words": [word[3]],
                    "frequency_penalty": 0.2,
                    "logprobs": 1,
                },
            )
            for (prompt, _), word in zip(long, words, strict=True)
        ],
    }


def make_structured(prompts: Sequence[list[int]]) -> list[Ask]:
    """Grammars of four kinds, mixed with requests that are free."""
    kinds: list[dict[str, Any] | None] = [
        {"json": SCHEMA},
        None,
        {"regex": REGEX},
        {"choice": CHOICES},
        {"grammar": 'root ::= "(" root ")" | "x"'},
    ]
    return [
        Ask(prompt, {"max_tokens": 60, "ignore_eos": False, "structured_outputs": kinds[i % len(kinds)]})
        for i, prompt in enumerate([*prompts, *prompts[:9]])
    ]


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target and its noisy drafter, with a tokenizer."""
    folder = tmp_path_factory.mktemp("features")
    for name in ("target", "noisy"):
        shutil.copytree(models / name, folder / name)
        add_tokenizer(folder / name, 128)
    return folder


OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "structured_outputs_config": GRAMMARS}


class Stock(NamedTuple):
    cases: dict[str, list[Ask]]
    outputs: dict[str, list[Any]]
    biased: list[Any]
    seeded: list[Any]


BIASED = [
    {"max_tokens": 20, "ignore_eos": True, "logit_bias": {17: 6.0, 40: -100.0}},
    {"max_tokens": 20, "ignore_eos": True, "temperature": 0.7, "min_p": 1.0},
]
SEEDED = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95, "n": 2}


@pytest.fixture(scope="module")
def stock(folder: Path) -> Stock:
    with Engine(folder / "target", **OPTIONS) as engine:
        plain = answer(
            engine, [Ask(job.prompt, {"max_tokens": job.max_tokens, "ignore_eos": True}) for job in make_requests()]
        )
        cases = make_cases([list(o.outputs[0].token_ids) for o in plain], engine.llm.get_tokenizer().decode)
        outputs = {name: answer(engine, asks) for name, asks in cases.items()}
        prompts = [job.prompt for job in make_requests()[:6]]
        biased = answer(engine, [Ask(prompt, options) for prompt in prompts for options in BIASED])
        seeded = answer(engine, seeded_asks())
        return Stock(cases, outputs, biased, seeded)


def seeded_asks() -> list[Ask]:
    """One chunk each: with a seed and a prompt in chunks, vLLM itself fails on a CPU."""
    return [Ask([5, 9 + i, 30], {**SEEDED, "seed": 11 * i}) for i in range(5)]


@pytest.fixture(scope="class")
def engine(folder: Path, stock: Stock) -> Iterator[Engine]:
    assert stock.cases  # made before: two engines in one process share vLLM's globals
    with Engine(folder / "target", **OPTIONS, **minedraft_options(folder / "noisy", k=K, mode="psd")) as engine:
        yield engine


UNDRAFTED = (
    "test_seeds_without_drafts",
    "test_refused_with_drafts",
    "test_installed_logits_processors_are_refused",
    "test_models_that_can_take_nothing_back_are_refused",
)


@pytest.fixture(autouse=True)
def _whole_and_drafted(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on the shared engine the books are right, and drafts were accepted and rejected."""
    if "engine" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("engine")
    state = engine.conductor.core.state
    drafted, accepted = state.num_draft_tokens, state.num_accepted_tokens
    yield
    settle(engine)
    if request.node.originalname not in UNDRAFTED:
        assert 0 < state.num_accepted_tokens - accepted < state.num_draft_tokens - drafted


def settle(engine: Engine, strays: int = 0) -> None:
    """The books are right once the core has heard of the last abort (a stop string is one) and of the last drafts.

    It hears of both with the next requests.
    """
    end = time.monotonic() + 240.0
    engine.run([Job("next", [5, 6], 1)])
    while engine.conductor.core.num_in_flight:
        assert time.monotonic() < end, "drafts that nobody waits for never come"
        engine.run([Job("next", [5, 6], 1)])
    engine.check_rest()
    assert engine.conductor.counters.strays <= strays


def test_the_cases_change_the_text(stock: Stock) -> None:
    """A parameter that does nothing to these texts would prove nothing."""
    plain = {tuple(ask.prompt): None for ask in stock.cases["logprobs"]}
    texts = {key: list(o.outputs[0].token_ids) for key, o in zip(plain, stock.outputs["logprobs"], strict=True)}
    for case in ("penalties", "bad_words", "allowed_tokens", "structured"):
        pairs = zip(stock.cases[case], stock.outputs[case], strict=True)
        changed = [list(o.outputs[0].token_ids)[:20] != texts[tuple(ask.prompt)] for ask, o in pairs]
        assert sum(changed) > len(changed) // 3, case


def check_grammar(grammar: dict[str, Any], one: Any) -> None:
    """The whole of it, unless the length limit came first, which JSON and this regex need not keep."""
    if one.finish_reason == "length":
        assert "choice" not in grammar
        return
    assert one.finish_reason == "stop"
    if "json" in grammar:
        value = json.loads(one.text)
        assert value.keys() == {"name", "size", "tags"}
        assert re.fullmatch("[a-z]{0,12}", value["name"])
        assert 0 <= value["size"] <= 999
        assert set(value["tags"]) <= {"red", "green", "blue"}
    elif "regex" in grammar:
        assert re.fullmatch(REGEX, one.text)
    elif "choice" in grammar:
        assert one.text in CHOICES
    else:
        assert re.fullmatch(r"(\(*)x(\)*)", one.text)
        assert one.text.count("(") == one.text.count(")")


class TestOneEngine:
    """All on one engine, which is gone before others are made: engines in one process share vLLM's globals."""

    def test_stop_strings(self, engine: Engine, stock: Stock) -> None:
        """Also that the cases are what they claim: blocks of every length, cut at every place in them."""
        chunks = watch_chunks(engine)
        asks = stock.cases["stop"]
        outputs = answer(engine, asks)
        assert report(outputs) == report(stock.outputs["stop"])
        stopped = [output for output in outputs if output.outputs[0].finish_reason == "stop"]
        assert len(stopped) > 60
        places = set()
        for output in stopped:
            *before, last = chunks[output.request_id]
            places.add((last, len(output.outputs[0].token_ids) - sum(before)))
        assert places >= {(K + 1, place) for place in range(1, K + 2)}, places

    @pytest.mark.parametrize(
        "case",
        [
            "stop_with_min_tokens",
            "min_tokens",
            "min_tokens_and_stop_tokens",
            "penalties",
            "logprobs",
            "prompt_logprobs",
            "bad_words",
            "allowed_tokens",
            "n",
            "all_together",
        ],
    )
    def test_sampling_parameters(self, engine: Engine, stock: Stock, case: str) -> None:
        outputs = answer(engine, stock.cases[case])
        assert report(outputs) == report(stock.outputs[case])
        for row, wanted in zip(logprob_rows(outputs), logprob_rows(stock.outputs[case]), strict=True):
            assert row.keys() == wanted.keys()
            for token, (logprob, rank) in row.items():
                assert logprob == pytest.approx(wanted[token][0], abs=1e-3)
                assert rank == wanted[token][1]

    # --- Structured output.

    def test_structured_output(self, engine: Engine, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        """Valid, and stock vLLM's own; drafts that the grammar rejects never reach the target."""
        import vllm.v1.core.sched.scheduler as scheduler_module
        import vllm.v1.structured_output as structured_module

        manager = engine.scheduler.structured_output_manager
        validate, cut, kept = manager.validate_tokens, [], []
        complaints: list[str] = []

        def spy(request: Any, token_ids: list[int]) -> list[int]:
            valid: list[int] = validate(request, token_ids)
            if request.use_structured_output:
                cut.append(len(token_ids) - len(valid))
                kept.append(len(valid))
            return valid

        monkeypatch.setattr(manager, "validate_tokens", spy)
        for module in (scheduler_module, structured_module):
            monkeypatch.setattr(module.logger, "error", lambda text, *values: complaints.append(text % values))
        asks = stock.cases["structured"]
        outputs = answer(engine, asks)
        assert report(outputs) == report(stock.outputs["structured"])
        assert not complaints
        assert sum(cut) > 20
        assert sum(kept) > 5
        for ask, output in zip(asks, outputs, strict=True):
            if (grammar := ask.options["structured_outputs"]) is not None:
                check_grammar(grammar, output.outputs[0])

    def test_sampled_structured_output(self, engine: Engine, stock: Stock) -> None:
        """With a temperature the text is anything that the grammar allows."""
        asks = [ask for ask in stock.cases["structured"] if ask.options["structured_outputs"]]
        outputs = answer(engine, asks, temperature=1.0)
        assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
        for ask, output in zip(asks, outputs, strict=True):
            check_grammar(ask.options["structured_outputs"], output.outputs[0])

    def test_a_grammar_that_fails_to_compile_ends_its_request_only(
        self, engine: Engine, stock: Stock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = engine.scheduler.structured_output_manager.backend
        compile_grammar = backend.compile_grammar

        def fail_on_choices(kind: Any, text: str, **options: Any) -> Any:
            if "yesterday" in text:
                raise ValueError("made to fail by the test")
            return compile_grammar(kind, text, **options)

        monkeypatch.setattr(backend, "compile_grammar", fail_on_choices)
        asks = stock.cases["structured"]
        for ask, found, wanted in zip(asks, answer(engine, asks), stock.outputs["structured"], strict=True):
            if (ask.options["structured_outputs"] or {}).get("choice"):
                assert found.outputs[0].finish_reason == "error"
            else:
                assert report([found]) == report([wanted])

    # --- Seeds.

    def test_seeds_without_drafts(self, engine: Engine, stock: Stock) -> None:
        """A seed gives stock vLLM's own text to a request that opts out of drafts, whatever else runs."""
        outputs = answer(engine, seeded_asks(), extra_args={"max_draft_tokens": 0})
        assert report(outputs) == report(stock.seeded)

    def test_seeds_with_drafts(self, engine: Engine) -> None:
        """Each verification draws as often as there are drafts: the same drafts, the same text; another seed, another.

        vLLM promises no more with any speculation.
        """
        texts = []
        for seed in (1, 2, 1, 2):
            ask = Ask([5, 9, 30], {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": seed})
            texts.append(report(answer(engine, [ask])))
        assert texts[0] == texts[2]
        assert texts[1] == texts[3]
        assert texts[0] != texts[1]

    # --- Bounds on k.

    @pytest.mark.parametrize("bound", [1, 2])
    def test_a_requests_own_bound_on_k(self, engine: Engine, stock: Stock, bound: int) -> None:
        counts: dict[str, int] = {}
        widest: dict[int, int] = {}
        plan = engine.conductor.scheduled

        def spy(output: Any) -> None:
            for request_id, token_ids in output.scheduled_spec_decode_tokens.items():
                own = engine.scheduler.requests[request_id].sampling_params.extra_args or {}
                limit = own.get("max_draft_tokens", K)
                widest[limit] = max(widest.get(limit, 0), len(token_ids))
                counts[request_id] = counts.get(request_id, 0) + 1
            plan(output)

        engine.conductor.scheduled = spy
        try:
            asks = stock.cases["penalties"]
            bounded = [
                Ask(ask.prompt, {**ask.options, "extra_args": {"max_draft_tokens": bound}} if i % 2 else ask.options)
                for i, ask in enumerate(asks)
            ]
            assert report(answer(engine, bounded)) == report(stock.outputs["penalties"])
        finally:
            del engine.conductor.scheduled
        assert widest == {bound: bound, K: K}

    # --- What vLLM can't do with drafts.

    @pytest.mark.parametrize("options", BIASED, ids=["logit_bias", "min_p"])
    def test_refused_with_drafts(self, engine: Engine, options: dict[str, Any]) -> None:
        """vLLM's own check of a request, which its HTTP server answers with status 400."""
        from vllm.exceptions import VLLMValidationError

        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            engine.engine.add_request("refused", {"prompt_token_ids": [5, 6]}, parameters(options))
        assert not engine.engine.has_unfinished_requests()

    def test_installed_logits_processors_are_refused(
        self, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM runs plugins that change logits for every request, but drops them silently where it speculates."""
        from minedraft.backends.vllm import compat
        from minedraft.backends.vllm.errors import VllmWorldError

        config, kv_cache_config = engine.scheduler.vllm_config, engine.scheduler.kv_cache_config
        compat.check_engine(config, kv_cache_config)
        folder = tmp_path / "processors-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: processors\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{compat.LOGITS_PROCESSORS}]\nupper = processors:Upper\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(VllmWorldError, match=r"logits processors \(upper\)"):
            compat.check_engine(config, kv_cache_config)

    def test_models_that_can_take_nothing_back_are_refused(self, engine: Engine) -> None:
        from vllm.v1.kv_cache_interface import MambaSpec

        from minedraft.backends.vllm import compat
        from minedraft.backends.vllm.errors import VllmWorldError

        groups = [SimpleNamespace(kv_cache_spec=object.__new__(MambaSpec))]
        with pytest.raises(VllmWorldError, match="Mamba"):
            compat.check_engine(engine.scheduler.vllm_config, SimpleNamespace(kv_cache_groups=groups))
        with pytest.raises(VllmWorldError, match=r"the draft model keeps a state.*Mamba"):
            compat.check_draft_engine(SimpleNamespace(kv_cache_groups=groups))


# --- Other engines: none with drafts, priorities, one row, a short-sighted drafter.


@pytest.mark.parametrize("budget", [64, 97])
def test_equal_prompts_that_join_in_one_step(folder: Path, stock: Stock, budget: int) -> None:
    """What one request of a step computes, the next one finds in the prefix cache, also where a chunk ends before."""
    asks = [stock.cases["penalties"][i] for i in (2, 4, 9, 12) for _ in range(4)]
    options = minedraft_options(None, mode="ar")
    with Engine(folder / "target", **OPTIONS, **options, max_num_batched_tokens=budget, max_num_seqs=8) as engine:
        found = report(answer(engine, asks))
        texts = dict(zip([tuple(ask.prompt) for ask in asks], found, strict=True))
        assert found == [texts[tuple(ask.prompt)] for ask in asks]
        wanted = zip(stock.cases["penalties"], report(stock.outputs["penalties"]), strict=True)
        assert all(texts.get(tuple(ask.prompt), one) == one for ask, one in wanted)
        settle(engine)


def test_plain_mode_serves_what_drafts_forbid(folder: Path, stock: Stock) -> None:
    """Mode ar needs no speculative_config, and without one vLLM allows min_p, logit_bias, and the rest too."""
    options = minedraft_options(None, mode="ar")
    del options["speculative_config"]
    prompts = [job.prompt for job in make_requests()[:6]]
    with Engine(folder / "target", **OPTIONS, **options) as engine:
        for i, options in enumerate(BIASED):
            outputs = answer(engine, [Ask(prompt, options) for prompt in prompts])
            assert report(outputs) == report(stock.biased[i :: len(BIASED)])
        for case in ("stop", "structured", "all_together"):
            assert report(answer(engine, stock.cases[case])) == report(stock.outputs[case]), case
        settle(engine)


def test_priorities(folder: Path, stock: Stock) -> None:
    """As vLLM's own scheduling policy `priority`: lower numbers first, arrival among equals, also for victims."""
    options = minedraft_options(folder / "noisy", k=K, mode="psd")
    with Engine(
        folder / "target",
        **OPTIONS,
        **options,
        scheduling_policy="priority",
        max_num_seqs=2,
        num_gpu_blocks_override=10,
    ) as engine:
        policies = engine.conductor.core.policies
        assert type(policies.admission).__name__ == "Priority"
        assert type(policies.preemption).__name__ == "LeastUrgent"
        asks = stock.cases["penalties"]
        priorities = [(7 * i) % 5 - 2 for i in range(len(asks))]
        outputs, started = serve(engine, asks, priorities)
        assert report(outputs) == report(stock.outputs["penalties"])
        first = [int(name) for i, name in enumerate(started) if name not in started[:i]]
        assert first == sorted(range(len(asks)), key=lambda i: (priorities[i], i))
        check_victims(engine)
        # Who was let in may find its cached prefix gone when its turn comes; it waits again, and that is counted.
        settle(engine, strays=3)


def serve(engine: Engine, asks: Sequence[Ask], priorities: Sequence[int]) -> tuple[list[Any], list[str]]:
    """Outputs in order, and the numbers of the requests in the order in which they got a row."""
    for i, (ask, priority) in enumerate(zip(asks, priorities, strict=True)):
        engine.engine.add_request(f"{i}", {"prompt_token_ids": ask.prompt}, parameters(ask.options), priority=priority)
    done: dict[str, Any] = {}
    started: list[str] = []
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.finished:
                done[output.request_id] = output
        started += [
            number
            for request in engine.scheduler.running
            if (number := request.request_id.partition("-")[0]) not in started
        ]
    return [done[f"{i}"] for i in range(len(asks))], started


def check_victims(engine: Engine) -> None:
    """With a pool for little more than one: the urgent request runs through, the patient one that runs gives way."""
    preempted: list[str] = []
    for number, (name, priority) in enumerate([("patient", 5), ("urgent", -5), ("late", 0)]):
        params = parameters({"max_tokens": 120, "ignore_eos": True})
        prompt = {"prompt_token_ids": [7 + number] * 100}
        engine.engine.add_request(name, prompt, params, priority=priority)
    before = engine.conductor.counters.preemptions
    ended = []
    while engine.engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.engine.step() if output.finished]
        preempted += [
            request.request_id.partition("-")[0] for request in engine.scheduler.waiting if request.num_preemptions
        ]
    assert engine.conductor.counters.preemptions > before
    assert "urgent" not in preempted
    assert ended[0] == "urgent"
    assert ended[-1] == "patient"


def test_another_admission_policy_may_be_named(folder: Path) -> None:
    from types import SimpleNamespace

    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    from minedraft.backends.vllm.limits import follow_engine
    from minedraft.backends.vllm.settings import Settings

    settings = Settings(mode="ar", policies={"admission": "shortest-prompt"})
    followed = follow_engine(SimpleNamespace(policy=SchedulingPolicy.PRIORITY), settings)
    assert followed.policies == {"admission": "shortest-prompt", "preemption": "least-urgent"}
    assert follow_engine(SimpleNamespace(policy=SchedulingPolicy.FCFS), settings) is settings


def test_one_row_and_a_drafter_with_a_short_context(folder: Path, stock: Stock) -> None:
    """psd with a single running request; beyond the drafter's 64 tokens a request goes on without drafts."""
    drafter = {"engine": {"model": str(folder / "noisy"), "max_model_len": 64}}
    options = minedraft_options(folder / "noisy", k=K, mode="psd", drafter=drafter)
    with Engine(folder / "target", **OPTIONS, **options, max_num_seqs=1) as engine:
        config = engine.conductor.core.config
        assert (config.max_num_seqs, config.num_batches, config.draft_max_model_len) == (1, 2, 64)
        plan, longest, drafted = engine.conductor.scheduled, 0, set()

        def spy(output: Any) -> None:
            nonlocal longest
            for request_id, token_ids in output.scheduled_spec_decode_tokens.items():
                request = engine.scheduler.requests[request_id]
                longest = max(longest, request.num_tokens + len(token_ids))
                drafted.add(request.num_prompt_tokens)
            plan(output)

        engine.conductor.scheduled = spy
        for case in ("penalties", "structured"):
            assert report(answer(engine, stock.cases[case])) == report(stock.outputs[case]), case
        assert 60 <= longest <= 64
        lengths = {len(ask.prompt) for ask in stock.cases["penalties"]}
        assert {length for length in lengths if length <= 40} - {1, 2} <= drafted
        assert not {length for length in lengths if length > 64} & drafted
        settle(engine)

"""Every shipped policy, by its name, in a real vLLM engine and in the simulator: unchanged, with the same decisions.

One engine serves all: before each run `Conductor.restart` puts a fresh core beside it, with other policies. The
workload is that of the other tests here (16 requests, six running, a pool so small that requests are preempted), with
priorities. The journal of the vLLM run then gives the simulator what only vLLM can know: how long each text is, and
which drafts the target agrees with. Compared are

* in every mode: greedy texts with stock vLLM's, the books at the end, the journal's replay with what was decided, and
  what became of each request in the two worlds;
* in `ar` and `sd`: all works of the two runs, in order and field by field. At most one work is in flight there (in sd
  the drafter is told to ingest in rounds, not beside the target), so nothing hangs on which device is faster, and a
  policy decides alike in both worlds unless it looks at times or at the drafter's probabilities. Whether it does is
  found out, not listed: simulations at other speeds and with other probabilities then differ from each other, and the
  works are not compared.

In `psd` the order of events hangs on the devices, so the works of two worlds (or of two runs on one) may differ.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm_kit import Engine, Job, make_requests, minedraft_options, plain_ids, renamed, replay_report

from minedraft import Engine as CoreEngine
from minedraft import FinishReason, RequestOutput, Scheduler, SchedulerConfig, load_policies
from minedraft.codec import Asked
from minedraft.journal import Journal, Recorder, read_journal
from minedraft.policy import BUILTIN
from minedraft.sim.backend import SimBackend
from minedraft.sim.cost import LinearCost
from minedraft.sim.workload import SimRequest
from minedraft.work import DraftWork, RequestArrived, VerifyResult, VerifyWork, Work, WorkDone

MODES = ("ar", "sd", "psd")


class Case(NamedTuple):
    mode: str
    slot: str
    spec: str


def cases() -> list[Case]:
    """Each policy in the modes in which its slot decides anything; those of the mode slot by themselves."""
    found = [Case(mode, "mode", f"fixed,mode={mode}") for mode in MODES]
    found += [Case("psd", "mode", name) for name in BUILTIN["mode"] if name != "fixed"]
    for slot, names in BUILTIN.items():
        if slot != "mode":
            modes = ("psd",) if slot in ("assignment", "rebalance") else ("sd", "psd")
            found += [Case(mode, slot, name) for mode in modes for name in names]
    return found


CASES = cases()
IDS = ["-".join((case.slot, case.spec, case.mode)) for case in CASES]


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Engine]:
    """With 11 usable blocks, which two of the longest requests all but fill.

    The simulator's pools know no prefix caching; on an engine with it, the core is told of hits and decides otherwise.
    """
    options = minedraft_options(models / "noisy", mode="psd")
    with Engine(models / "target", num_gpu_blocks_override=12, enable_prefix_caching=False, **options) as engine:
        yield engine


def settings_of(case: Case, models: Path, journal: Path) -> Any:
    from minedraft.backends.vllm.settings import DrafterSettings, Settings

    return Settings(
        mode=case.mode,
        policies={case.slot: case.spec},
        drafter=DrafterSettings(engine={"model": str(models / "noisy")}),
        draft_capacity=8 if case.slot == "selection" else None,
        draft_ingests_beside=case.mode == "psd",
        journal=str(journal),
    )


def serve(engine: Engine, jobs: Sequence[Job]) -> dict[str, list[int]]:
    """Texts by request id; every request has a priority of its own."""
    from vllm import SamplingParams

    for i, job in enumerate(jobs):
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)
        prompt = {"prompt_token_ids": job.prompt}
        engine.engine.add_request(job.request_id, prompt, params, priority=(7 * i) % 16)
    return engine.run([])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_policy_decides_alike_in_both_worlds(
    case: Case,
    engine: Engine,
    models: Path,
    reference: dict[str, list[int]],
    tmp_path: Path,
    record_property: pytest.RecordProperty,
) -> None:
    path = tmp_path / "run.jsonl"
    engine.conductor.restart(settings_of(case, models, path))
    before = dataclasses.replace(engine.conductor.counters)
    prefix = f"{CASES.index(case)}:"
    texts = serve(engine, renamed(make_requests(), prefix))

    assert plain_ids(texts, prefix) == {job.request_id: reference[job.request_id] for job in make_requests()}
    engine.check_rest()
    after = engine.conductor.counters
    assert after.strays == before.strays
    assert after.preemptions > before.preemptions
    report = replay_report(path)
    assert report.first_difference is None, str(report.first_difference)

    journal = read_journal(path)
    works = works_of(journal)
    assert report.num_decisions == len(works) > 30
    lengths = {request_id: len(text) for request_id, text in texts.items()}
    runs = [simulate(journal, lengths, probe) for probe in PROBES]
    for run in runs:
        assert {outer_id(output.request_id): output.num_output_tokens for output in run.outputs} == lengths
    decides_by_times = any(run.works != runs[0].works for run in runs)
    compares = case.mode != "psd" and not decides_by_times and after.late_drafts == before.late_drafts
    record_property("compared", "every work" if compares else "every request's outcome")
    if compares:
        assert first_difference(works, runs[0].works) is None


def test_the_comparison_sees_another_policy(engine: Engine, models: Path, tmp_path: Path) -> None:
    """Simulated with another policy in its slot, a run differs: the workload makes them decide differently."""
    path = tmp_path / "run.jsonl"
    engine.conductor.restart(settings_of(Case("sd", "mode", "fixed,mode=sd"), models, path))
    texts = serve(engine, renamed(make_requests(), "other:"))
    journal, lengths = read_journal(path), {request_id: len(text) for request_id, text in texts.items()}
    works = works_of(journal)
    assert first_difference(works, simulate(journal, lengths, PROBES[0]).works) is None
    for other in (
        {"admission": "priority"},
        {"admission": "shortest-prompt"},
        {"draft_length": "fixed,k=2"},
        {"preemption": "least-urgent", "admission": "priority"},
        {"preemption": "cost-aware"},
    ):
        assert first_difference(works, simulate(journal, lengths, PROBES[0], other).works) is not None, other


def test_restart_needs_an_idle_engine(engine: Engine, models: Path, tmp_path: Path) -> None:
    """And one that can't be done leaves everything as it was."""
    from minedraft.backends.vllm.errors import VllmWorldError

    job = make_requests()[1]
    settings = settings_of(Case("sd", "mode", "fixed,mode=sd"), models, tmp_path / "one.jsonl")
    engine.conductor.restart(settings)
    core = engine.conductor.core
    with pytest.raises(VllmWorldError, match=r"name another file"):
        engine.conductor.restart(settings)
    with pytest.raises(ValueError, match=r"no mode policy 'fixd'"):
        engine.conductor.restart(settings_of(Case("sd", "mode", "fixd"), models, tmp_path / "two.jsonl"))
    assert engine.conductor.core is core

    def restart(number: int) -> None:
        if number == 3:
            with pytest.raises(VllmWorldError, match=r"busy engine"):
                engine.conductor.restart(settings_of(CASES[0], models, tmp_path / "three.jsonl"))

    texts = engine.run([job._replace(request_id="busy")], on_step=restart)
    assert len(texts["busy"]) == job.max_tokens
    engine.check_rest()
    assert engine.conductor.core is core


# --- The simulator's side.


class Probe(NamedTuple):
    """How a simulation differs from the others: seconds per verification and per draft pass, and reported chances."""

    verify_s: float
    draft_s: float
    chance: float


PROBES = (Probe(0.02, 0.005, 0.7), Probe(0.002, 0.05, 0.05), Probe(0.5, 0.0005, 0.99))


class Simulated(NamedTuple):
    works: list[Work]
    outputs: list[RequestOutput]


def outer_id(request_id: str) -> str:
    """The client's id: inside, vLLM adds a random suffix."""
    return request_id.rpartition("-")[0]


def simulate(
    journal: Journal, lengths: dict[str, int], probe: Probe, other: Mapping[str, str] | None = None
) -> Simulated:
    """The same requests, limits and policies in virtual time; `other` policies by slot instead, if any."""
    arrived = [record.item.request for record in journal if isinstance(record.item, RequestArrived)]
    assert sorted(lengths) == sorted(outer_id(request.request_id) for request in arrived)
    requests = [
        SimRequest(
            request.request_id,
            0.0,
            request.prompt_len,
            lengths[outer_id(request.request_id)],
            request.max_tokens,
            request.priority,
            request.max_draft_tokens,
        )
        for request in arrived
    ]
    cost = LinearCost(
        verify_base_s=probe.verify_s,
        verify_per_seq_s=probe.verify_s / 100,
        prefill_base_s=probe.verify_s,
        prefill_per_token_s=probe.verify_s / 50,
        draft_base_s=probe.draft_s,
        draft_prefill_base_s=probe.draft_s,
    )
    backend = SimBackend(requests, cost, Recorded(journal, probe.chance), draft_probs=True)
    config = SchedulerConfig(**journal.header.scheduler)
    core = Scheduler(config, load_policies({**journal.header.policies, **(other or {})}))
    sink = KeepWorks()
    with Recorder(backend, sink) as recorder:
        outputs = CoreEngine(core, recorder).run()
    assert all(output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for output in outputs)
    assert not core.num_unfinished
    assert not core.num_in_flight
    for pool in (core.state.target_pool, core.state.draft_pool):
        assert pool is not None
        assert pool.num_free_blocks == pool.num_blocks
    return Simulated(sink.works, outputs)


class Recorded:
    """An `AcceptanceModel` that knows of each position of a text whether the drafter would have got it right.

    With greedy decoding that is a property of the position, whenever and with whatever k it is drafted: the drafter
    sees the target's own text up to there, or the draft is rejected earlier. Positions that were never drafted count
    as right.
    """

    def __init__(self, journal: Journal, chance: float) -> None:
        self._chance = chance
        self._wrong: dict[str, set[int]] = {}
        prompt_len: dict[str, int] = {}
        verifying: dict[int, VerifyWork] = {}
        for record in journal:
            item = record.item
            if isinstance(item, RequestArrived):
                prompt_len[item.request.request_id] = item.request.prompt_len
            elif isinstance(item, VerifyWork):
                verifying[item.work_id] = item
            elif isinstance(item, WorkDone) and isinstance(item.result, VerifyResult):
                work = verifying.pop(item.work_id)
                for i, request_id in enumerate(work.request_ids):
                    if (accepted := item.result.num_accepted[i]) < work.num_draft[i]:
                        position = work.num_computed[i] + work.num_new[i] - prompt_len[request_id]
                        self._wrong.setdefault(request_id, set()).add(position + accepted)

    def num_accepted(self, request_id: str, position: int, num_draft: int) -> int:
        wrong = self._wrong.get(request_id, ())
        return next((i for i in range(num_draft) if position + i in wrong), num_draft)

    def conditional_rates(self, request_id: str, num_draft: int) -> tuple[float, ...]:
        """Not this model's own, which would all be 0 or 1: each probe has its own, by request and position."""
        draws = [zlib.crc32(f"{self._chance}/{request_id}/{i}".encode()) / 2**32 for i in range(num_draft)]
        return tuple([0.5 * (self._chance + draw) for draw in draws])

    def forget(self, request_id: str) -> None: ...


class KeepWorks:
    """A `Sink` that keeps what was decided."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def on_start(self, now_s: float) -> None: ...

    def on_asked(self, now_s: float) -> None: ...

    def on_event(self, now_s: float, event: object) -> None: ...

    def close(self) -> None: ...

    def on_submit(self, now_s: float, work: Work) -> None:
        self.works.append(work)


def works_of(journal: Journal) -> list[Work]:
    """What was decided, in order."""
    items = (record.item for record in journal if not isinstance(record.item, Asked))
    return [item for item in items if isinstance(item, VerifyWork | DraftWork)]


def first_difference(one: list[Work], other: list[Work]) -> tuple[int, Work | None, Work | None] | None:
    """Number of the first work that differs, and both; None if all are equal."""
    for i in range(max(len(one), len(other))):
        left, right = (works[i] if i < len(works) else None for works in (one, other))
        if left != right or type(left) is not type(right):
            return i, left, right
    return None

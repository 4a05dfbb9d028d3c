"""A journal whose disk is full costs no request: it ends, says so once, and replays as far as it goes."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm_kit import Engine, make_requests, minedraft_options, replay_report

from minedraft.cli import run_cli
from minedraft.journal import JournalHeader, JournalWriter, read_journal
from minedraft.work import RequestAborted

HEADER = JournalHeader("0", {}, {})


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Files of this process can't grow beyond this, as on a disk that is full: writes are cut, then refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", range(400, 520, 7))
def test_it_ends_at_any_byte(tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """What a cut write leaves behind is at most half a line, and nothing comes after it, room or not."""
    from minedraft.backends.vllm.recording import Recording

    lost: list[int] = []
    path = tmp_path / "j"
    whole = JournalWriter(tmp_path / "whole", HEADER)
    start = (tmp_path / "whole").stat().st_size
    recording = Recording(path, HEADER, lambda: lost.append(1))
    with caplog.at_level(logging.ERROR, "minedraft"):
        for sink in (whole, recording):
            sink.on_start(0.0)
            with file_limit(start + num_bytes) if sink is recording else file_limit(resource.RLIM_INFINITY):
                for i in range(40):
                    sink.on_event(float(i), RequestAborted(str(i)))
            sink.on_event(99.0, RequestAborted("there is room again"))
            sink.close()
            sink.close()
    assert lost == [1]
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    assert path.stat().st_size == start + num_bytes
    assert (tmp_path / "whole").read_bytes().startswith(path.read_bytes())
    journal = read_journal(path)
    found = list(journal)
    assert 0 < len(found) < 40
    assert found == list(read_journal(tmp_path / "whole"))[: len(found)]
    assert journal.complete is False


def test_a_file_that_can_not_be_begun_is_told_at_once() -> None:
    """Before there are requests, the user is there to hear of it."""
    from minedraft.backends.vllm.recording import Recording

    with pytest.raises(OSError, match="No space left"):
        Recording("/dev/full", HEADER, lambda: None)


def test_a_full_disk_costs_no_request(
    models: Path, reference: dict[str, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "j"
    options = minedraft_options(models / "noisy", mode="psd", journal=str(path))
    with Engine(models / "target", **options) as engine:

        def fill(_: int) -> None:
            if not limits and engine.conductor.counters.steps >= 8:
                soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                limits.append((soft, hard))
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))

        limits: list[tuple[int, int]] = []
        jobs = make_requests()
        try:
            texts = engine.run(jobs, on_step=fill)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits[0])
        assert texts == {job.request_id: reference[job.request_id] for job in jobs}
        assert engine.conductor.counters.journals_lost == 1
        engine.check_rest()
    report = replay_report(path)
    assert report.first_difference is None
    assert report.num_decisions >= 8
    assert run_cli(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("identical")
    assert "disk full" in out


def test_figures_from_half_a_journal_are_called_so(tmp_path: Path) -> None:
    """`minedraft run --backend vllm` reads its figures off the journal."""
    from minedraft.backends.vllm.placement import Placement
    from minedraft.commands.vllm_run import _figures

    limits = {"num_batches": 2, "max_batch_size": 2, "max_num_seqs": 4, "num_speculative_tokens": 2}
    header = JournalHeader("0", {**limits, "num_target_blocks": 8, "max_num_batched_tokens": 64}, {})
    writer = JournalWriter(tmp_path / "j", header)
    writer.on_start(0.0)
    _, outcome = _figures(tmp_path / "j", Placement(), None)
    assert "ends early" in str(outcome.error)
    writer.close()
    _, outcome = _figures(tmp_path / "j", Placement(), None)
    assert outcome.error is None

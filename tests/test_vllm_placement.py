"""Who gets which device: defaults, names, UUIDs, cores, and what is refused. Pure; needs no vLLM and no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from minedraft.backends.vllm.device_facts import CPU, Device, DeviceFacts, is_cpu_build, visible_names
from minedraft.backends.vllm.errors import VllmWorldError
from minedraft.backends.vllm.placement import OMP_BIND, Placement, place

VARIABLE = "CUDA_VISIBLE_DEVICES"
UUIDS = ("GPU-1a", "GPU-2b", "GPU-3c")


def gpus(*names: str) -> DeviceFacts:
    return DeviceFacts("cuda", tuple(map(Device, names)), VARIABLE)


def cores(*numbers: int) -> DeviceFacts:
    return DeviceFacts(CPU, tuple([Device(str(number)) for number in numbers]))


def placed(facts: DeviceFacts, environ: dict[str, str] | None = None, **wishes: Any) -> Placement:
    return place(facts, environ=environ or {}, **wishes)


def refusal(facts: DeviceFacts, environ: dict[str, str] | None = None, **wishes: Any) -> str:
    with pytest.raises(VllmWorldError) as caught:
        placed(facts, environ, **wishes)
    return str(caught.value)


# --- GPUs


def test_the_last_gpu_drafts_and_the_first_ones_serve() -> None:
    found = placed(gpus("0", "1", "2", "3"), target_ranks=2)
    assert (found.target, found.draft, found.shared) == (("0", "1"), ("3",), ())
    assert found.target_env == {VARIABLE: "0,1"}
    assert found.draft_env == {VARIABLE: "3"}
    assert (found.num_target_devices, found.num_draft_devices, found.draft_cpus) == (2, 1, ())


def test_ranks_of_the_drafter() -> None:
    found = placed(gpus("0", "1", "2", "3"), target_ranks=2, draft_ranks=2)
    assert (found.target, found.draft) == (("0", "1"), ("2", "3"))
    assert found.num_draft_devices == 2


def test_hidden_devices_stay_hidden() -> None:
    """What the variable shows is all there is; numbers are positions in it, as frameworks count devices."""
    found = placed(gpus("4", "6", "7"), target="1", draft="0")
    assert (found.target_env[VARIABLE], found.draft_env[VARIABLE]) == ("6", "4")
    assert "visible are 4,6,7" in refusal(gpus("4", "6", "7"), target="3")


def test_uuids() -> None:
    found = placed(gpus(*UUIDS), target_ranks=2)
    assert (found.target, found.draft) == (UUIDS[:2], UUIDS[2:])
    assert placed(gpus(*UUIDS), target="GPU-3c,GPU-1a", target_ranks=2).target == ("GPU-3c", "GPU-1a")
    assert placed(gpus(*UUIDS), target="2", draft="GPU-2").draft == ("GPU-2b",)  # CUDA takes beginnings too
    assert "'GPU-9' is none of the visible devices" in refusal(gpus(*UUIDS), target="GPU-9")
    # Where nothing is hidden, a UUID is the driver's business.
    assert placed(gpus("0", "1"), draft="MIG-77").draft == ("MIG-77",)


def test_named_devices_tell_the_number_of_ranks() -> None:
    found = placed(gpus("0", "1", "2"), target="0,2")
    assert (found.target_ranks, found.target, found.draft) == (2, ("0", "2"), ("1",))
    found = placed(gpus("0", "1", "2"), draft="1,2")
    assert (found.draft_ranks, found.target, found.draft) == (2, ("0",), ("1", "2"))
    assert "--tensor-parallel-size is 2" in refusal(gpus("0", "1", "2"), target="0,1,2", target_ranks=2)


def test_sharing_must_be_named() -> None:
    assert "name both" in refusal(gpus("0"))
    assert "drafter 1" in refusal(gpus("0", "1"), target_ranks=2)
    assert "name both" in refusal(gpus("0", "1"), target="0,1")
    found = placed(gpus("0", "1"), target="0,1", draft="1")
    assert found.shared == ("1",)
    assert found.num_draft_devices == 0  # counted once in per-device figures


def test_without_a_drafter() -> None:
    found = placed(gpus("0", "1"), target_ranks=2, with_drafter=False)
    assert (found.target, found.draft, found.draft_env, found.num_draft_devices) == (("0", "1"), (), {}, 0)
    assert "has no drafter" in refusal(gpus("0", "1"), draft="1", with_drafter=False)
    assert "needs 3, but 2 devices" in refusal(gpus("0", "1"), target_ranks=3, with_drafter=False)


@pytest.mark.parametrize("text", ["0,,1", "", "0,0", "cuda:0", "-1"])
def test_bad_names_of_gpus(text: str) -> None:
    assert f"--target-devices {text}" in refusal(gpus("0", "1", "2"), target=text).replace("'", "")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ["0", "1", "2"]),
        ("", ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("GPU-1a, MIG-2b", ["GPU-1a", "MIG-2b"]),
        ("1,-1,0", ["1"]),
        ("-1", []),
    ],
)
def test_what_a_variable_shows(value: str | None, names: list[str]) -> None:
    assert visible_names(value, lambda: 3) == names


def test_no_device_at_all() -> None:
    assert "0 devices are visible (none)" in refusal(gpus())


# --- cores


def test_the_last_core_drafts() -> None:
    found = placed(cores(0, 1, 2, 3))
    assert (found.target, found.draft, found.draft_cpus) == (("0", "1", "2"), ("3",), (3,))
    assert found.target_env == {OMP_BIND: "0,1,2"}
    assert found.draft_env == {"OMP_NUM_THREADS": "1"}
    assert (found.num_target_devices, found.num_draft_devices, found.is_one_core) == (1, 1, False)
    assert placed(cores(4, 9)).is_one_core


def test_ranks_share_the_cores_out() -> None:
    assert placed(cores(*range(6)), target_ranks=2).target_env == {OMP_BIND: "0,1|2,3"}
    assert placed(cores(*range(6)), target="1-3,5", target_ranks=2).target_env == {OMP_BIND: "1,2|3,5"}
    assert "lower it" in refusal(cores(0, 1, 2), target="0", target_ranks=2)
    assert "must be 1 on a CPU" in refusal(cores(0, 1, 2), draft_ranks=2)


def test_named_cores() -> None:
    found = placed(cores(0, 1, 2, 3), draft="0-1")
    assert (found.target, found.draft_cpus, found.draft_env) == (("2", "3"), (0, 1), {"OMP_NUM_THREADS": "2"})
    assert placed(cores(0, 1), target="1").draft == ("0",)
    assert placed(cores(0), target="0", draft="0").shared == ("0",)
    assert "name both" in refusal(cores(0))
    assert "leave some to the target" in refusal(cores(0, 1), draft="0,1")
    assert "may not use core 7; it has 2,3" in refusal(cores(2, 3), target="7")


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "0,0", "0-1,1"])
def test_bad_names_of_cores(text: str) -> None:
    assert f"--draft-devices {text}" in refusal(cores(0, 1, 2, 3), draft=text)


def test_vllms_own_variable_is_honoured() -> None:
    found = placed(cores(0, 1, 2, 3), {OMP_BIND: "2,3"})
    assert (found.target, found.draft, found.target_env) == (("2", "3"), ("1",), {})
    assert placed(cores(0, 1, 2, 3), {OMP_BIND: "0|1"}, target_ranks=2).target == ("0", "1")
    assert placed(cores(0, 1), {OMP_BIND: "nobind"}).target == ()
    assert placed(cores(0, 1), {OMP_BIND: "auto"}).target_env == {OMP_BIND: "0"}
    assert "keep one" in refusal(cores(0, 1), {OMP_BIND: "0"}, target="0")


def test_every_default_fits_every_machine() -> None:
    """Whatever the machine and the sizes: enough devices each, nobody's twice, or a refusal that says what to do."""
    for count in range(1, 9):
        for ranks in range(1, 5):
            for facts in (gpus(*map(str, range(count))), cores(*range(count))):
                if count <= ranks:
                    assert "--target-devices" in refusal(facts, target_ranks=ranks)
                    continue
                found = placed(facts, target_ranks=ranks)
                assert not found.shared
                assert len(found.target) >= ranks
                assert len(found.draft) == 1
                assert set(found.target) | set(found.draft) <= set(facts.names)


def test_a_missing_vllm_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="vllm"):
        is_cpu_build(os.environ)

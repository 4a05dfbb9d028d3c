"""The GPU check as a test; it needs a CUDA device and vLLM, and is skipped without them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("check_vllm.py")


@pytest.mark.gpu
@pytest.mark.slow
def test_greedy_text_is_that_of_stock_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run([sys.executable, str(CHECK), "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

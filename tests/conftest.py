"""Hypothesis profiles, and the folder of test helpers on the import path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

sys.path.insert(0, str(Path(__file__).parent))

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=150, suppress_health_check=_QUIET)
settings.register_profile("deep", deadline=None, max_examples=5000, suppress_health_check=_QUIET)
settings.register_profile("noshrink", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header() -> str:
    """Which build is tested."""
    import minedraft

    return f"minedraft {minedraft.__version__}{minedraft.BUILD.label or ' (plain Python)'}"

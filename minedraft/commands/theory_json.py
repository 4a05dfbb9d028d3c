"""The figures of `minedraft theory` as JSON."""

from __future__ import annotations

import math
from typing import Any

import minedraft
from minedraft.commands.theory_report import CVS, MOST_REPLICAS, T_TOKENS
from minedraft.commands.theory_setting import TheorySetting
from minedraft.theory import theorem
from minedraft.theory.claims import COUNTER_EXAMPLE, REDUCTIONS, SHOWN_X, Claims
from minedraft.theory.draft_length import BestLength
from minedraft.theory.stages import reduction_of_gain
from minedraft.theory.study import ModeFigures, Study


def as_json(setting: TheorySetting) -> dict[str, Any]:
    """Everything, named as in the other commands; times in milliseconds, gains and shares as fractions."""
    study = setting.study
    return {
        "minedraft": minedraft.__version__,
        "command": "theory",
        "setting": _setting(setting),
        "modes": [_mode(mode) for mode in study.modes],
        "gain": study.gain,
        "time_saved": reduction_of_gain(study.gain),
        "per_device_gain": study.per_device_gain,
        "break_even_gain": study.break_even_gain,
        "break_even_draft_ms": _pair(study.break_even_draft_range, 1000.0),
        "over_sd_2m": study.over_sd_2m,
        "break_even_verify_plus_draft_2m_ms": 1000.0 * study.break_even_sequential_s,
        "best_sd": _best(study.best_sd),
        "best_psd": _best(study.best_psd),
        "gain_at_best": study.gain_at_best,
        "gain_by_cv": dict(zip(map(str, CVS), study.gains_with_jitter(CVS), strict=True)),
        "draft_pass_over_verify_for_37_percent": _pair(setting.cost_ends),
        "star": _star(study),
        "theorem_1": _theorem(setting.claims),
    }


def _setting(setting: TheorySetting) -> dict[str, Any]:
    options, study = setting.options, setting.study
    return {
        "drafter": options.drafter if None in (options.verify_ms, options.draft_ms) else None,
        "verify_ms": 1000.0 * study.stages.verify_s,
        "draft_ms": 1000.0 * study.stages.draft_s,
        "overhead_ms": 1000.0 * study.stages.overhead_s,
        "verify_2m_ms": 1000.0 * study.at_2m.verify_s,
        "draft_2m_ms": 1000.0 * study.at_2m.draft_s,
        "num_speculative_tokens": study.num_draft,
        "synthetic_acceptance_rates": list(study.rates[: study.num_draft]),
        "max_batch_size": study.batch_size,
        "num_target_devices": study.target_devices,
        "num_draft_devices": study.draft_devices,
        "tokens_per_round": study.tokens,
        "tokens_per_round_without_bonus": study.tokens_without_bonus,
    }


def _mode(mode: ModeFigures) -> dict[str, Any]:
    return {
        "name": mode.name,
        "num_devices": mode.num_devices,
        "num_in_flight": mode.num_in_flight,
        "requests_per_step": mode.step_requests,
        "tokens_per_round": mode.tokens,
        "step_ms": 1000.0 * mode.step_s,
        f"seconds_per_{T_TOKENS}_tokens": mode.time_s(T_TOKENS),
        "output_throughput": mode.throughput,
        "output_throughput_per_device": mode.throughput_per_device,
        "request_period_ms": 1000.0 * mode.period_s,
        "tpot_ms": 1000.0 * mode.tpot_s,
    }


def _best(best: BestLength) -> dict[str, Any]:
    return {
        "num_speculative_tokens": best.num_draft,
        "tokens_per_round": best.tokens,
        "step_ms": 1000.0 * best.step_s,
        "step_per_token_ms": 1000.0 * best.seconds_per_token,
    }


def _star(study: Study) -> dict[str, Any]:
    rows = [
        {
            "num_replicas": star.num_replicas,
            "num_devices": star.num_devices,
            "step_ms": 1000.0 * star.step_s,
            "drafter_utilisation": star.drafter_utilisation,
            "gain": star.gain,
            "per_device_gain": star.per_device_gain,
        }
        for star in study.stars(MOST_REPLICAS)
    ]
    return {
        "break_even_num_replicas": study.break_even_num_replicas,
        "best_num_replicas": study.best_num_replicas,
        "rows": rows,
    }


def _theorem(found: Claims) -> dict[str, Any]:
    saved = zip(REDUCTIONS, found.ranges, strict=True)
    return {
        "claim": f"T_SD > {theorem.CLAIMED_RATIO} T_PSD for all alpha V >= {found.starts_at:.6f}",
        "holds": found.counter_example > theorem.CLAIMED_RATIO,
        "counter_example": {"alpha_v": COUNTER_EXAMPLE, "ratio": found.counter_example},
        "claimed_from_alpha_v": found.starts_at,
        "proven_bound_there": found.bound_there,
        "claimed_ratio_reached_for_alpha_v": list(found.claimed),
        "time_saved_for_alpha_v": {f"{share:g}": list(ends) for share, ends in saved},
        "peak": {"alpha_v": found.peak, "ratio": theorem.ratio(found.peak)},
        "ratio_by_alpha_v": {f"{x:g}": ratio for x, ratio in zip(SHOWN_X, found.ratios, strict=True)},
    }


def _pair(ends: tuple[float, float] | None, scale: float = 1.0) -> list[float | None] | None:
    """Two ends as JSON knows them: it has no infinity."""
    return None if ends is None else [scale * end if math.isfinite(end) else None for end in ends]

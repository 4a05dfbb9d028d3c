"""What a cost model costs: microseconds per work, and as a ratio to `LinearCost` on the same work in the same run.

Run: python tests/benchmarks/bench_cost.py [--number 5000]

A cost model is asked twice per round, so a simulated round (tens to hundreds of microseconds) shows what matters.
"""

from __future__ import annotations

import argparse
import importlib.util
import timeit
from collections.abc import Callable
from typing import Any

from minedraft.sim.cost import CostModel, LinearCost
from minedraft.sim.device_group import DeviceGroup
from minedraft.sim.gpus import load_gpu
from minedraft.sim.measured import Measured
from minedraft.sim.models import load_model
from minedraft.sim.operator_tables import PACKAGE
from minedraft.sim.profile import Profile, ProfileTable
from minedraft.sim.roofline import Roofline
from minedraft.sim.steps import StepCost
from minedraft.work import DraftWork, VerifyWork

LINEAR = LinearCost(
    verify_base_s=0.008,
    verify_per_token_s=2e-5,
    verify_per_context_token_s=4e-8,
    draft_base_s=0.002,
    draft_per_seq_s=1e-5,
    draft_per_context_token_s=4e-9,
)


def models() -> dict[str, CostModel]:
    target = DeviceGroup(load_model("qwen3-32b"), load_gpu("h100"), 4)
    sparse = DeviceGroup(load_model("qwen3-235b-a22b-fp8"), load_gpu("h200"), 4)
    drafter = DeviceGroup(load_model("qwen3-0.6b"), load_gpu("h100"))
    axes = [1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 64, 512], [0, 512, 2048, 8192]
    grid = [[[1e-3 * (8 + b * q / 64 + b * c / 1e6) for c in axes[2]] for q in axes[1]] for b in axes[0]]
    names = ("num_seqs", "num_new_tokens", "context", "seconds")
    table = ProfileTable.from_dict({"format": "minedraft-profile/1", **dict(zip(names, (*axes, grid), strict=True))})
    found: dict[str, CostModel] = {
        "linear": LINEAR,
        "roofline": StepCost(Roofline(target), Roofline(drafter)),
        "roofline, experts": StepCost(Roofline(sparse), Roofline(drafter)),
        "profile": StepCost(Profile(table), Profile(table)),
    }
    if importlib.util.find_spec(PACKAGE) is not None:
        found["measured"] = StepCost(Measured(target, "h100"), Measured(drafter, "h100"))
    return found


def works(num_seqs: int) -> dict[str, VerifyWork | DraftWork]:
    n = num_seqs
    ids, none = tuple(f"r{i}" for i in range(n)), (0,) * n
    contexts = tuple(500 + i % 97 for i in range(n))
    ragged = tuple(1 + i % 4 for i in range(n))
    new = (256, *(1,) * (n - 1))

    def verify(num_new: tuple[int, ...], num_draft: tuple[int, ...]) -> VerifyWork:
        return VerifyWork(0, 0, ids, none, none, contexts, num_new, num_draft, (True,) * n, (0,) * 13, (n,), ())

    def draft(num_new: tuple[int, ...], num_draft: tuple[int, ...]) -> DraftWork:
        return DraftWork(0, 0, ids, none, none, contexts, num_new, num_draft, ())

    ones, fours = (1,) * n, (4,) * n
    return {
        "decode": verify(ones, none),
        "verify k=4": verify(ones, fours),
        "verify k=1..4": verify(ones, ragged),
        "verify + prompt": verify(new, (0, *(4,) * (n - 1))),
        "draft k=4": draft(ones, fours),
        "draft k=1..4": draft(ones, ragged),
    }


def best_us(call: Callable[[Any], float], work: Any, number: int) -> float:
    return 1e6 * min(timeit.repeat(lambda: call(work), number=number, repeat=7)) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=5000)
    number = parser.parse_args().number
    found = models()
    for num_seqs in (1, 16, 64, 256):
        for name, work in works(num_seqs).items():
            line = []
            base = 0.0
            for model_name, model in found.items():
                call: Any = model.verify_s if isinstance(work, VerifyWork) else model.draft_s
                spent = best_us(call, work, number)
                base = base or spent
                line.append(f"{model_name} {spent:.2f} us ({spent / base:.2f}x)")
            print(f"{num_seqs:4d} {name:16s}", "  ".join(line))


if __name__ == "__main__":
    main()

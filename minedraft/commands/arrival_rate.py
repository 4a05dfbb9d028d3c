"""The same configuration at another arrival rate (`at_rate`).

With the seed, gaps between arrivals are the same random numbers at every rate, scaled; lengths and acceptance luck are
the same too. Runs at several rates are thus paired, and latency over the rate is nearly monotone.
"""

from __future__ import annotations

import math
from typing import Any

from minedraft.config import ConfigError, RunConfig
from minedraft.config_messages import FieldError
from minedraft.config_workload import AtOnceTable, ClosedLoopTable, NamedWorkloadTable, PoissonTable


def at_rate(config: RunConfig, rate: float) -> RunConfig:
    """The run with so many requests per second; whatever else its arrivals have (burstiness, say) stays.

    Requests that would all be there at once arrive by a Poisson process instead.

    Raises:
        ConfigError: the rate is not positive and finite, or the arrivals have none: a closed loop, a recorded trace.
    """
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"the arrival rate is {rate:g}, must be finite and > 0 requests per second")
    workload = config.workload
    changes: dict[str, Any] = {"rate": rate}
    if not isinstance(workload, NamedWorkloadTable):
        arrivals = workload.arrivals
        if isinstance(arrivals, AtOnceTable):
            arrivals = PoissonTable(kind="poisson", rate=rate)
        elif isinstance(arrivals, ClosedLoopTable):
            raise ConfigError(
                "workload.arrivals: a closed loop has no arrival rate; sweep its clients instead: "
                "--over workload.arrivals.concurrency=8,16,32"
            )
        elif arrivals is None:
            raise ConfigError(
                "workload: a recorded trace brings its own arrivals; sweep --over workload.time_scale=1,0.5 instead, "
                "or replace them: --set 'workload.arrivals={kind=\"poisson\", rate=1}'"
            )
        else:
            arrivals = arrivals.model_copy(update=changes)
        changes = {"arrivals": arrivals}
    changed = config.model_copy(update={"workload": workload.model_copy(update=changes)})
    try:
        changed.check()
    except FieldError as error:
        raise ConfigError(str(error)) from error
    return changed

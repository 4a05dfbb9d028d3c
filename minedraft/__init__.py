"""minedraft: batch-parallel speculative decoding from one scheduler core, in simulation and on real devices."""

from minedraft.compiled import activate

BUILD = activate()  # before anything that may be compiled is imported

from minedraft.backend import Backend, Clock
from minedraft.engine import Engine
from minedraft.policy import Mode, Policies, PolicyError, load_policies, load_policy
from minedraft.request import FinishReason, Request, RequestOutput
from minedraft.scheduler import Scheduler
from minedraft.scheduler_config import SchedulerConfig
from minedraft.work import WorldError

__all__ = [
    "BUILD",
    "Backend",
    "Clock",
    "Engine",
    "FinishReason",
    "Mode",
    "Policies",
    "PolicyError",
    "Request",
    "RequestOutput",
    "Scheduler",
    "SchedulerConfig",
    "WorldError",
    "load_policies",
    "load_policy",
]

__version__ = "0.1.0"

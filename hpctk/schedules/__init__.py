"""Collective schedules as data: who sends which part of a tensor to whom, and when.

Pure Python, without MPI and without torch. `build` makes a Plan; an engine runs it (`hpctk.collectives`),
tests prove it for all sizes up to 64, `cost.prices.price` prices it, `core.draw.draw` draws it.
"""

from hpctk.schedules.core.plan import IDLE, Action, Plan, Recv, Round, Send, bounds, even_plan, mirrored
from hpctk.schedules.core.registry import SCHEDULES, Schedule, build, cached_plan
from hpctk.schedules.cost.volume import Phase, Volume

__all__ = [
    "IDLE",
    "SCHEDULES",
    "Action",
    "Phase",
    "Plan",
    "Recv",
    "Round",
    "Schedule",
    "Send",
    "Volume",
    "bounds",
    "build",
    "cached_plan",
    "even_plan",
    "mirrored",
]

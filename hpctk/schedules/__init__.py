"""Collective schedules as data: who sends which part of a tensor to whom, and when.

Pure Python, without MPI and without torch. `build` makes a Plan; an engine runs it (`hpctk.collectives`),
tests prove it for all sizes up to 64, `cost.prices.price` prices it, `core.draw.draw` draws it.
"""

from hpctk.schedules.core.plan import Action, Plan, Recv, Round, Send, bounds
from hpctk.schedules.core.registry import SCHEDULES, build, cached_plan
from hpctk.schedules.cost.volume import Phase, Volume

__all__ = ["SCHEDULES", "Action", "Phase", "Plan", "Recv", "Round", "Send", "Volume", "bounds", "build", "cached_plan"]

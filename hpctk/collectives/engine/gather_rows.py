"""All-gather of a few numbers from each rank: weights, counts, scales, samples, flags."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.comm.collective import collective
from hpctk.comm.world import World
from hpctk.schedules import rotation


@collective
def gather_rows(here: World, mine: Any) -> Any:
    """Return all ranks' rows, one under the other in rank order, as a new array.

    `mine` is a 1-D array of the same length and dtype on every rank.
    """
    everyone = np.empty((here.size, mine.size), mine.dtype)
    everyone[here.rank] = mine
    flat = InPlace(everyone.reshape(-1), mine.itemsize)
    engine_of(here).run(rotation.allgather(here.size), flat, overhead=True)
    return everyone

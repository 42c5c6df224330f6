"""MPI's own all-reduce, as one more schedule: best for a few bytes, a yardstick for the rest.

MPI keeps to itself what it sends, so its bytes cannot be counted; the statistics say so.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hpctk import buffers
from hpctk.buffers import Dtype
from hpctk.world import World

OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX}


def start(world: World, flat: Any, dtype: Dtype, op: str) -> list[MPI.Request]:
    """Start replacing flat host memory of units that MPI knows by their sum (or max) over all ranks.

    Collective over the communicator. In place. Non-blocking, so that the deadline holds.
    """
    datatype = getattr(MPI, dtype.mpi)
    memory = buffers.as_bytes(flat)
    unit_bytes = 4 if dtype.widened else dtype.itemsize // dtype.parts
    return [
        world.data.Iallreduce(
            MPI.IN_PLACE, [memory[lo * unit_bytes : hi * unit_bytes], hi - lo, datatype], OPERATIONS[op]
        )
        for lo, hi in buffers.chunks(len(memory) // unit_bytes)
    ]

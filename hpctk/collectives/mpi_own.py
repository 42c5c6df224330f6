"""MPI's own all-reduce, as one more schedule: best for a few bytes, a yardstick for the rest.

MPI keeps to itself what it sends, so its bytes cannot be counted; the statistics say so.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hpctk import buffers
from hpctk.buffers import DTYPES, Dtype
from hpctk.world import World

OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX}


#: Datatypes by dtype name, for tensors that MPI may sum as they are.
DATATYPES = {
    name: getattr(MPI, dtype.mpi)
    for name, dtype in DTYPES.items()
    if dtype.mpi and not dtype.widened and dtype.parts == 1
}


def allreduce_few(world: World, tensor: Any, dtype: Dtype, op: str) -> bool:
    """Reduce a plain contiguous host tensor in place at once; return False where it is not one.

    Collective over the communicator. The short way for a few bytes, where every call of Python counts.
    """
    if dtype.name not in DATATYPES or buffers.on_device(tensor):
        return False
    if buffers.is_torch(tensor):
        if not tensor.is_contiguous() or tensor.is_neg():
            return False
        tensor = tensor.detach().numpy()
    elif not (tensor.flags.c_contiguous and tensor.flags.writeable):
        return False
    request = world.data.Iallreduce(
        MPI.IN_PLACE, [tensor, tensor.size, DATATYPES[dtype.name]], OPERATIONS[op]
    )
    world.wait((request,), "MPI_Allreduce of a few elements")
    if op == "mean":
        tensor /= world.size
    return True


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

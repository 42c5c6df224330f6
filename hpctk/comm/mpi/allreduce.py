"""MPI's own all-reduce, as one more schedule: best for a few bytes, a yardstick for the rest.

MPI keeps to itself what it sends, so its bytes cannot be counted; the statistics say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpctk.comm import buffers
from hpctk.comm.buffers import DTYPES, Dtype

if TYPE_CHECKING:
    from hpctk.comm.mpi.world import MpiWorld

OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX}


#: Datatypes by dtype name, for tensors that MPI may sum as they are.
DATATYPES = {
    name: getattr(MPI, dtype.mpi)
    for name, dtype in DTYPES.items()
    if dtype.mpi and not dtype.widened and dtype.parts == 1
}


class MpiAllreduce:
    """MPI_Iallreduce on a World's duplicate of the user's communicator."""

    name = "mpi"
    title = "MPI_Allreduce"

    def __init__(self, world: MpiWorld) -> None:
        self._world = world

    def sums(self, dtype: Dtype) -> bool:
        """Return True: all that hpctk sums, in units that MPI knows."""
        return True

    def allreduce_small(self, tensor: Any, dtype: Dtype, op: str) -> bool:
        """Reduce a plain contiguous host tensor in place at once; return False where it is not one.

        Collective over the communicator.
        """
        if dtype.name not in DATATYPES:
            return False
        array = buffers.plain_array(tensor)
        if array is None:
            return False
        with self._world.one_thread:
            request = self._world.data.Iallreduce(
                MPI.IN_PLACE, [array, array.size, DATATYPES[dtype.name]], OPERATIONS[op]
            )
            self._world.wait((request,), "MPI_Allreduce of a few elements")
        if op == "mean":
            array /= self._world.size
        return True

    def start(self, flat: Any, dtype: Dtype, op: str) -> MpiReduction:
        """Start replacing flat host memory of units that MPI knows by their sum (or max) over all ranks.

        Collective over the communicator. In place. Non-blocking, so that the deadline holds.
        """
        datatype = getattr(MPI, dtype.mpi)
        memory = buffers.as_bytes(flat)
        unit_bytes = 4 if dtype.widened else dtype.itemsize // dtype.parts
        with self._world.one_thread:
            requests = [
                self._world.data.Iallreduce(
                    MPI.IN_PLACE, [memory[lo * unit_bytes : hi * unit_bytes], hi - lo, datatype], OPERATIONS[op]
                )
                for lo, hi in buffers.chunks(len(memory) // unit_bytes)
            ]
        return MpiReduction(self._world, requests)


class MpiReduction:
    """MPI's all-reduce under way."""

    def __init__(self, world: MpiWorld, requests: list[MPI.Request]) -> None:
        self._world, self._requests = world, requests

    def done(self) -> bool:
        """Return whether it is complete."""
        with self._world.one_thread:
            return all(request.Test() for request in self._requests)

    def wait(self, operation: str) -> None:
        """Return once it is complete; PeerError at the deadline."""
        with self._world.one_thread:
            self._world.wait(self._requests, operation)

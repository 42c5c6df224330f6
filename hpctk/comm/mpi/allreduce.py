"""MPI's own all-reduce, as one more schedule: best for a few bytes, a yardstick for the rest.

MPI keeps to itself what it sends, so its bytes cannot be counted; the statistics say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpctk.comm import buffers
from hpctk.comm.buffers import DTYPES, Dtype
from hpctk.comm.mpi.guard import GUARD, may_block

if TYPE_CHECKING:
    from hpctk.comm.mpi.world import MpiWorld

#: From this many elements on a call is named after them, for errors.
MANY = 4096
OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX}


#: Datatypes by dtype name, for tensors that MPI may sum as they are.
DATATYPES = {
    name: getattr(MPI, dtype.mpi)
    for name, dtype in DTYPES.items()
    if dtype.mpi and not dtype.widened and dtype.parts == 1
}


class MpiAllreduce:
    """MPI_Allreduce on a World's duplicate of the user's communicator.

    Where nothing else is under way it blocks, guarded by a thread (guard.py): that is up to four times as fast as
    MPI_Iallreduce, polled, which is taken otherwise.
    """

    name = "mpi"
    title = "MPI_Allreduce"

    def __init__(self, world: MpiWorld) -> None:
        self._world, self._data, self._size = world, world.data, world.size
        self._calls, self._one_thread = world.guarded, world.one_thread
        self.blocks = may_block()

    def sums(self, dtype: Dtype, *, at_once: bool) -> bool:
        """Return whether MPI may be asked: what returns at once does not outlive a rank (small_messages.py)."""
        return (at_once and self.blocks) or not self._world.expects_losses

    def allreduce_at_once(self, tensor: Any, dtype: Dtype, op: str) -> bool:
        """Reduce a plain contiguous host tensor in place; return False where it is not one.

        Collective over the communicator. Nothing else may be under way: MPI may block in it.
        """
        datatype = DATATYPES.get(dtype.name)
        if datatype is None:
            return False
        memory: Any
        if isinstance(tensor, np.ndarray):
            flags = tensor.flags
            if not flags.c_contiguous or not flags.writeable:
                return False
            memory, n = tensor, tensor.size
        elif (
            # Elements in host memory in C order, and nothing that only looks like it.
            type(tensor).__module__ == "torch"
            and tensor.is_cpu
            and not tensor.requires_grad
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            n = tensor.numel()
            # An array of numpy's over the same memory would take five times as long to make.
            memory = MPI.memory.fromaddress(tensor.data_ptr(), n * dtype.itemsize)
        else:
            return False
        if n > buffers.COUNT_LIMIT or not self.sums(dtype, at_once=True):
            return False
        with self._one_thread:
            if self.blocks:
                # As GuardedCalls.begin, without calling it.
                calls = self._calls
                calls.number += 1
                calls.operation = "MPI_Allreduce of a few elements" if n < MANY else f"MPI_Allreduce of {n} elements"
                if GUARD.asleep or not calls.watched:
                    GUARD.wake(calls)
                try:
                    self._data.Allreduce(MPI.IN_PLACE, (memory, n, datatype), OPERATIONS[op])
                except MPI.Exception as error:
                    raise calls.failure(error) from error
                finally:
                    calls.operation = None
            else:
                request = self._data.Iallreduce(MPI.IN_PLACE, (memory, n, datatype), OPERATIONS[op])
                self._world.wait((request,), f"MPI_Allreduce of {n} elements")
        if op == "mean" and self._size > 1:
            values = tensor if memory is tensor else np.frombuffer(memory, dtype.name)
            buffers.divide(values, self._size)
        return True

    def start(self, flat: Any, dtype: Dtype, op: str, *, at_once: bool = False) -> MpiReduction:
        """Start replacing flat host memory of units that MPI knows by their sum (or max) over all ranks.

        Collective over the communicator. In place. `at_once` says that nothing else is under way and that the caller
        is going to wait: then MPI may block in it.
        """
        datatype = getattr(MPI, dtype.mpi)
        memory = buffers.as_bytes(flat)
        unit_bytes = 4 if dtype.widened else dtype.itemsize // dtype.parts
        chunks = [
            (memory[lo * unit_bytes : hi * unit_bytes], hi - lo, datatype)
            for lo, hi in buffers.chunks(len(memory) // unit_bytes)
        ]
        with self._world.one_thread:
            if not (at_once and self.blocks):
                requests = [self._data.Iallreduce(MPI.IN_PLACE, chunk, OPERATIONS[op]) for chunk in chunks]
                return MpiReduction(self._world, requests)
            self._calls.begin(f"MPI_Allreduce of {len(memory) // unit_bytes} elements")
            try:
                for chunk in chunks:
                    self._data.Allreduce(MPI.IN_PLACE, chunk, OPERATIONS[op])
            except MPI.Exception as error:
                raise self._calls.failure(error) from error
            finally:
                self._calls.end()
        return MpiReduction(self._world, [])


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
        if self._requests:
            with self._world.one_thread:
                self._world.wait(self._requests, operation)

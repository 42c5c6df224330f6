"""torch.distributed's own all-reduce (gloo's), as one more schedule.

It keeps to itself what it sends, so its bytes cannot be counted; the statistics say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctk.comm import buffers
from hpctk.comm.buffers import Dtype

if TYPE_CHECKING:
    from hpctk.comm.torch.world import TorchWorld

OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
#: What gloo can add of what hpctk moves.
UNITS = ("float32", "float64", "int8", "uint8", "int32", "int64")


class TorchAllreduce:
    """torch.distributed.all_reduce on the gloo group of a World."""

    name = "torch"
    title = "torch.distributed.all_reduce"
    blocks = False

    def __init__(self, world: TorchWorld) -> None:
        self._world = world

    def sums(self, dtype: Dtype, *, at_once: bool) -> bool:
        """Return whether gloo knows the units in which this dtype is summed."""
        return dtype.unit in UNITS

    def allreduce_at_once(self, tensor: Any, dtype: Dtype, op: str) -> bool:
        """Reduce a plain contiguous host tensor in place; return False where it is not one.

        Collective over the communicator.
        """
        if dtype.name not in UNITS:
            return False
        array = buffers.plain_array(tensor)
        if array is None:
            return False
        self.start(array.reshape(-1), dtype, op).wait(f"{self.title} of {array.size} elements")
        if op == "mean":
            array /= self._world.size
        return True

    def start(self, flat: Any, dtype: Dtype, op: str, *, at_once: bool = False) -> TorchReduction:
        """Start replacing flat host memory of units that gloo knows by their sum (or max) over all ranks.

        Collective over the communicator. In place.
        """
        memory = buffers.as_bytes(flat)
        work = None
        if self._world.size > 1 and len(memory):
            units = torch.from_numpy(memory.view(dtype.unit))
            with self._world.one_thread:
                work = self._world.begin(
                    lambda: dist.all_reduce(units, OPERATIONS[op], group=self._world.group, async_op=True)
                )
        return TorchReduction(self._world, work)


class TorchReduction:
    """torch.distributed's all-reduce under way."""

    def __init__(self, world: TorchWorld, work: Any) -> None:
        self._world, self._work = world, work

    def done(self) -> bool:
        """Return whether it is complete."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, operation: str) -> None:
        """Return once it is complete; PeerError at the deadline."""
        if self._work is not None:
            with self._world.one_thread:
                self._world.wait(self._work, operation)
            self._work = None

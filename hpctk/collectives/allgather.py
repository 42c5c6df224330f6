"""All-gather: every rank gets every rank's tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.handle import Handle
from hpctk.collectives.tuning import auto
from hpctk.comm import buffers
from hpctk.comm.collective import collective
from hpctk.comm.world import World, world

if TYPE_CHECKING:
    from hpctk.comm.world import Comm


@collective
def allgather(tensor: Any, *, schedule: str = "auto", comm: Comm | None = None) -> Any:
    """Return the tensors of all ranks, stacked in rank order along a new first dimension.

    Not in place. Any dtype that hpctk moves, bool too.

    Parameters
    ----------
    tensor : torch.Tensor or numpy.ndarray
        The same shape and dtype on every rank.
    schedule : str
        "ring", "rotation" or "auto".
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    return _start(tensor, schedule, comm).wait()


@collective
def iallgather(tensor: Any, *, schedule: str = "auto", comm: Comm | None = None) -> Handle:
    """Start an all-gather and return its Handle."""
    engine_of(world(comm)).overlaps = True
    return _start(tensor, schedule, comm)


def _start(tensor: Any, schedule: str, comm: Comm | None) -> Handle:
    here = world(comm)
    with here.one_thread:
        here.agree("allgather", [*buffers.describe(tensor), ("schedule", schedule)])
        tensor = buffers.native(tensor)
        dtype = buffers.dtype_of(tensor)
        buffers.flatten(tensor)  # refuses what cannot travel, such as sparse tensors
        everyone = _stack(here, tensor)
        flat = here.stager.to_comm(everyone)
        plan = auto.plan_for(here, "allgather", len(flat) * dtype.itemsize, schedule)

        def finish() -> Any:
            here.stager.from_comm(everyone, flat)
            return everyone

        return engine_of(here).handle(plan, InPlace(flat, dtype.itemsize), finish)


def _stack(here: World, tensor: Any) -> Any:
    """Return room for all ranks' tensors, with this rank's in its place."""
    shape = (here.size, *tensor.shape)
    if not buffers.is_torch(tensor):
        everyone = np.empty(shape, tensor.dtype)
        everyone[here.rank] = tensor
        return everyone
    room = tensor.detach().new_empty(shape)
    room[here.rank] = tensor.detach()
    return room

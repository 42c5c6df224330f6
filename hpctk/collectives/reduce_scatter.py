"""Reduce-scatter: every rank gets one shard of the reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctk.collectives.allreduce import prepared
from hpctk.collectives.engine.elements import elements
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.handle import Handle
from hpctk.collectives.tuning import auto
from hpctk.comm import buffers
from hpctk.comm.collective import collective
from hpctk.comm.world import world
from hpctk.schedules import bounds

if TYPE_CHECKING:
    from hpctk.comm.world import Comm


@collective
def reduce_scatter(tensor: Any, *, op: str = "mean", schedule: str = "auto", comm: Comm | None = None) -> Any:
    """Return this rank's shard of the mean, sum or maximum over all ranks, as a new 1-D tensor.

    Not in place. Of n elements in C order rank r of P gets those
    from r*n//P up to (r+1)*n//P.

    Parameters
    ----------
    tensor : torch.Tensor or numpy.ndarray
        The same shape and dtype on every rank.
    op : {"mean", "sum", "max"}
    schedule : str
        "ring", "rotation" or "auto".
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    return _start(tensor, op, schedule, comm).wait()


@collective
def ireduce_scatter(tensor: Any, *, op: str = "mean", schedule: str = "auto", comm: Comm | None = None) -> Handle:
    """Start a reduce-scatter and return its Handle."""
    engine_of(world(comm)).overlaps = True
    return _start(tensor, op, schedule, comm)


def _start(tensor: Any, op: str, schedule: str, comm: Comm | None) -> Handle:
    # The engine works in place: on a copy, of which only the shard is kept.
    here = world(comm)
    with here.one_thread:
        work, dtype = prepared(here, "reduce_scatter", tensor, op, schedule)
        nbytes = dtype.itemsize * (work.numel() if buffers.is_torch(work) else work.size)
        plan = auto.plan_for(here, "reduce_scatter", nbytes, schedule)
        flat = here.stager.to_comm(work)
        lo, hi = bounds(len(flat), plan.blocks, plan.owned(here.rank))

        def finish() -> Any:
            here.stager.from_comm(work, flat)
            shard = buffers.flatten(work)[lo:hi]
            return shard.clone() if buffers.is_torch(shard) else shard.copy()

        return engine_of(here).handle(plan, elements(flat, dtype, op, here.size), finish)

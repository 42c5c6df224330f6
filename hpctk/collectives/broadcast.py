"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.handle import Handle
from hpctk.collectives.tuning import auto
from hpctk.comm import buffers
from hpctk.comm.collective import collective
from hpctk.comm.world import World, world
from hpctk.errors import SettingError

if TYPE_CHECKING:
    import torch

    from hpctk.comm.world import Comm


@collective
def broadcast(tensor: Any, *, root: int = 0, schedule: str = "auto", comm: Comm | None = None) -> Any:
    """Return the root's tensor on every rank, as a new tensor.

    Not in place. Any dtype that hpctk moves, bool too.

    Parameters
    ----------
    tensor : torch.Tensor or numpy.ndarray
        The same shape and dtype on every rank; only the root's values matter.
    root : int
    schedule : str
        "binomial" or "auto".
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    return _start(tensor, root, schedule, comm).wait()


@collective
def ibroadcast(tensor: Any, *, root: int = 0, schedule: str = "auto", comm: Comm | None = None) -> Handle:
    """Start a broadcast and return its Handle."""
    engine_of(world(comm)).overlaps = True
    return _start(tensor, root, schedule, comm)


def _start(tensor: Any, root: int, schedule: str, comm: Comm | None) -> Handle:
    here = world(comm)
    with here.one_thread:
        here.agree("broadcast", [*buffers.describe(tensor), ("root", root), ("schedule", schedule)])
        if not 0 <= root < here.size:
            raise SettingError(f"root={root}: allowed are 0 to {here.size - 1}")
        tensor = buffers.native(tensor)
        dtype = buffers.dtype_of(tensor)
        result = tensor.detach().clone() if buffers.is_torch(tensor) else tensor.copy()
        flat = here.stager.to_comm(result)
        plan = auto.plan_for(here, "broadcast", len(flat) * dtype.itemsize, schedule, root)

        def finish() -> Any:
            here.stager.from_comm(result, flat)
            return result

        return engine_of(here).handle(plan, InPlace(flat, dtype.itemsize), finish)


@collective
def broadcast_in_place(here: World, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Overwrite tensors, which all ranks know to be alike, by the root's; those of one dtype travel as one.

    In place.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        fused = alike[0].new_empty(sum(tensor.numel() for tensor in alike))
        parts = [
            part.view(tensor.shape) for part, tensor in zip(fused.split([t.numel() for t in alike]), alike, strict=True)
        ]
        for part, tensor in zip(parts, alike, strict=True):
            part.copy_(tensor)
        group = here.device_group(fused) if here.size > 1 else None
        if group is not None:
            group.broadcast(fused, root, f"the broadcast of {len(alike)} tensors")
        else:
            flat = here.stager.to_comm(fused)
            itemsize = fused.element_size()
            plan = auto.plan_for(here, "broadcast", fused.numel() * itemsize, "auto", root)
            with engine_of(here).span(f"{len(alike)} tensors"):
                engine_of(here).run(plan, InPlace(flat, itemsize))
            here.stager.from_comm(fused, flat)
        for part, tensor in zip(parts, alike, strict=True):
            tensor.copy_(part)

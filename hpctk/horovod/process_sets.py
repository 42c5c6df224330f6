"""The MPI communicator of the ranks that Horovod lets work together."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hpctk.errors import SettingError

#: Communicators of process sets, by their ranks: made once, so that all that serves a set shares one World.
_made: dict[tuple[int, tuple[int, ...]], MPI.Intracomm] = {}


def communicator(hvd: Any, process_set: Any, comm: MPI.Intracomm | None) -> MPI.Intracomm | None:
    """Return the communicator of a process set, None on a rank that is not in it.

    Collective over the set at its first call.

    Parameters
    ----------
    hvd : module
        horovod.torch.
    process_set : hvd.ProcessSet or None
        None stands for all ranks.
    comm : MPI.Intracomm or None
        What Horovod was initialised with; where not given, what Horovod says that was, else COMM_WORLD.
    """
    whole = comm or getattr(hvd.global_process_set, "mpi_comm", None) or MPI.COMM_WORLD
    if hvd.is_initialized() and hvd.size() != whole.Get_size():
        raise SettingError(
            f"Horovod runs on {hvd.size()} ranks, the communicator has {whole.Get_size()}: give comm= the communicator "
            "that hvd.init() was given"
        )
    if process_set is None or process_set.process_set_id == 0:
        return whole
    if process_set.process_set_id is None:
        raise SettingError(
            f"process_set={process_set}: Horovod does not know it; give it to hvd.init(process_sets=[...]) or to "
            "hvd.add_process_set first"
        )
    ranks = tuple(process_set.ranks)
    if whole.Get_rank() not in ranks:
        return None
    key = whole.py2f(), ranks
    if key not in _made:
        group = whole.Get_group()
        _made[key] = whole.Create_group(group.Incl(ranks))
        group.Free()
    return _made[key]

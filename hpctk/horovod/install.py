"""What hpctk.horovod needs of an installation, and what it says where that is missing."""

from __future__ import annotations

import importlib
from typing import Any

from hpctk.comm.mpi.library import thread_level
from hpctk.errors import HpctkError


def horovod() -> Any:
    """Return the module horovod.torch; raise HpctkError that says what is needed where it cannot serve."""
    # MPI first: it must be running with THREAD_MULTIPLE before Horovod starts threads on it.
    check_threads()
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError as error:
        raise HpctkError(
            f"hpctk.horovod needs Horovod, which cannot be imported ({error}). `hpctk setup horovod` builds it. "
            "Everything but hpctk.horovod works without."
        ) from error
    check_built(hvd)
    return hvd


def check_threads() -> None:
    """Raise HpctkError unless several threads may call MPI at once."""
    level = thread_level()
    if level != "MULTIPLE":
        raise HpctkError(
            f"MPI was started with THREAD_{level}, but Horovod's thread and hpctk call it at the same time and "
            "need THREAD_MULTIPLE. Leave mpi4py.rc.thread_level alone (its default is 'multiple'), import mpi4py "
            "before anything that starts MPI by itself, and use an MPI that was built with threads."
        )


def check_built(hvd: Any) -> None:
    """Raise HpctkError unless this Horovod runs over MPI."""
    if not hvd.mpi_built():
        raise HpctkError(
            "this Horovod was built without MPI, over which hpctk moves its data: rebuild it with HOROVOD_WITH_MPI=1 "
            "(`hpctk setup horovod` does)"
        )
    if hvd.is_initialized() and not hvd.mpi_enabled():
        raise HpctkError(
            "Horovod runs over Gloo here, but hpctk moves its data over MPI: start the ranks with mpirun, srun or "
            "`horovodrun --mpi`, and leave HOROVOD_CONTROLLER and HOROVOD_CPU_OPERATIONS unset or 'mpi'"
        )

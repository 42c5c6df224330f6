"""The end of a job by MPI_Abort: one rank after the other, where the job is to outlive ranks.

Under `mpirun --with-ft ulfm` of Open MPI 5.0 ranks that call MPI_Abort at the same moment, as all do that raise the
same error, may end nothing: of 12 jobs of two ranks 6 did not end, whatever signal mpirun got, and one ended with
status 0. With 10 ms or more between the calls 48 of 48 ended as they should. So each rank waits for its turn, the first
for none: that ends the others meanwhile.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable

from mpi4py import MPI

from hpctk.comm import postmortem

#: What Open MPI tells its processes where communicators can be revoked.
FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
#: Seconds between two turns, and to the last one: who has failed alone must not wait for long.
TURN_S, LAST_S = 0.1, 3.2

#: What mpi4py is told by; the status with which it is going to abort the job.
_tell: list[Callable[[int], None]] = []
_aborting = 0


def fault_tolerant() -> bool:
    """Return whether the job was started such that MPI outlives a rank (`mpirun --with-ft ulfm`)."""
    return os.environ.get(FAULT_TOLERANCE, "").lower() in ("1", "true", "yes", "enabled")


def abort_job(status: int = 1) -> None:
    """End the job, in turn."""
    wait_for_turn()
    MPI.COMM_WORLD.Abort(status)


def wait_for_turn() -> None:
    """Return when this rank may abort the job."""
    if fault_tolerant() and MPI.Is_initialized() and not MPI.Is_finalized():
        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        # Of so many that turns are short the first one, at least, is by itself.
        time.sleep(max(TURN_S, rank * min(TURN_S, LAST_S / size)) if rank else 0)


def note_status() -> None:
    """Take note, from now on, of the status with which mpi4py is going to abort the job; let it do so in turn."""
    if not _tell:
        _tell.append(MPI._set_abort_status)
        MPI._set_abort_status = _tell_status
        # mpi4py aborts once Python has come to its end.
        atexit.register(_at_exit)


def aborting() -> bool:
    """Return whether mpi4py is going to abort the job."""
    return _aborting != 0


def _tell_status(status: int) -> None:
    global _aborting
    _aborting = status
    postmortem.leave_with(status)
    _tell[-1](status)


def _at_exit() -> None:
    if _aborting:
        wait_for_turn()

"""The ranks that live: what they decide together, and communicators of theirs, by MPI's fault tolerance (ULFM).

MPI_Comm_agree gives all ranks that live the same answer, whoever dies meanwhile, also on a communicator that was
revoked. So a rank that has failed in a collective revokes it, which gets all others out, and comes to the agreement,
too; if that says no, all ranks shrink. Both block in MPI: a thread ends the job where that lasts too long.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from mpi4py import MPI

from hpctk.comm import postmortem
from hpctk.comm.mpi.watchdog import NAP_S
from hpctk.errors import PeerError

#: Seconds between two looks at what blocks.
LOOK_S = 0.5
#: Seconds that MPI has to come to its end once ranks were lost.
FINALIZE_S = 2.0


def agreed(comm: MPI.Intracomm, mine: bool) -> bool:
    """Return whether all that live say yes, and none is known to be lost: the same on all of them. Collective."""
    try:
        return bool(comm.Agree(int(mine)))
    except MPI.Exception:
        return False


def meet_survivors(comm: MPI.Intracomm) -> tuple[MPI.Intracomm, MPI.Intracomm, MPI.Intracomm]:
    """Return three communicators of the ranks of `comm` that live. Collective over them.

    Ranks may be lost meanwhile: then those that are left begin anew, all of them. Open MPI 5.0 has no MPI_Comm_ishrink
    that works, so that this blocks.
    """
    while True:
        fresh = cast("MPI.Intracomm", comm.Shrink())
        fresh.Set_errhandler(MPI.ERRORS_RETURN)
        copies: list[MPI.Intracomm] = []
        try:
            while len(copies) < 2:
                copies.append(_copy_or_fail(fresh))
        except (MPI.Exception, PeerError):
            fresh.Revoke()
        if agreed(fresh, len(copies) == 2):
            return fresh, copies[0], copies[1]
        for lost in (fresh, *copies):
            lost.Revoke()
        comm = fresh


def _copy_or_fail(comm: MPI.Intracomm) -> MPI.Intracomm:
    copy, request = comm.Idup()
    while not request.Test():
        if comm.Is_revoked() or comm.Get_failed().Get_size():
            raise PeerError("a rank was lost while the others met")
        time.sleep(NAP_S)
    return copy


def finalize() -> None:
    """Finalize MPI after ranks were lost, once all that live leave; end the process where MPI does not come back.

    Open MPI 5.0 meets once more in MPI_Finalize, and now and then waits there for the lost ones.
    """

    def end() -> None:
        # What Python would do now: close files, such as those of statistics.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(postmortem.status())

    if postmortem.status():
        # mpi4py aborts the job with it.
        return
    timer = threading.Timer(FINALIZE_S, end)
    timer.daemon = True
    timer.start()
    # Not by mpi4py, which lets no other thread run meanwhile.
    ctypes.CDLL(MPI.__file__).MPI_Finalize()
    timer.cancel()


def note_status() -> None:
    """Take note, from now on, of the status with which mpi4py is going to abort the job."""
    told = MPI._set_abort_status
    if told is not _tell_status:
        _told.append(told)
        MPI._set_abort_status = _tell_status


#: How mpi4py is told.
_told: list[Callable[[int], None]] = []


def _tell_status(status: int) -> None:
    postmortem.leave_with(status)
    _told[-1](status)


@contextmanager
def time_limit(seconds: float, operation: str) -> Iterator[None]:
    """Abort the job where what is inside, which blocks in MPI, lasts longer than ranks wait for each other."""

    def end() -> None:
        sys.stderr.write(
            f"hpctk: rank {MPI.COMM_WORLD.Get_rank()} ends the job: it waited {seconds:g} s in {operation}. "
            "HPCTK_TIMEOUT_S sets how long to wait.\n"
        )
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)

    LIMIT.begin(seconds, end)
    try:
        yield
    finally:
        LIMIT.end()


class _Limit:
    """A thread that calls what it was given, unless it is told in time that this is not needed.

    To begin and to end costs a store each: the thread looks now and then.
    """

    def __init__(self) -> None:
        self._due: tuple[float, Callable[[], None]] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float, end: Callable[[], None]) -> None:
        """Call `end` after so many seconds."""
        self._due = (seconds, end)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hpctk time limit", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Do not."""
        self._due = None

    def _work(self) -> None:
        seen: tuple[float, Callable[[], None]] | None = None
        since = 0.0
        while True:
            time.sleep(LOOK_S)
            due = self._due
            if due is None or due is not seen:
                seen, since = due, time.monotonic()
            elif time.monotonic() - since > due[0]:
                due[1]()
                return


LIMIT = _Limit()

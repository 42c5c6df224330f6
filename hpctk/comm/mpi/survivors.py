"""The ranks that live: what they decide together, and communicators of theirs, by MPI's fault tolerance (ULFM).

MPI_Comm_agree gives all ranks that live the same answer, whoever dies meanwhile, also on a communicator that was
revoked. So a rank that has failed in a collective revokes it, which gets all others out, and comes to the agreement,
too; if that says no, all ranks shrink. Both block in MPI: a thread ends the job where that lasts too long. Where the
ranks share memory they agree there (shared_decisions.py).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from types import TracebackType
from typing import cast

from mpi4py import MPI

from hpctk.comm import postmortem
from hpctk.comm.mpi.abort import abort_job, aborting

#: Seconds between two looks at what blocks.
LOOK_S = 0.5
#: Seconds that MPI has to come to its end once ranks were lost.
FINALIZE_S = 2.0
#: Seconds without a further loss before those that are left make a communicator.
SETTLE_S = 0.02


def agreed(comm: MPI.Intracomm, mine: int) -> int:
    """Return the bits that all ranks have in common, 0 where one is lost: the same on all who live.

    Collective over the communicator. Twice: where a rank is lost meanwhile, Open MPI 5.0 says so to some of the others
    only. The bits of those who live are the same on all of them in any case.
    """
    bits, complete = _common_bits(comm, mine)
    return bits if _common_bits(comm, int(complete))[0] else 0


def _common_bits(comm: MPI.Intracomm, mine: int) -> tuple[int, bool]:
    """Return the bits that all who live have in common, and whether MPI has said that none is lost.

    Not by mpi4py, which returns no bits where it has.
    """
    bits = ctypes.c_int(mine)
    code = _library().MPIX_Comm_agree(ctypes.c_void_p(MPI._handleof(comm)), ctypes.byref(bits))
    return bits.value, code == MPI.SUCCESS


def completed(comm: MPI.Comm, requests: Sequence[MPI.Request]) -> list[int]:
    """Return the positions of the requests that are complete now; for ranks that outlive others on `comm`.

    Where that was revoked MPI.Exception says so, and no request is looked at: Open MPI 5.0 would give up and free a
    send that is under way, and end the process ("Send error after request freed") once the peer, which lives, has
    taken the message. MPI_Testsome does not look again once it has let MPI go on, as MPI_Test does; what it learns
    meanwhile is seen here before the next look.
    """
    if comm.Is_revoked():
        raise MPI.Exception(MPI.ERR_REVOKED)
    found = MPI.Request.Testsome(requests)
    # None is active any more.
    return list(range(len(requests))) if found is None else found


def settle(lost: Callable[[], Collection[int]]) -> None:
    """Return once no more ranks have been lost for a while.

    Open MPI 5.0 ends a process by a segmentation fault that hears of a loss while it makes a communicator, which takes
    a fraction of a millisecond. Losses seldom come alone: a host's come one after the other.
    """
    known, until = -1, 0.0
    while (number := len(lost())) != known or time.monotonic() < until:
        if number != known:
            known, until = number, time.monotonic() + SETTLE_S
        time.sleep(SETTLE_S / 20)


def meet_survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks of `comm` that live. Collective over them.

    Of one that is lost meanwhile those that are left hear when they use it. Open MPI 5.0 has no MPI_Comm_ishrink that
    works, so that this blocks.
    """
    made = _of_the_living(comm)
    # Nobody may revoke it before all have it.
    _common_bits(made, 1)
    return made


def _of_the_living(comm: MPI.Intracomm) -> MPI.Intracomm:
    made = cast("MPI.Intracomm", comm.Shrink())
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(MPI.__file__)


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

    if aborting():
        return
    timer = threading.Timer(FINALIZE_S, end)
    timer.daemon = True
    timer.start()
    # Not by mpi4py, which lets no other thread run meanwhile.
    _library().MPI_Finalize()
    timer.cancel()


class TimeLimit:
    """A context that aborts the job where what is inside, which blocks in MPI, lasts longer than ranks wait.

    To enter and to leave costs a store each, as this is done in every step: a thread looks now and then.

    Parameters
    ----------
    seconds : float
    operation : str
        What is inside.
    """

    __slots__ = ("_operation", "seconds")

    def __init__(self, seconds: float, operation: str) -> None:
        self.seconds, self._operation = seconds, operation

    def __enter__(self) -> None:
        WATCH.inside = self
        if not WATCH.started:
            WATCH.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        WATCH.inside = None

    def end_job(self) -> None:
        """Say what took too long, and abort the job."""
        sys.stderr.write(
            f"hpctk: rank {MPI.COMM_WORLD.Get_rank()} ends the job: it waited {self.seconds:g} s in {self._operation}. "
            "HPCTK_TIMEOUT_S sets how long to wait.\n"
        )
        sys.stderr.flush()
        abort_job()


class _Watch:
    """A thread that looks whether a TimeLimit is over."""

    def __init__(self) -> None:
        self.inside: TimeLimit | None = None
        self.started = False

    def start(self) -> None:
        """Look from now on."""
        self.started = True
        threading.Thread(target=self._work, name="hpctk time limit", daemon=True).start()

    def _work(self) -> None:
        seen: TimeLimit | None = None
        since = 0.0
        while True:
            time.sleep(LOOK_S)
            inside = self.inside
            if inside is None or inside is not seen:
                seen, since = inside, time.monotonic()
            elif time.monotonic() - since > inside.seconds:
                inside.end_job()
                return


WATCH = _Watch()

"""A process that was forked off a rank is no rank: at its exit it leaves alone what is the rank's.

Python runs the rank's exit functions in such a child, too, and mpi4py has MPI_Finalize called there: it takes messages
that are the rank's and waits for the other ranks, and the job hangs. So a child leaves as those of multiprocessing do:
exit functions from before the fork are the rank's and do not run, nor does MPI_Finalize; standard output and standard
error are flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any, NoReturn

#: The process that is a rank; 0 before there is one.
_rank_pid = 0
#: What a child exits with, and the exception that its rank had last shown before the fork.
_status = 0
_shown_before: BaseException | None = None


def guard() -> None:
    """Make this process a rank: from now on what is forked off it leaves quietly."""
    global _rank_pid
    if not _rank_pid:
        os.register_at_fork(after_in_child=_in_child)
    _rank_pid = _rank_pid or os.getpid()


def is_child() -> bool:
    """Return whether this process was forked off a rank."""
    return _rank_pid not in (0, os.getpid())


def _in_child() -> None:
    global _status, _shown_before
    _status, _shown_before = 0, getattr(sys, "last_value", None)
    raising = sys.exit

    def leave(status: Any = None, /) -> NoReturn:
        _note(status)
        raising(status)

    # Exit functions are not told the status. Nobody else notes it without an exception.
    sys.exit = leave
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        # Told of an error by `python -m mpi4py` and `hpctk run`, to abort the job: a child's error does not.
        mpi._set_abort_status = _note  # type: ignore[attr-defined]
    # Runs after the child's own exit functions and before the rank's, which it never comes to.
    atexit.register(_leave)


def _note(status: Any) -> None:
    global _status
    _status = status & 0xFF if isinstance(status, int) else int(status is not None)


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # Closed, or gone, or a pipe that nobody reads.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    raised = getattr(sys, "last_value", None) is not _shown_before
    os._exit(_status or int(raised))

"""What a failing rank leaves behind: a traceback with its rank on top, also of a rank that is stuck.

A rank that never arrives cannot report itself. Its neighbours on the same machine can make it:
every rank registers a C-level handler (faulthandler) for one real-time signal, which prints where
each thread is, even when Python itself no longer runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType

from hpctk.comm import forked

DUMP_SIGNAL = signal.SIGRTMIN + 7
#: Seconds the stuck process has to print before the job is ended.
DUMP_S = 0.5


@dataclass(frozen=True)
class Process:
    """A process, told apart from another that may have got the same pid later or in another container."""

    pid: int
    namespace: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has `pid` now; zeros where the system does not tell."""
        try:
            namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
            start = int(fields[19])
        except (OSError, IndexError, ValueError):
            return cls(pid, 0, 0)
        if fields[0] in "ZX":
            # Ended, but nobody has asked for its exit status yet.
            return cls(pid, 0, 0)
        return cls(pid, namespace, start)

    def is_alive(self) -> bool:
        """Return whether this very process still runs where we can see it."""
        return self.start_ticks != 0 and Process.of(self.pid) == self


#: "rank 1 of 4 on host (pid 123)", known once this process has joined a world of several ranks.
_who = ""
_status = 0


def watch(rank: int, size: int) -> None:
    """Put the rank above this process's uncaught exceptions, and let neighbours ask for its traceback."""
    global _who
    if _who:
        return
    _who = f"rank {rank} of {size} on {socket.gethostname()} (pid {os.getpid()})"
    # Straight to file descriptor 2: whoever replaced sys.stderr need not work any more.
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True, chain=False)
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(f"hpctk: {_this_process()} raised:\n")
        previous(kind, error, trace)

    sys.excepthook = report


def report_exit(leaving: SystemExit) -> None:
    """Show where a rank called sys.exit with an error, which Python itself does not."""
    sys.stderr.write(f"hpctk: {_this_process()} left with sys.exit:\n")
    traceback.print_exception(leaving)


def _this_process() -> str:
    return f"a process forked off {_who}" if forked.is_child() and _who else _who or "this process"


def show_stuck(processes: dict[int, Process]) -> None:
    """Make the given ranks' processes on this machine print where they are; wait until they had time to."""
    asked = False
    for rank, process in processes.items():
        if not process.is_alive():
            continue
        sys.stderr.write(f"hpctk: rank {rank} (pid {process.pid}) is stuck here:\n")
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            os.kill(process.pid, DUMP_SIGNAL)
            asked = True
    if asked:
        time.sleep(DUMP_S)


def leave_with(status: int) -> None:
    """Take note of the status that this process is going to end with."""
    global _status
    _status = status


def status() -> int:
    """Return the status that this process ends with, as far as that can be known at exit."""
    return _status or int(getattr(sys, "last_value", None) is not None)


def reason_for_leaving() -> str:
    """Return why this process ends, for the ranks it leaves behind."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "has left the program"
    return f"has left the program with {type(error).__name__}: {error}"

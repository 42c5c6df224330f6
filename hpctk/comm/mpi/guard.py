"""A thread that watches over MPI calls that block: no rank waits forever in one of them, either.

A call that blocks in MPI is faster than one that is polled, but Python cannot look up from it. So a rank says what it
is about to wait in, and a thread of the process, the guard, looks at that every TICK_S. Of a call that has lasted
since its last look it does what a rank does that polls: it answers the questions of others, asks its own, and finds
out at the deadline, or once a peer has left, that the wait is in vain (watchdog.py). Then it ends the call:

- where the job was started with fault tolerance (`mpirun --with-ft ulfm`) it revokes the communicator. The call
  returns with an error, which becomes the PeerError that a polled wait raises;
- otherwise nothing gets the rank out of MPI: the guard prints what PeerError says, and aborts the job.

A rank that is interrupted (SIGINT) in such a call cannot raise KeyboardInterrupt before the others come, perhaps never.
The guard sees the signal by Python's wake-up descriptor (interrupt.py); a call that goes on for INTERRUPT_S after it is
ended in the same two ways, unless the program handles SIGINT itself.

Saying so costs two stores: the guard is not woken, and takes the time itself at its first look, so that deadlines are
up to TICK_S late. Without MPI_THREAD_MULTIPLE there is no guard, and no call may block.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from typing import TYPE_CHECKING

from mpi4py import MPI

from hpctk.comm.mpi.abort import abort_job, fault_tolerant
from hpctk.comm.mpi.interrupt import INTERRUPT
from hpctk.comm.mpi.watchdog import ONE_IN_MPI
from hpctk.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctk.comm.agreement import OneThread
    from hpctk.comm.mpi.watchdog import Waiter, Watchdog

#: Seconds between two looks.
TICK_S = 0.05
#: Looks without a call before the guard sleeps until it is woken.
IDLE_TICKS = 40
#: Seconds that a call may take to end by itself after the rank was interrupted.
INTERRUPT_S = 1.0


def may_block() -> bool:
    """Return whether calls may block: another thread must be able to use MPI meanwhile."""
    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


class GuardedCalls:
    """The calls on one communicator that block, one at a time.

    Parameters
    ----------
    comm : MPI.Comm
        What they are made on, and what is revoked.
    watchdog : Watchdog
        Of the same ranks.
    named : callable
        Returns how to name an operation in errors.
    one_thread : OneThread
        Held by the thread that makes them.

    Attributes
    ----------
    number : int
        Calls so far. Whoever makes one adds 1, then sets `operation`, and sets that to None in the end.
    operation : str or None
        What is under way.
    """

    operation: str | None

    def __init__(self, comm: MPI.Comm, watchdog: Watchdog, named: Callable[[str], str], one_thread: OneThread) -> None:
        self._comm, self._watchdog, self._named, self._one_thread = comm, watchdog, named, one_thread
        self.number, self.operation = 0, None
        #: Whether the guard knows of these calls.
        self.watched = False
        self._seen = 0
        self._waiter: Waiter | None = None
        #: When this rank was interrupted in the call under way.
        self._interrupted: float | None = None
        self._error: PeerError | None = None

    def begin(self, operation: str) -> None:
        """Say that a call begins that may block; `end` must follow in any case."""
        self.number += 1
        self.operation = operation
        if GUARD.asleep or not self.watched:
            GUARD.wake(self)

    def end(self) -> None:
        """Say that it is over."""
        self.operation = None

    def failure(self, error: MPI.Exception) -> PeerError:
        """Return what to raise where MPI ended the call with an error; let it end on the other ranks, too."""
        if self._error is not None:
            return self._error
        if fault_tolerant():
            self._comm.Revoke()
        return self._watchdog.failure(error, self._named(self.operation or "a collective"))

    def look(self, now: float, *, interrupted: bool = False) -> bool:
        """See to a call that has lasted since the last look; return whether there was any since. The guard's thread.

        `interrupted` says that the rank was since the last look.
        """
        number, operation = self.number, self.operation
        if number != self._seen:
            self._seen, self._waiter, self._interrupted = number, None, None
        elif not interrupted:
            return self._look_again(number, operation, now)
        # Not of a call that begins later: the program has raised KeyboardInterrupt then, and knows.
        if interrupted and operation is not None:
            self._interrupted = now
        return True

    def _look_again(self, number: int, operation: str | None, now: float) -> bool:
        if operation is None or self._error is not None:
            return operation is not None
        if self._interrupted is not None and now - self._interrupted > INTERRUPT_S:
            self._end_call(
                PeerError(
                    f"rank {self._watchdog.rank} of {self._watchdog.size} was interrupted (SIGINT) while it waited in "
                    f"{self._named(operation)}"
                )
            )
            return True
        if self._waiter is None:
            self._waiter = self._watchdog.waiter(self._named(operation))
        try:
            self._waiter.look(now, going_on=lambda: self.operation is not None and self.number == number)
        except PeerError as error:
            if self.operation is not None and self.number == number:
                self._end_call(error)
        return True

    def _end_call(self, error: PeerError) -> None:
        if fault_tolerant():
            self._error = error
            with ONE_IN_MPI:
                self._comm.Revoke()
            return
        lines = [f"hpctk: rank {self._watchdog.rank} of {self._watchdog.size} ends the job:\n"]
        frame = sys._current_frames().get(self._one_thread.holder)
        if frame is not None:
            lines += ["Traceback (most recent call last):\n", *traceback.format_stack(frame)]
        # In one piece: other ranks write at the same time.
        sys.stderr.write("".join([*lines, f"{PeerError.__module__}.PeerError: {error}\n"]))
        sys.stderr.flush()
        abort_job()


class Guard:
    """The thread. One for the process, started at the first call."""

    def __init__(self) -> None:
        #: Whether a call must wake it.
        self.asleep = True
        self._calls: weakref.WeakSet[GuardedCalls] = weakref.WeakSet()
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wake(self, calls: GuardedCalls) -> None:
        """Look after a call that begins while the guard is asleep, or has not been started yet."""
        calls.watched = True
        with self._lock:
            self._calls.add(calls)
            if self._thread is None:
                INTERRUPT.watch()
                self._thread = threading.Thread(target=self._work, name="hpctk guard", daemon=True)
                self._thread.start()
        self.asleep = False
        self._awake.set()

    def _work(self) -> None:
        idle = 0
        while not MPI.Is_finalized():
            time.sleep(TICK_S)
            with self._lock:
                calls = list(self._calls)
            now = time.monotonic()
            interrupted = INTERRUPT.seen()
            # Of all of them: one that was not looked at would have its time begin late.
            busy = [one.look(now, interrupted=interrupted) for one in calls]
            idle = 0 if any(busy) else idle + 1
            del calls
            if idle >= IDLE_TICKS:
                self._sleep()
                idle = 0

    def _sleep(self) -> None:
        self._awake.clear()
        self.asleep = True
        # A call may have begun before it could see that.
        if not any(one.operation is not None for one in list(self._calls)):
            self._awake.wait()
        # An interrupt that came meanwhile came in no call.
        INTERRUPT.seen()
        self.asleep = False


GUARD = Guard()

"""One thread at a time in a communicator's collectives: two at once would mix up their messages, or crash.

Different threads at different times are fine, and so is the thread of ddp/driver.py, which steps in only while nobody
else is there and for whom others wait a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident
from types import TracebackType

from hpctk.errors import HpctkError

#: Seconds between two looks whether the driver is through.
NAP_S = 2e-5


class OneThread:
    """Held by whoever uses a communicator, as a context; the same thread may enter it again.

    Where another thread is inside, entering raises HpctkError.

    Parameters
    ----------
    own : str
        How a thread gets a communicator of its own.
    """

    # No lock: acquiring and releasing one takes longer than all of this, in calls that are made of several. Nor is one
    # needed: Python switches threads at calls and jumps back, and there is neither between a look and what follows it.
    __slots__ = ("_depth", "_driving", "_own", "_thread")

    def __init__(self, own: str = "comm.Dup()") -> None:
        self._own = own
        #: Of the thread inside, 0 where there is none; how often it has entered.
        self._thread = self._depth = 0
        self._driving = False

    def __enter__(self) -> None:
        me = get_ident()
        if self._thread == me:
            self._depth += 1
        elif not self._thread:
            self._thread, self._depth = me, 1
        else:
            self._enter_late()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = 0

    def _enter_late(self) -> None:
        while self._thread:
            if not self._driving:
                raise HpctkError(
                    f"two threads use one communicator at once: give each thread its own, {self._own} "
                    f"(this is thread {threading.current_thread().name!r})"
                )
            time.sleep(NAP_S)
        self.__enter__()

    def drive(self, work: Callable[[], bool]) -> bool:
        """Do what takes a moment, in a thread of hpctk's own; return what it does, False where others are there."""
        me = get_ident()
        if self._thread:
            return False
        self._thread, self._depth, self._driving = me, 1, True
        try:
            return work()
        finally:
            self._depth, self._driving, self._thread = 0, False, 0

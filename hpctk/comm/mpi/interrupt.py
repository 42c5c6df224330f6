"""Whether this rank was interrupted (SIGINT, Ctrl-C) while its main thread cannot say so.

Python raises KeyboardInterrupt in the main thread, once that is back from the call it is in. What another thread sees
of a signal is a byte in a pipe, which Python writes at once (signal.set_wakeup_fd). There is one such descriptor for a
process: where somebody else has it, asyncio for instance, it is left to them, and interrupts are seen late.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress


class Interrupt:
    """What another thread sees of SIGINT. One for the process."""

    def __init__(self) -> None:
        self._pipe = -1

    def watch(self) -> None:
        """Look at signals from now on. Only the main thread can begin with that; another one does nothing."""
        if self._pipe >= 0 or threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        for end in (reading, writing):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._pipe = reading
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        # A child's signals are not this rank's.
        self._pipe = -1
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)

    def seen(self) -> bool:
        """Return whether there was one since the last look that is to end what the program does."""
        if self._pipe < 0:
            return False
        with suppress(BlockingIOError):
            return signal.SIGINT in os.read(self._pipe, 4096) and is_pythons_own()
        return False


def is_pythons_own() -> bool:
    """Return whether SIGINT raises KeyboardInterrupt: a handler of the program's may mean to go on."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPT = Interrupt()

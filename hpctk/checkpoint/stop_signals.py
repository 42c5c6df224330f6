"""Signals that ask a training to save and stop: heard at once, acted on at a step boundary.

Python runs no handler inside a blocking call of MPI, and a rank that stopped alone would leave the others waiting:
so a handler only takes note.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

#: What Slurm's templates send (NCCL has taken USR1), and what everyone else sends.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopSignals:
    """Listens for SIGTERM and SIGUSR2.

    Attributes
    ----------
    heard : int
        The number of the first signal that came, 0 before.
    """

    def __init__(self) -> None:
        self.heard = 0
        self._before = {}
        # Elsewhere Python allows no handlers; then only the other ranks can be told to stop.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or number
        # Who asks twice does not want to wait for a step to end.
        self.close()

    def close(self) -> None:
        """Let the signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}


def name(number: int) -> str:
    """Return a signal's name."""
    return signal.Signals(number).name

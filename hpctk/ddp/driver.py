"""A thread that lets collectives make progress while the program computes.

An engine is not made for two threads: whoever works with it meanwhile holds the driver's lock.
"""

from __future__ import annotations

import atexit
import threading
import time

from hpctk.collectives.engine.engine import Engine
from hpctk.errors import HpctkError

#: Seconds between two looks where nothing has come: often enough for a network, seldom enough for the program.
NAP_S = 2e-4


class Driver:
    """Drives an engine between `start` and `stop`; both may be called at any time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Let the engine be driven from now on."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._drive, name="hpctk driver", daemon=True)
            self._thread.start()
            # Python ends daemon threads where they next want the GIL. Inside torch that takes the process down.
            atexit.register(self.stop)

    def stop(self) -> None:
        """Return when the engine is left alone."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            atexit.unregister(self.stop)

    def _drive(self) -> None:
        while not self._stopping.is_set():
            try:
                with self.lock:
                    moved = self._engine.one_thread.drive(self._engine.progress)
            except HpctkError:
                # Whoever waits for the collective is told: a message that has failed stays first in its plan.
                return
            if not moved:
                time.sleep(NAP_S)

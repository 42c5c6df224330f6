"""Yes or no by all ranks of a node, the same on all of them, in memory that outlives each of them.

Every decision has a number. A rank that says yes raises its counter DONE to that number, and the answer is yes once all
counters are there, also those of ranks that are dead by then. It is no once one of them will never be: its rank has
died below the number, or has raised NOT_DONE to it. Both are for good, so whoever finds out one, nobody finds out the
other. Nobody needs an answer of the others to go on: this takes a microsecond or two, where MPI_Comm_agree takes ten.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

from hpctk.comm.shared_window import DONE, NOT_DONE, SharedWindow

#: Seconds before the first pause, between two pauses, and between two looks for lost ranks.
SPIN_S, NAP_S, LOOK_S = 1e-3, 5e-5, 1e-3
#: Looks before the core is offered to others for the first time.
LOOKS = 8


class SharedDecisions:
    """The decisions of the ranks that share a window.

    Parameters
    ----------
    window : SharedWindow
    lost : callable
        Returns the ranks, as the World counts them, that are known to be dead.
    """

    def __init__(self, window: SharedWindow, lost: Callable[[], Collection[int]]) -> None:
        self._window, self._lost, self._number = window, lost, 0

    def decide(self, *, done: bool) -> bool:
        """Return whether all ranks are `done`. Collective over those that live.

        Where the answer is no there are no further decisions of these ranks.
        """
        self._number += 1
        if done:
            self._window.advance(DONE, self._number)
            if self._all_done():
                return True
        self._window.advance(NOT_DONE, self._number)
        return False

    def _all_done(self) -> bool:
        """Return whether all ranks have said yes, once it is known."""
        window, number = self._window, self._number
        looks, began, next_look = 0, 0.0, 0.0
        while not window.reached(DONE, number):
            looks += 1
            if looks < LOOKS:
                continue
            now = time.monotonic()
            began = began or now
            next_look = next_look or now + LOOK_S
            if now >= next_look:
                if self._in_vain():
                    return False
                next_look = now + LOOK_S
            if now < began + SPIN_S:
                os.sched_yield()
            else:
                time.sleep(NAP_S)
        return True

    def _in_vain(self) -> bool:
        """Return whether some rank will never say yes."""
        window, number = self._window, self._number
        # Not one that is higher: its rank has seen this decision through, and all have said yes.
        if window.furthest(NOT_DONE) == number:
            return True
        # In this order: what a rank does not say before it dies it never says.
        lost = set(self._lost())
        return not lost.isdisjoint(window.behind(DONE, number))

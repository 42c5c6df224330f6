"""Memory that all ranks of a node reach, as those who use it see it; see mpi.shared_window."""

from __future__ import annotations

from typing import Any, Protocol

#: The counters of each rank: chunks of its runs (collectives/engine/shared_memory_run.py), and decisions
#: (shared_decisions.py).
COPIED_IN, REDUCED, COPIED_OUT, DONE, NOT_DONE = COUNTERS = range(5)
#: Slots of each rank: three are in use at a time while chunks follow each other.
SLOTS = 4


class SharedWindow(Protocol):
    """Slots that one rank writes and all read, and counters by which they tell each other how far they are.

    Attributes
    ----------
    rank, size : int
        Among those that share it.
    ranks : tuple of int
        Their numbers in the World.
    slots : list of list of numpy.ndarray
        SLOTS of each rank, as bytes.
    slot_bytes : int
    started : int
        For whoever uses the slots: how many have been taken in turn, the same on all ranks.
    queue : list
        For whoever uses the slots: who waits for them on this rank; the first has them.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    slots: list[list[Any]]
    slot_bytes: int
    started: int
    queue: list[Any]

    def reached(self, which: int, value: int) -> bool:
        """Return whether every rank's counter is at `value` or above; what they wrote before may be read then."""

    def behind(self, which: int, value: int) -> list[int]:
        """Return the ranks, as the World counts them, whose counters are below `value`."""

    def furthest(self, which: int) -> int:
        """Return the highest of the ranks' counters."""

    def advance(self, which: int, value: int) -> None:
        """Raise this rank's counter to `value`, after all that it has written."""

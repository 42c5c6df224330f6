"""An integer that all ranks can add to in one atomic step, for the tickets of asynchronous GRAWA.

Over MPI rank 0 owns it, in a window or behind messages (mpi_counter.py); over torch.distributed its store does.
"""

from __future__ import annotations

from typing import Protocol

from hpctk.comm.torch.world import TorchWorld
from hpctk.comm.world import World

OWNER = 0


class SharedCounter(Protocol):
    """An integer, 0 at first.

    Attributes
    ----------
    way : str
        How it is reached, for the statistics.
    sent_bytes, received_bytes : int or None
        What adding to it moves to and from its owner; None where nobody knows.
    """

    way: str
    sent_bytes: int | None
    received_bytes: int | None

    def add(self, value: int) -> int:
        """Add to the word in one atomic step, and return what it was before. Not collective.

        PeerError where its owner has left, or does not answer before the deadline.
        """

    def take_answered(self) -> dict[int, int]:
        """Return how often this rank has answered each other since the last call: for its owner's statistics."""


def shared_counter(here: World) -> SharedCounter:
    """Return a new shared word. Collective over the communicator."""
    if isinstance(here, TorchWorld):
        return StoreCounter(here)
    from hpctk.comm.mpi.counter import mpi_counter

    return mpi_counter(here)


class StoreCounter:
    """A key of the process group's store. Every rank must make its words in the same order."""

    way = "store"
    sent_bytes: int | None = None
    received_bytes: int | None = None

    def __init__(self, here: TorchWorld) -> None:
        self._here = here
        self._key = here.new_key("word")

    def add(self, value: int) -> int:
        """Add, and return what the word was before."""
        return self._here.add_to_key(self._key, value, "taking a ticket") - value

    def take_answered(self) -> dict[int, int]:
        """Return nothing: the store answers by itself."""
        return {}

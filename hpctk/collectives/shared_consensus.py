"""One-pass AdaCons through memory that all ranks of a node share: consensus.py's two halves without messages.

Chunk by chunk each rank takes its share of the others' gradients out of their slots, keeps it, and forms the inner
products while it is in the cache. Once all weights are known it forms the weighted sum of what it kept, and of its own,
where that lies, and gives it to all. A chunk's shares, their order, and who sums them depend on sizes alone: same bits
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctk.collectives.consensus_groups import groups_within
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.shared_memory_run import SharedMemoryRun

if TYPE_CHECKING:
    from hpctk.comm.shared_window import SharedWindow
    from hpctk.comm.world import World


class SharedPart:
    """A model's gradients on their way through a window to the ranks that aggregate them: as consensus.Part.

    Making one starts the first half. Collective over the communicator.
    """

    def __init__(self, here: World, window: SharedWindow, flat: Any, groups: Sequence[int]) -> None:
        self.here, self.flat, self.members = here, flat, list(range(len(groups) - 1))
        self._window, engine = window, engine_of(here)
        self._collecting = Collecting(window, flat, groups)
        # A run that was made has its turn at the window: another thread must be refused before.
        with here.one_thread:
            self._run = SharedMemoryRun(window, self._collecting, engine.traffic())
            room = engine.workspace("consensus", here.size * self._run.owned * flat.itemsize)
            self._collecting.parts = room.view(flat.dtype).reshape(here.size, self._run.owned)
            engine.start_shared(self._run, len(flat), flat.itemsize, "reduce_scatter")

    def products(self) -> Any:
        """Return <g_j, S> and ||g_j||^2 over this rank's shares, once all is there: 2 x groups x ranks."""
        engine_of(self.here).complete(self._run, f"exchanging {len(self.flat)} elements for a consensus")
        return self._collecting.products

    def gather(self, weights: Sequence[Any]) -> None:
        """Form the aggregate with the weights of all groups, and give it to everyone. Collective. In place."""
        engine, spreading = engine_of(self.here), Spreading(self._collecting, weights)
        with self.here.one_thread:
            run = SharedMemoryRun(self._window, spreading, engine.traffic())
            engine.start_shared(run, len(self.flat), self.flat.itemsize, "allgather", own=self._run.owned)
        engine.complete(run, f"giving everyone an aggregate of {len(self.flat)} elements")


class Collecting:
    """What a run through the window does in the first half. Attributes n, itemsize, collects, spreads as in Arithmetic.

    Attributes
    ----------
    parts : array of ranks x owned elements
        The others' parts of the elements that this rank aggregates.
    products : array of 2 x groups x ranks
    """

    collects, spreads = True, False
    parts: Any

    def __init__(self, window: SharedWindow, flat: Any, groups: Sequence[int]) -> None:
        self.n, self.itemsize, self.rank, self.flat, self.groups = len(flat), flat.itemsize, window.rank, flat, groups
        self.slots = [[slot[: len(slot) // 16 * 16].view(flat.dtype) for slot in row] for row in window.slots]
        self.products = np.zeros((2, len(groups) - 1, window.size))
        self._at = 0

    def copy_in(self, slot: int, lo: int, first: int, end: int) -> None:
        """Copy this rank's elements, of a chunk that begins at `lo`, into its slot."""
        if end > first:
            self.slots[self.rank][slot][first:end] = self.flat[lo + first : lo + end]

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Keep the others' parts of this rank's share of a chunk, and form its inner products."""
        from hpctk.kernels.consensus import add_products

        at, self._at = self._at, self._at + end - first
        for rank, row in enumerate(self.slots):
            if rank != self.rank:
                self.parts[rank, at : self._at] = row[slot][first:end]
        for group, start, stop in groups_within(self.groups, lo + first, lo + end):
            here = at - lo - first
            inner, squared = self.products[:, group]
            own = self.flat[start:stop]
            add_products(self.parts, here + start, here + stop, inner, squared, own, self.rank)

    def copy_out(self, rank: int, slot: int, lo: int, first: int, end: int) -> None:
        """Take nothing: there is no result yet."""


class Spreading:
    """What it does in the second half, with the weights of all groups."""

    collects, spreads = False, True

    def __init__(self, collected: Collecting, weights: Sequence[Any]) -> None:
        self._of, self.n, self.itemsize = collected, collected.n, collected.itemsize
        self._weights = [np.asarray(row, collected.flat.dtype) for row in weights]
        self._at = 0

    def copy_in(self, slot: int, lo: int, first: int, end: int) -> None:
        """Give nothing but the share."""

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Form this rank's share of a chunk of the aggregate, and give it to all."""
        from hpctk.kernels.consensus import weighted_sum

        of, at, self._at = self._of, self._at, self._at + end - first
        for group, start, stop in groups_within(of.groups, lo + first, lo + end):
            here = at - lo - first
            weighted_sum(of.parts, here + start, here + stop, self._weights[group], of.flat[start:stop], of.rank)
        of.slots[of.rank][slot][first:end] = of.flat[lo + first : lo + end]

    def copy_out(self, rank: int, slot: int, lo: int, first: int, end: int) -> None:
        """Take a rank's share of the aggregate."""
        if end > first:
            self._of.flat[lo + first : lo + end] = self._of.slots[rank][slot][first:end]

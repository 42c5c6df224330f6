"""One-pass AdaCons: the consensus-weighted sum of gradients for the volume of one all-reduce.

The authors all-reduce the gradients to know their sum, then all-reduce the weighted gradients. The
same result costs one pass:

1. reduce-scatter by rotation, but keep the parts: rank s gets g_j[s], its shard of every gradient;
2. rank s forms <g_j[s], S[s]> and ||g_j[s]||^2 for all j; 2N numbers (for each group) are summed;
3. every rank knows all weights, and rank s forms sum_j w_j g_j[s];
4. all-gather the shards.

2(N-1)/N of the gradient is sent and received, as in a ring all-reduce, and 2N numbers. Extra memory:
the parts and the result, at most 2 copies of the gradient. Inner products are summed in float64.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctk.collectives.engine import consensus_weights
from hpctk.collectives.engine.consensus_weights import ConsensusState
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.fuse import describe, fuse, unfuse
from hpctk.comm.collective import collective
from hpctk.comm.world import World, world
from hpctk.schedules import bounds, recursive_doubling, ring, rotation

if TYPE_CHECKING:
    from hpctk.comm.world import Comm

#: Elements in one piece of the inner products: their float64 copies stay in the cache.
PIECE = 8192
#: The engine's segments that make one message where all ranks share a node's memory, in which messages cost most.
NODE_SEGMENTS = 16


@collective
def adacons_aggregate(
    tensors: Sequence[Any],
    state: ConsensusState,
    *,
    momentum: float = 0.99,
    scale: str = "mean_norm",
    layerwise: bool = False,
    comm: Comm | None = None,
) -> list[Any]:
    """Return the AdaCons aggregate of all ranks' tensors, as new tensors.

    Not in place; `state` is updated, alike on every rank.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        float32 or float64, the same shapes on every rank.
    state : ConsensusState
        What earlier calls left; `hpctk.ops.ConsensusState()` at first.
    momentum, scale, layerwise
        As in AdaCons: beta, the scale of the result, and whether every tensor gets weights of its own.
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    here = world(comm)
    settings = [("momentum", momentum), ("scale", scale), ("layerwise", layerwise)]
    with here.one_thread, here.calling("adacons_aggregate"):
        here.agree("adacons_aggregate", [*settings, *describe(tensors)])
        consensus_weights.check(momentum, scale)
        flat, edges = fuse(tensors)
        groups = edges if layerwise else [0, len(flat)]
        host = here.stager.to_comm(flat, stage=True)
        aggregate_in_place(here, host.numpy(), groups, state, momentum, scale)
        here.stager.from_comm(flat, host)
    return unfuse(flat, edges, tensors)


def aggregate_in_place(
    here: World, flat: Any, groups: Sequence[int], state: ConsensusState, momentum: float, scale: str
) -> None:
    """Replace a flat array by its consensus aggregate over all ranks.

    Collective over the communicator. In place. `groups` are the bounds of the groups of elements
    that share weights.
    """
    part = Part(here, flat, groups, range(len(groups) - 1))
    finish([part], len(groups) - 1, state, momentum, scale)


class Part:
    """Some of a model's gradients on their way to the ranks that aggregate them.

    Making one starts the first half, the exchange of all parts, and returns; several may be under way.
    Collective over the communicator. Inner products are formed for each piece as soon as all ranks' parts of it are
    there, while the rest is still under way, and added up in the order of the elements, not of arrival.

    Parameters
    ----------
    flat : array
        This rank's gradients, overwritten by the aggregate in `finish`.
    groups : sequence of int
        The bounds of the groups of elements that share weights.
    members : sequence of int
        For each group its number in the whole model, all different: groups of several parts may be one.
    room : uint8 array, optional
        `room_bytes` of memory for the parts; needed where several are under way at once.
    lane : int, optional
        Reserved at the engine, where ranks may start parts in different orders.
    """

    def __init__(
        self,
        here: World,
        flat: Any,
        groups: Sequence[int],
        members: Sequence[int],
        room: Any = None,
        lane: int | None = None,
    ) -> None:
        self.here, self.flat, self.members = here, flat, list(members)
        engine = engine_of(here)
        self.lo, self.hi = bounds(len(flat), here.size, range(here.rank, here.rank + 1))
        if room is None:
            room = engine.workspace("consensus", self.room_bytes(here, flat))
        #: Everyone's part of the elements that this rank aggregates.
        self.parts = room.view(flat.dtype).reshape(here.size, self.hi - self.lo)
        self.parts[here.rank] = flat[self.lo : self.hi]
        self._groups = groups
        self._weights: list[Any] = []
        self._waiting: dict[int, int] = {}
        self._pieces: dict[int, Any] = {}
        #: Arithmetic goes by the engine's segments, however long messages are, so that all round alike.
        self._grid = max(1, engine.segment_bytes // flat.itemsize)
        #: The longest message of both halves.
        self._message_bytes = self._grid * flat.itemsize * (NODE_SEGMENTS if len(here.nodes) == 1 else 1)
        if here.size == 1:
            self.arrived(0, self.lo, self.hi)
        self._run = engine.start(
            rotation.reduce_scatter(here.size, keep=True),
            InPlace(flat, flat.itemsize),
            segment_bytes=self._message_bytes,
            # Few, so that each rank's parts follow one another and come in evenly.
            flight=engine.machine.part_sends,
            kept=self,
            lane=lane,
        )

    @staticmethod
    def room_bytes(here: World, flat: Any) -> int:
        """Return how much memory the parts of a flat array take on this rank."""
        lo, hi = bounds(len(flat), here.size, range(here.rank, here.rank + 1))
        return int(here.size * (hi - lo) * flat.itemsize)

    def room(self, peer: int, lo: int, hi: int) -> Any:
        """Return the memory for the peer's elements lo .. hi-1."""
        return self.parts[peer, lo - self.lo : hi - self.lo].view(np.uint8)

    def arrived(self, peer: int, lo: int, hi: int) -> None:
        """Form the inner products of elements lo .. hi-1 once all parts of them are there."""
        self._waiting[lo] = self._waiting.get(lo, len(self.parts) - 1) - 1
        if self._waiting[lo] > 0:
            return
        for start, stop in self._segments(lo, hi):
            pieces = shard_groups(self._groups, start, stop)
            self._pieces[start] = partial_products(self.parts[:, start - self.lo : stop - self.lo], pieces)

    def products(self) -> Any:
        """Return <g_j, S> and ||g_j||^2 over this rank's shard, once all is there: 2 x groups x ranks."""
        engine_of(self.here).complete(self._run, f"exchanging {len(self.flat)} elements for a consensus")
        # It refers to this part: a cycle would keep the gradients in memory.
        del self._run
        total = np.zeros((2, len(self._groups) - 1, len(self.parts)))
        for lo in sorted(self._pieces):
            for g, inner, squared in self._pieces[lo]:
                total[0, g] += inner
                total[1, g] += squared
        return total

    def gather(self, weights: Sequence[Any]) -> None:
        """Form the aggregate with the weights of all groups, and give it to everyone. Collective. In place."""
        self._weights = [weights[member] for member in self.members]
        # A ring has the links to itself: all-gathering by rotation was slower, its streams share them unevenly.
        plan = ring.allgather(self.here.size)
        engine_of(self.here).run(plan, WeightedShard(self), segment_bytes=self._message_bytes)

    def aggregate(self, lo: int, hi: int) -> None:
        """Overwrite elements lo .. hi-1 by their weighted sum over the ranks."""
        for first, last in self._segments(lo, hi):
            parts, out = self.parts[:, first - self.lo : last - self.lo], self.flat[first:last]
            for g, start, stop in shard_groups(self._groups, first, last):
                weights = np.asarray(self._weights[g], parts.dtype)
                np.dot(weights, parts[:, start:stop], out=out[start:stop])

    def _segments(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the engine's segments in elements lo .. hi-1; all at once for a rank alone."""
        while lo < hi:
            end = hi if len(self.parts) == 1 else min((lo // self._grid + 1) * self._grid, hi)
            yield lo, end
            lo = end


class WeightedShard(InPlace):
    """Elements of which this rank's own are formed when they are first sent, while others are under way."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.flat, part.flat.itemsize)
        self._part = part
        self._formed: set[int] = set()
        if part.here.size == 1:
            part.aggregate(part.lo, part.hi)

    def outgoing(self, lo: int, hi: int) -> Any:
        """Return elements lo .. hi-1: the aggregate of this rank's own, or another's passed on."""
        if self._part.lo <= lo < self._part.hi and lo not in self._formed:
            self._formed.add(lo)
            self._part.aggregate(lo, hi)
        return super().outgoing(lo, hi)


def finish(
    parts: Sequence[Part], groups: int, state: ConsensusState, momentum: float, scale: str, absent: Collection[int] = ()
) -> None:
    """Replace the gradients of all parts by their consensus aggregate.

    Collective over the communicator. In place. `groups` is the number of groups in the whole model; those that
    are `absent` come out as zeros, and leave no trace in `state`.
    """
    here = parts[0].here
    total = np.zeros((2, groups, here.size))
    for part in parts:
        total[:, part.members] += part.products()
    # By our own plan, not by MPI: all ranks must come to the same bits.
    summed = InPlace(total.reshape(-1), total.itemsize, "float64")
    engine_of(here).run(recursive_doubling.allreduce(here.size), summed, overhead=True)
    inner, squared = total
    weights = [
        np.zeros(here.size)
        if g in absent
        else consensus_weights.weights(inner[g], squared[g], state, g, momentum=momentum, scale=scale)
        for g in range(groups)
    ]
    for part in parts:
        part.gather(weights)


def shard_groups(groups: Sequence[int], lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Return (group, start, stop) for each group that reaches into elements lo .. hi-1, counted from lo."""
    found = []
    g = bisect_right(groups, lo) - 1
    while g < len(groups) - 1 and groups[g] < hi:
        start, stop = max(groups[g], lo), min(groups[g + 1], hi)
        if start < stop:
            found.append((g, start - lo, stop - lo))
        g += 1
    return found


def partial_products(parts: Any, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, Any, Any]]:
    """Return (group, <g_j, S>, ||g_j||^2) of each piece, for all ranks j, summed in float64."""
    found = []
    for g, start, stop in pieces:
        inner, squared = np.zeros(len(parts)), np.zeros(len(parts))
        for lo in range(start, stop, PIECE):
            piece = parts[:, lo : min(lo + PIECE, stop)].astype(np.float64)
            # All products g_i . g_j in one call of BLAS: their row sums are g_i . S, their diagonal the norms.
            products = piece @ piece.T
            inner += products.sum(1)
            squared += products.diagonal()
        found.append((g, inner, squared))
    return found

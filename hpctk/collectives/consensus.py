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

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctk.collectives.consensus_groups import groups_within
from hpctk.collectives.engine import consensus_weights
from hpctk.collectives.engine.consensus_weights import ConsensusState
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.fuse import describe, fuse, unfuse
from hpctk.collectives.shared_consensus import SharedPart
from hpctk.comm.collective import collective
from hpctk.comm.world import World, world
from hpctk.schedules import bounds, recursive_doubling, ring, rotation

if TYPE_CHECKING:
    from hpctk.comm.world import Comm

#: The engine's segments that make one message where all ranks share a node's memory, in which messages cost most.
NODE_SEGMENTS = 16
#: From this many bytes ranks of one node exchange gradients through memory that they share.
SHARED_FROM_BYTES = 2**20


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
    window = here.shared_window() if here.shares_memory and flat.nbytes >= SHARED_FROM_BYTES else None
    if window is None:
        part: Part | SharedPart = Part(here, flat, groups, range(len(groups) - 1))
    else:
        part = SharedPart(here, window, flat, groups)
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
        #: The others' parts of the elements that this rank aggregates; its own stays where it is.
        self.parts = room.view(flat.dtype).reshape(here.size, self.hi - self.lo)
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
            self._pieces[start] = self._products_of(start, stop)

    def _products_of(self, lo: int, hi: int) -> list[tuple[int, Any, Any]]:
        from hpctk.kernels.consensus import add_products

        found = []
        for group, start, stop in groups_within(self._groups, lo, hi):
            inner, squared = np.zeros(len(self.parts)), np.zeros(len(self.parts))
            own = self.flat[start:stop]
            add_products(self.parts, start - self.lo, stop - self.lo, inner, squared, own, self.here.rank)
            found.append((group, inner, squared))
        return found

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
        from hpctk.kernels.consensus import weighted_sum

        for group, start, stop in groups_within(self._groups, lo, hi):
            weights, own = np.asarray(self._weights[group], self.parts.dtype), self.flat[start:stop]
            weighted_sum(self.parts, start - self.lo, stop - self.lo, weights, own, self.here.rank)

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
    parts: Sequence[Part | SharedPart],
    groups: int,
    state: ConsensusState,
    momentum: float,
    scale: str,
    absent: Collection[int] = (),
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

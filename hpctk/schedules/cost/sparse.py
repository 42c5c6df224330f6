"""What a sparse all-reduce costs: its volume grows with the union of all ranks' indices.

n elements, k of them on every rank, P ranks. Where indices are independent, m ranks together have about
u(m) = n (1 - (1 - k/n)^m) different ones; where they are alike, fewer. Bytes per element come from the
wire form, given as a function of (elements, length).

| schedule | bytes sent per rank |
|---|---|
| allgather | (P-1) w(k) |
| recursive_doubling | w(u(1)) + w(u(2)) + w(u(4)) + ... |
| split | (P-1)/P (w(k) + w(u(P))) |
| split, keep | (P-1)/P (w(k) + w(keep)), and the selection's counts |
"""

from collections.abc import Callable
from dataclasses import dataclass

from hpctk.schedules import recursive_doubling, ring, rotation
from hpctk.schedules.core.fold import Fold
from hpctk.schedules.core.plan import Plan

#: (elements, length) -> bytes.
Wire = Callable[[int, int], int]
#: (plan, bytes) -> seconds.
Pay = Callable[[Plan, int], float]

#: Seconds to write, read and merge one element of a list, on one core of an ordinary machine.
ELEMENT_S = 12e-9
#: What a rank shows of its list to balance the ranges, about; and the small collectives that agree on the threshold
#: of the elements to keep.
SAMPLE_BYTES, SELECTING = 520, 5


def union(k: int, n: int, ranks: int) -> int:
    """Return how many different indices `ranks` lists of k independent ones among n have, on average."""
    return round(n * (1.0 - (1.0 - k / n) ** ranks)) if n else 0


def stages(name: str, size: int, n: int, k: int, keep: int | None, wire: Wire) -> list[tuple[Plan, int]]:
    """Return the plans that a sparse all-reduce runs one after the other, each with its tensor's bytes."""
    if name == "allgather":
        return [(ring.allgather(size), size * wire(k, n))]
    if name == "split":
        together = union(k, n, size)
        returned = together if keep is None else min(keep, together)
        small = [(rotation.allgather(size), size * SAMPLE_BYTES)]
        small += (SELECTING if keep is not None else 0) * [(recursive_doubling.allreduce(size), 2048)]
        return [*small, (rotation.reduce_scatter(size), wire(k, n)), (ring.allgather(size), wire(returned, n))]
    fold = Fold(size)
    exchange = recursive_doubling.allreduce(2)
    folded = 2 if fold.pairs else 1
    lists = [wire(union(k, n, folded << level), n) for level in range(fold.levels)]
    if fold.pairs:
        lists = [wire(k, n), *lists, wire(union(k, n, size), n)]
    return [(exchange, nbytes) for nbytes in lists]


def handled(name: str, size: int, n: int, k: int) -> int:
    """Return how many elements a rank writes, reads and merges."""
    together = union(k, n, size)
    if name == "allgather":
        return 2 * size * k
    if name == "split":
        return 2 * k + together
    return sum(union(k, n, 1 << level) for level in range(size.bit_length())) + together


@dataclass(frozen=True)
class Offer:
    """What one way to sum sparse vectors moves, and its predicted time."""

    stages: tuple[tuple[Plan, int], ...]
    seconds: float

    @property
    def sent_bytes(self) -> float:
        """What the busiest rank sends."""
        return sum(plan.volume.sent * nbytes / plan.blocks for plan, nbytes in self.stages)


def offer(name: str, size: int, n: int, k: int, keep: int | None, wire: Wire, pay: Pay) -> Offer:
    """Return what a sparse all-reduce by one schedule costs."""
    moved = tuple(stages(name, size, n, k, keep, wire))
    spent = sum(pay(plan, nbytes) for plan, nbytes in moved) + ELEMENT_S * handled(name, size, n, k)
    return Offer(moved, spent)

"""Binomial tree: broadcast from any root, and all-reduce as a reduction to rank 0 and a broadcast.

The textbook tree. Count ranks from the root; in the reduction's round i every rank whose number is an odd
multiple of 2^i sends all it has to the rank 2^i below it. The broadcast is the same tree backwards.
K = ceil(log2 P).

| | broadcast | allreduce |
|---|---|---|
| rounds | K | 2K |
| messages per rank, at most | K | K |
| bytes sent per rank, at most | K n | K n |
| bytes received per rank, at most | n | K n |
| bytes on the critical path | K n | 2K n |
| bytes added per rank, at most | none | K n |
| bytes sent by all ranks | (P-1) n | 2(P-1) n |
| extra memory | none | n |

Good for small tensors and for parameters at the start of a job; the least total volume, and no pair ever
talks both ways at once. Bad for large tensors: everything waits for the root's link.

Same bits everywhere: the sum is computed once, at rank 0, and then copied.
"""

from collections.abc import Iterator

from hpctk.schedules.core.plan import IDLE, Action, Plan, Recv, Round, Send, checked_size, mirrored
from hpctk.schedules.cost.volume import Phase, Volume, merged

_ALL = range(1)


def broadcast(size: int, root: int = 0) -> Plan:
    """Give everyone what `root` has."""
    depth = _depth(size)

    def steps(rank: int) -> Iterator[Round]:
        return mirrored(_reducing(size, rank, root))

    volume = Volume(
        rounds=depth,
        messages=depth,
        sent=depth,
        received=min(1, depth),
        combined=0,
        total_sent=size - 1,
        phases=merged([Phase(depth, blocks=1)]),
        network_sent=depth,
    )
    return Plan("binomial", "broadcast", size, 1, steps, volume, root=root)


def allreduce(size: int) -> Plan:
    """Sum over all ranks, on all ranks: reduce to rank 0, then broadcast."""
    depth = _depth(size)

    def steps(rank: int) -> Iterator[Round]:
        reducing = list(_reducing(size, rank, root=0))
        yield from reducing
        yield from mirrored(reducing)

    volume = Volume(
        rounds=2 * depth,
        messages=depth,
        sent=depth,
        received=depth,
        combined=depth,
        total_sent=2 * (size - 1),
        phases=merged([Phase(depth, blocks=1, combined=1), Phase(depth, blocks=1)]),
        network_sent=depth,
    )
    return Plan("binomial", "allreduce", size, 1, steps, volume)


def _depth(size: int) -> int:
    return (checked_size(size) - 1).bit_length()


def _reducing(size: int, rank: int, root: int) -> Iterator[Round]:
    number = (rank - root) % size
    for level in range(_depth(size)):
        distance = 1 << level
        below, above = number - distance, number + distance
        if number % (2 * distance) == distance:
            yield Round(sends=(Send((below + root) % size, _ALL),))
        elif number % (2 * distance) == 0 and above < size:
            yield Round(recvs=(Recv((above + root) % size, _ALL, Action.COMBINE),))
        else:
            yield IDLE

"""Ring: every rank sends to its right neighbour and receives from its left one, nothing else.

The bucket algorithm, made popular for gradients by Baidu's and Horovod's ring all-reduce (Patarasuk and Yuan
2009 show that its volume is the least possible). The tensor is cut into P blocks. In the reduce-scatter block
b starts at rank b+1, passes round the ring and gathers one contribution at every rank, until rank b completes
it; in the all-gather the finished blocks pass round once more.

| | reduce_scatter, allgather | allreduce |
|---|---|---|
| rounds, messages per rank | P-1 | 2(P-1) |
| bytes sent and received per rank | (P-1)/P n | 2(P-1)/P n |
| bytes added per rank | (P-1)/P n, none | (P-1)/P n |
| extra memory | one block, none | one block |

Good for large tensors on any network: least volume, only neighbours talk, and no pair talks both ways at once
(P > 2). Bad for small ones: the number of rounds grows with P.

Same bits everywhere: the sum of block b is x[b+1] + x[b+2] + ... + x[b], computed once and then copied.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from hpctk.schedules.core.plan import Action, Plan, Round, even_plan, exchange
from hpctk.schedules.cost.volume import Phase


def reduce_scatter(size: int) -> Plan:
    """Sum over all ranks; rank r ends with block r."""
    steps = partial(reducing, range(size))
    return even_plan("ring", "reduce_scatter", size, steps, [reducing_phase(size)])


def allgather(size: int) -> Plan:
    """Give everyone everything; rank r starts with block r."""
    steps = partial(gathering, range(size))
    return even_plan("ring", "allgather", size, steps, [gathering_phase(size)])


def allreduce(size: int) -> Plan:
    """Sum over all ranks, on all ranks: reduce-scatter, then all-gather."""
    everyone = range(size)

    def steps(rank: int) -> Iterator[Round]:
        yield from reducing(everyone, rank)
        yield from gathering(everyone, rank)

    return even_plan("ring", "allreduce", size, steps, [reducing_phase(size), gathering_phase(size)])


def reducing(members: Sequence[int], me: int, first: int = 0) -> Iterator[Round]:
    """Reduce-scatter round a ring of `members`, seen by members[me], who ends with block first + me."""
    return _round_trip(members, me, me - 1, first, Action.COMBINE)


def gathering(members: Sequence[int], me: int, first: int = 0) -> Iterator[Round]:
    """All-gather round a ring of `members`, seen by members[me], who starts with block first + me."""
    return _round_trip(members, me, me, first, Action.STORE)


def _round_trip(members: Sequence[int], me: int, start: int, first: int, action: Action) -> Iterator[Round]:
    """Yield rounds in which every block moves one member to the right; this one gives `start`, then the one before."""
    count = len(members)
    right, left = members[(me + 1) % count], members[(me - 1) % count]
    for step in range(count - 1):
        given = first + (start - step) % count
        taken = first + (start - step - 1) % count
        yield exchange(right, range(given, given + 1), left, range(taken, taken + 1), action)


def reducing_phase(count: int) -> Phase:
    """Return what `reducing` moves among `count` members. Two of them are each other's left and right."""
    return Phase(count - 1, blocks=1, combined=1, exchanged=int(count == 2))


def gathering_phase(count: int) -> Phase:
    """Return what `gathering` moves among `count` members."""
    return Phase(count - 1, blocks=1, exchanged=int(count == 2))

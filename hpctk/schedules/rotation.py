"""Rotation: every rank sends every block straight to the rank that owns it.

The all-to-all ("pairwise exchange", "direct") way to reduce-scatter. The tensor is cut into P blocks. In
round i = 1 .. P-1 rank r sends block r+i to rank r+i and receives its own block from rank r-i, so in a round
all partners are different and, but for the one round i = P/2 of an even P, no pair talks both ways at once.
The all-gather sends every owned block straight to everyone in the same order.

Nothing that is received is ever sent on, so no round waits for another: an engine that tracks blocks may post
all rounds at once. That is why they are P-1 rounds and not a single one with P-1 messages: the order tells
who adds when, and nothing is lost.

| | reduce_scatter, allgather | allreduce |
|---|---|---|
| rounds, messages per rank | P-1 | 2(P-1) |
| bytes sent and received per rank | (P-1)/P n | 2(P-1)/P n |
| bytes added per rank | (P-1)/P n, none | (P-1)/P n |
| extra memory | one block; with keep P-1 blocks | one block |

Good where all contributions to a block are wanted side by side in one place (`keep`: one-pass AdaCons), and
on full-bisection networks with few ranks. Bad for many ranks: everyone talks to everyone.

Same bits everywhere: the sum of block b is x[b] + x[b-1] + x[b-2] + ..., computed by rank b and then copied.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from hpctk.schedules.core.plan import Action, Plan, Recv, Round, Send, even_plan
from hpctk.schedules.cost.volume import Phase


def reduce_scatter(size: int, *, keep: bool = False) -> Plan:
    """Bring all contributions to block r to rank r, to be summed or, with `keep`, kept apart per sender."""
    steps = partial(reducing, range(size), action=Action.KEEP if keep else Action.COMBINE)
    moved = phases(size, combined=int(not keep))
    return even_plan("rotation", "reduce_scatter", size, steps, moved, kept=size - 1 if keep else 0)


def allgather(size: int) -> Plan:
    """Give everyone everything; rank r starts with block r."""
    steps = partial(gathering, range(size))
    return even_plan("rotation", "allgather", size, steps, phases(size, combined=0))


def allreduce(size: int) -> Plan:
    """Sum over all ranks, on all ranks: reduce-scatter, then all-gather."""
    everyone = range(size)

    def steps(rank: int) -> Iterator[Round]:
        yield from reducing(everyone, rank)
        yield from gathering(everyone, rank)

    moved = phases(size, combined=1) + phases(size, combined=0)
    return even_plan("rotation", "allreduce", size, steps, moved)


def reducing(
    members: Sequence[int], me: int, *, owners: int | None = None, width: int = 1, action: Action = Action.COMBINE
) -> Iterator[Round]:
    """Reduce-scatter directly among `members`, seen by members[me].

    The first `owners` members (all of them unless told otherwise) end with one part each, of `width` blocks:
    member j with the blocks from j*width.
    """
    owners = len(members) if owners is None else owners
    for to, source in _partners(len(members), me):
        sends = (Send(members[to], _part(to, width)),) if to < owners else ()
        recvs = (Recv(members[source], _part(me, width), action),) if me < owners else ()
        yield Round(sends, recvs)


def gathering(members: Sequence[int], me: int, *, owners: int | None = None, width: int = 1) -> Iterator[Round]:
    """All-gather directly among `members`, seen by members[me]; parts as in `reducing`."""
    owners = len(members) if owners is None else owners
    for to, source in _partners(len(members), me):
        sends = (Send(members[to], _part(me, width)),) if me < owners else ()
        recvs = (Recv(members[source], _part(source, width), Action.STORE),) if source < owners else ()
        yield Round(sends, recvs)


def _partners(count: int, me: int) -> Iterator[tuple[int, int]]:
    for shift in range(1, count):
        yield (me + shift) % count, (me - shift) % count


def _part(owner: int, width: int) -> range:
    return range(owner * width, (owner + 1) * width)


def phases(size: int, combined: int) -> list[Phase]:
    """Return what `reducing` or `gathering` moves among `size` members."""
    if size % 2:
        return [Phase(size - 1, blocks=1, combined=combined)]
    before = after = Phase(size // 2 - 1, blocks=1, combined=combined)
    opposite = Phase(1, blocks=1, combined=combined, exchanged=1)
    return [before, opposite, after]

"""Recursive doubling: everyone exchanges everything with a partner, at distance 1, 2, 4, ...

The classic for small messages (Thakur, Rabenseifner and Gropp 2005). After round i the 2^i ranks of a subcube
hold the same sum. With P = 2^k + e ranks, e of them first hand their tensor to a neighbour and get the result
back at the end.

| | allreduce, [if e > 0] |
|---|---|
| rounds | k [+ 2] |
| messages per rank | k [+ 1] |
| bytes sent and received per rank | (k [+ 1]) n |
| bytes on the critical path | (k [+ 2]) n |
| bytes added per rank | (k [+ 1]) n |
| extra memory | n (a block is sent while a partner's is received) |

Good for small tensors: the fewest rounds. Bad for large ones: everything travels k times, always both ways at
once between two ranks.

Same bits everywhere: both partners of a round add the same two sums, one as a + b, the other as b + a.
"""

from collections.abc import Iterator

from hpctk.schedules.core.fold import Fold
from hpctk.schedules.core.plan import IDLE, Action, Plan, Recv, Round, Send, exchange, mirrored
from hpctk.schedules.cost.volume import Phase, Volume, merged

_ALL = range(1)


def allreduce(size: int) -> Plan:
    """Sum over all ranks, on all ranks."""
    fold = Fold(size)
    return Plan("recursive_doubling", "allreduce", size, 1, lambda rank: _steps(fold, rank), _volume(fold))


def _steps(fold: Fold, rank: int) -> Iterator[Round]:
    folding = [_folding(fold, rank)] if fold.pairs else []
    yield from folding
    team = fold.team(rank)
    for level in range(fold.levels):
        partner = fold.lower(team ^ (1 << level))
        active = rank == fold.lower(team)
        yield exchange(partner, _ALL, partner, _ALL, Action.COMBINE) if active else IDLE
    yield from mirrored(folding)


def _folding(fold: Fold, rank: int) -> Round:
    lower, upper = fold.lower(fold.team(rank)), fold.upper(fold.team(rank))
    if lower == upper:
        return IDLE
    if rank == upper:
        return Round(sends=(Send(lower, _ALL),))
    return Round(recvs=(Recv(upper, _ALL, Action.COMBINE),))


def _volume(fold: Fold) -> Volume:
    folded = int(fold.pairs > 0)
    most = fold.levels + folded
    path = [
        Phase(folded, blocks=1, combined=1),
        Phase(fold.levels, blocks=1, combined=1, exchanged=1),
        Phase(folded, blocks=1),
    ]
    return Volume(
        rounds=fold.levels + 2 * folded,
        messages=most,
        sent=most,
        received=most,
        combined=most,
        total_sent=fold.teams * fold.levels + 2 * fold.pairs,
        phases=merged(path),
        network_sent=most,
    )

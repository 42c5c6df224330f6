"""Halving and doubling: Rabenseifner's all-reduce, for any number of ranks.

Recursive halving reduce-scatters: partners at distance 1, 2, 4, ... swap halves, then quarters, of what they
are still responsible for (Rabenseifner 2004; nearest partners first, so that the largest messages stay near).
Recursive doubling all-gathers by the same steps backwards. Cut into B = 2^k blocks, P = B + e ranks.

The e extra ranks are folded in so that they share the work instead of handing over everything. The two ranks
of a team (see `fold`) swap halves: the lower rank then holds the lower half of the team's sum, the upper rank
the upper half. The first halving round is between a team and its neighbour team anyway, one keeping the lower
and one the upper half: whoever holds the half to be given sends it to whoever holds its counterpart. From
then on one rank per team is active. So folding costs n/2 before and n/2 after, not n and n, and all ranks
together send no more than in a ring.

| | allreduce, e = 0 | e > 0 |
|---|---|---|
| rounds | 2k | 2k + 2 |
| messages per rank | 2k | 2k + 1 |
| bytes sent and received per rank | 2(B-1)/B n | (5/2 - 2/B) n |
| bytes on the critical path | 2(B-1)/B n | (3 - 2/B) n |
| bytes added per rank | (B-1)/B n | (3/2 - 1/B) n |
| bytes sent by all ranks | 2(P-1) n | 2(P-1) n |
| extra memory | n/2 | n/2 |

Good for medium and large tensors: the least volume (P a power of two) in few rounds. It needs a network that
carries both directions between two ranks at full speed.

Same bits everywhere: each block's sum is completed by one rank only and then copied.
"""

from collections.abc import Iterator

from hpctk.schedules.core.fold import Fold
from hpctk.schedules.core.plan import IDLE, Action, Plan, Recv, Round, Send, exchange, mirrored
from hpctk.schedules.cost.volume import Phase, Volume, merged


def allreduce(size: int) -> Plan:
    """Sum over all ranks, on all ranks: recursive halving, then the same backwards."""
    fold = Fold(size)

    def steps(rank: int) -> Iterator[Round]:
        halving = list(_halving(fold, rank))
        yield from halving
        yield from mirrored(halving)

    return Plan("halving_doubling", "allreduce", size, fold.teams, steps, _volume(fold))


def _halving(fold: Fold, rank: int) -> Iterator[Round]:
    mine = range(fold.teams)
    if fold.pairs:
        yield _folding(fold, rank)
    for level in range(fold.levels):
        yield _halve(fold, rank, level, mine)
        mine = _half(mine, upper=_keeps_upper(fold, rank, level))


def _folding(fold: Fold, rank: int) -> Round:
    team, everything = fold.team(rank), range(fold.teams)
    lower, upper = fold.lower(team), fold.upper(team)
    if lower == upper:
        return IDLE
    is_upper = rank == upper
    mate = lower if is_upper else upper
    given, taken = _half(everything, upper=not is_upper), _half(everything, upper=is_upper)
    return exchange(mate, given, mate, taken, Action.COMBINE)


def _halve(fold: Fold, rank: int, level: int, mine: range) -> Round:
    team = fold.team(rank)
    other = team ^ (1 << level)
    keeps_upper = _keeps_upper(fold, rank, level)
    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()
    if rank == _holder(fold, team, level, upper=not keeps_upper):
        peer = _holder(fold, other, level, upper=not keeps_upper)
        sends = (Send(peer, _half(mine, upper=not keeps_upper)),)
    if rank == _holder(fold, team, level, upper=keeps_upper):
        peer = _holder(fold, other, level, upper=keeps_upper)
        recvs = (Recv(peer, _half(mine, upper=keeps_upper), Action.COMBINE),)
    return Round(sends, recvs)


def _keeps_upper(fold: Fold, rank: int, level: int) -> bool:
    return bool(fold.team(rank) >> level & 1)


def _holder(fold: Fold, team: int, level: int, *, upper: bool) -> int:
    # After the first halving a team works on one half only, so the rank that held it works alone.
    wanted = upper if level == 0 else team % 2 == 1
    return fold.upper(team) if wanted else fold.lower(team)


def _half(blocks: range, *, upper: bool) -> range:
    middle = (blocks.start + blocks.stop) // 2
    return range(middle, blocks.stop) if upper else range(blocks.start, middle)


def _volume(fold: Fold) -> Volume:
    blocks, folded = fold.teams, int(fold.pairs > 0)
    half = blocks // 2
    most = 2 * (blocks - 1) + folded * half
    halving = _halving_phases(fold)
    doubling = [Phase(1, phase.blocks, exchanged=phase.exchanged) for phase in reversed(halving)]
    return Volume(
        rounds=2 * (fold.levels + folded),
        messages=2 * fold.levels + folded,
        sent=most,
        received=most,
        combined=blocks - 1 + folded * half,
        total_sent=2 * blocks * (fold.size - 1),
        phases=merged(halving + doubling),
        network_sent=most,
    )


def _halving_phases(fold: Fold) -> list[Phase]:
    half = fold.teams // 2
    folding = [Phase(1, half, combined=half, exchanged=half)] if fold.pairs else []
    sizes = [half >> level for level in range(fold.levels)]
    levels = [Phase(1, size, combined=size, exchanged=size) for size in sizes]
    # A team of two splits the first exchange over its ranks: a pair talks both ways only where two
    # teams of one meet, and the last two teams are the last to become teams of two.
    if levels and fold.pairs > fold.teams - 2:
        levels[0] = Phase(1, half, combined=half)
    return folding + levels

"""Hierarchical: reduce inside nodes, all-reduce between nodes on parallel rails, gather inside nodes.

Two levels, for nodes whose ranks talk through shared memory (the idea of Horovod's hierarchical all-reduce,
here for nodes of any sizes). N nodes; m and M are the numbers of ranks of the smallest and the largest node.
The tensor is cut into m parts of N blocks.

1. Inside every node, directly: part j of all local ranks is summed by the node's j-th rank (M-1 rounds).
2. Between nodes: the j-th ranks of all nodes form rail j, a ring that all-reduces part j (2(N-1) rounds).
3. Inside every node, directly: the j-th rank gives part j to all others (M-1 rounds).

Nodes may be unequal: ranks beyond the m-th take no part in step 2. With m = 1 that is the scheme with one
leader per node. Ranks may be numbered in any order.

| | allreduce |
|---|---|
| rounds | 2(M-1) + 2(N-1) |
| messages per rank, at most | (M-1) + (m-1) + 2(N-1) |
| bytes per rank between nodes | 2(N-1)/(mN) n |
| bytes sent and received per rank inside a node, at most | (M-1 + m-1)/m n |
| bytes on the critical path inside a node | 2(M-1)/m n |
| bytes added per rank, at most | (M-1)/m n + (N-1)/(mN) n |
| bytes sent by all ranks | 2(P-1) n |
| extra memory | one part: n/m |

Good for several ranks per node: a node sends 2(N-1)/N n whatever its number of ranks, in 2(N-1) network
rounds instead of 2(P-1). Bad if one node is much smaller than the others: few rails, so much copying inside
nodes.

Where the ranks of each node share memory, step 1 and 3 go through it, without messages (collectives.engine.
hierarchical_run); `rails` is step 2 alone.

Same bits everywhere: a node's sum of a block is computed by one rank, then the block's sum along its rail is
computed once and copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from hpctk.errors import SettingError
from hpctk.schedules import ring, rotation
from hpctk.schedules.core.plan import IDLE, Plan, Round
from hpctk.schedules.cost.volume import Phase, Volume, even, merged

Nodes = tuple[tuple[int, ...], ...]


def allreduce(nodes: Sequence[Sequence[int]]) -> Plan:
    """Sum over all ranks, on all ranks.

    Parameters
    ----------
    nodes : sequence of sequences of int
        The ranks of every node; together each rank 0 .. P-1 once, in any order.
    """
    grid = checked_nodes(nodes)
    homes = {rank: (node, local) for node, ranks in enumerate(grid) for local, rank in enumerate(ranks)}
    blocks = min(map(len, grid)) * len(grid)

    def steps(rank: int) -> Iterator[Round]:
        return _steps(grid, *homes[rank])

    return Plan("hierarchical", "allreduce", len(homes), blocks, steps, _volume(grid), nodes=grid)


def rails(nodes: Sequence[Sequence[int]]) -> Plan:
    """Sum over the ranks of each rail, on all of them: the middle of `allreduce`, for ranks that hold only their part.

    Of each node the ranks beyond the smallest node's number are on no rail.
    """
    grid = checked_nodes(nodes)
    count, width = len(grid), min(map(len, grid))
    homes = {rank: (node, local) for node, ranks in enumerate(grid) for local, rank in enumerate(ranks)}

    def steps(rank: int) -> Iterator[Round]:
        node, local = homes[rank]
        if local < width:
            rail = [ranks[local] for ranks in grid]
            yield from ring.reducing(rail, node)
            yield from ring.gathering(rail, node)

    volume = even(count, [ring.reducing_phase(count), ring.gathering_phase(count)])
    return Plan("hierarchical", "allreduce", len(homes), count, steps, volume, nodes=grid)


def checked_nodes(nodes: Sequence[Sequence[int]]) -> Nodes:
    """Return `nodes` as tuples, or raise SettingError unless every rank 0 .. P-1 is in one node."""
    grid = tuple(tuple(ranks) for ranks in nodes)
    ranks = sorted(rank for node in grid for rank in node)
    if not grid or not all(grid):
        raise SettingError(f"nodes={_shown(grid)}: one node or more is needed, and none may be empty")
    if ranks != list(range(len(ranks))):
        raise SettingError(f"nodes={_shown(grid)}: every rank 0 to {len(ranks) - 1} must appear exactly once")
    return grid


def _shown(grid: Nodes) -> str:
    text = str([list(ranks) for ranks in grid])
    return text if len(text) <= 200 else text[:200] + "..."


def _steps(grid: Nodes, node: int, local: int) -> Iterator[Round]:
    count, rails, members = len(grid), min(map(len, grid)), grid[node]
    # Small nodes wait, so that all nodes enter the ring in the same round.
    waiting = max(map(len, grid)) - len(members)
    yield from rotation.reducing(members, local, owners=rails, width=count)
    yield from repeat(IDLE, waiting)
    if local < rails:
        rail = [ranks[local] for ranks in grid]
        yield from ring.reducing(rail, node, first=local * count)
        yield from ring.gathering(rail, node, first=local * count)
    else:
        yield from repeat(IDLE, 2 * (count - 1))
    yield from rotation.gathering(members, local, owners=rails, width=count)
    yield from repeat(IDLE, waiting)


def _volume(grid: Nodes) -> Volume:
    count, size = len(grid), sum(map(len, grid))
    rails, largest = min(map(len, grid)), max(map(len, grid))
    inside = (largest - 1 + rails - 1) * count
    between = 2 * (count - 1)
    gathering = Phase(largest - 1, blocks=count, local=True)
    reducing = replace(gathering, combined=count)
    path = [reducing, ring.reducing_phase(count), ring.gathering_phase(count), gathering]
    return Volume(
        rounds=2 * (largest - 1) + between,
        messages=largest - 1 + rails - 1 + between,
        sent=inside + between,
        received=inside + between,
        combined=(largest - 1) * count + count - 1,
        total_sent=2 * rails * count * (size - 1),
        phases=merged(path),
        network_sent=between,
        local_sent=inside,
    )

"""Split and reduce: every rank reduces one range of indices, then passes it round.

The sparse all-reduce of Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep
Learning", PPoPP 2022) as a plan: elements go straight to the rank that owns their range (rotation), the
reduced ranges go round a ring. Blocks are ranges of indices, cut so that all have about equally many
elements. The reducing half by rotation, not round a ring: a list that is passed on grows at every stop.

With k elements per rank, U in the union of all, in pairs of a value and an index:

| | allreduce |
|---|---|
| rounds, messages per rank | 2(P-1) |
| sent and received per rank | (P-1)/P (k + U), with keep (P-1)/P 2k |
| added per rank | (P-1)/P k |

Same bits everywhere: the sum of a range is computed by its owner, in the order of rotation, and then copied.
"""

from collections.abc import Iterator

from hpctk.schedules import ring, rotation
from hpctk.schedules.core.plan import Plan, Round, even_plan


def allreduce(size: int) -> Plan:
    """Sum over all ranks, on all ranks: reduce-scatter by rotation, then all-gather round a ring."""
    everyone = range(size)

    def steps(rank: int) -> Iterator[Round]:
        yield from rotation.reducing(everyone, rank)
        yield from ring.gathering(everyone, rank)

    moved = [*rotation.phases(size, combined=1), ring.gathering_phase(size)]
    return even_plan("split", "allreduce", size, steps, moved)

"""Star: everyone sends to rank 0 one after the other, rank 0 adds up and sends the sum to everyone.

| | allreduce |
|---|---|
| rounds | 2(P-1) |
| messages per rank, at most | P-1 |
| bytes sent and received per rank, at most | (P-1) n |
| bytes added per rank, at most | (P-1) n |

The slowest way there is, and the simplest to read.
"""

from collections.abc import Iterator

from hpctk.schedules import IDLE, Action, Phase, Plan, Recv, Round, Schedule, Send, Volume, mirrored

_ALL = range(1)


def allreduce(size: int) -> Plan:
    """Sum over all ranks, on all ranks."""
    others = size - 1

    def steps(rank: int) -> Iterator[Round]:
        inward = list(_inward(size, rank))
        yield from inward
        yield from mirrored(inward)

    phases = (Phase(others, blocks=1, combined=1), Phase(others, blocks=1)) if others else ()
    volume = Volume(
        rounds=2 * others,
        messages=others,
        sent=others,
        received=others,
        combined=others,
        total_sent=2 * others,
        phases=phases,
        network_sent=others,
    )
    return Plan("star", "allreduce", size, 1, steps, volume)


def _inward(size: int, rank: int) -> Iterator[Round]:
    for source in range(1, size):
        if rank == 0:
            yield Round(recvs=(Recv(source, _ALL, Action.COMBINE),))
        elif rank == source:
            yield Round(sends=(Send(0, _ALL),))
        else:
            yield IDLE


STAR = Schedule("rank 0 adds everything up and hands it out", {"allreduce": lambda size, nodes, root: allreduce(size)})

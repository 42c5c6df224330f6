"""Count what a plan moves by walking through the rounds of all its ranks: the slow way to a Volume.

The closed forms in `Plan.volume` are held against this count, and prices against `replay_seconds`.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from hpctk.schedules.core.plan import IDLE, Action, Plan, Round
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.volume import Phase, Volume, merged


class Load(NamedTuple):
    """What one rank does in one round, in blocks; `messages` holds the size of each message it sends."""

    messages: tuple[int, ...] = ()
    received: int = 0
    combined: int = 0
    kept: int = 0
    exchanged: int = 0
    network_sent: int = 0
    local: bool = True

    @property
    def sent(self) -> int:
        """Blocks sent in the round."""
        return sum(self.messages)


def loads(plan: Plan) -> Iterator[list[Load]]:
    """Iterate over the plan's rounds, with the loads of all ranks in each."""
    home = {rank: node for node, ranks in enumerate(plan.nodes or ()) for rank in ranks}
    feeds = [plan.rounds(rank) for rank in range(plan.size)]
    for steps in zip_longest(*feeds, fillvalue=IDLE):
        yield [_load(rank, step, home) for rank, step in enumerate(steps)]


def tally(plan: Plan) -> Volume:
    """Return the volume of `plan` as counted, in a time that grows with the number of all its messages."""
    rows = list(loads(plan))
    by_rank = list(zip(*rows, strict=True)) or [()]
    sent = [sum(load.sent for load in column) for column in by_rank]
    network = [sum(load.network_sent for load in column) for column in by_rank]
    return Volume(
        rounds=len(rows),
        messages=max(sum(len(load.messages) for load in column) for column in by_rank),
        sent=max(sent),
        received=max(sum(load.received for load in column) for column in by_rank),
        combined=max(sum(load.combined for load in column) for column in by_rank),
        total_sent=sum(sent),
        phases=merged(map(_phase, rows)),
        kept=max(sum(load.kept for load in column) for column in by_rank),
        network_sent=max(network),
        local_sent=max(a - b for a, b in zip(sent, network, strict=True)),
    )


def _phase(row: Sequence[Load]) -> Phase:
    return Phase(
        rounds=1,
        blocks=max(max(load.sent, load.received) for load in row),
        combined=max(load.combined for load in row),
        exchanged=max(load.exchanged for load in row),
        local=all(load.local for load in row),
    )


_NOTHING = Load()


def _load(rank: int, step: Round, home: dict[int, int]) -> Load:
    if not step.sends and not step.recvs:
        return _NOTHING
    mates = _mates(rank, step, home) if home else ()
    received = combined = kept = 0
    for recv in step.recvs:
        received += len(recv.blocks)
        combined += len(recv.blocks) * (recv.action is Action.COMBINE)
        kept += len(recv.blocks) * (recv.action is Action.KEEP)
    return Load(
        messages=tuple([len(send.blocks) for send in step.sends]),
        received=received,
        combined=combined,
        kept=kept,
        exchanged=_exchanged(step, mates),
        network_sent=sum([len(send.blocks) for send in step.sends if send.peer not in mates]),
        local=bool(mates) and all(other.peer in mates for other in step.messages),
    )


def _mates(rank: int, step: Round, home: dict[int, int]) -> list[int]:
    return [other.peer for other in step.messages if home[other.peer] == home[rank]]


def _exchanged(step: Round, mates: Sequence[int]) -> int:
    exchanged = 0
    for send in step.sends:
        for recv in step.recvs:
            if send.peer == recv.peer and send.peer not in mates:
                exchanged += min(len(send.blocks), len(recv.blocks))
    return exchanged


def replay_seconds(plan: Plan, nbytes: int, machine: Machine) -> float:
    """Return what `price` does, found by walking through every round of every rank."""
    return sum(_round_seconds(row, plan.blocks, nbytes, machine) for row in loads(plan))


def _round_seconds(row: Sequence[Load], blocks: int, nbytes: int, machine: Machine) -> float:
    """A round lasts as long as its busiest rank needs."""
    if not any(load.messages for load in row):
        return 0.0
    local = all(load.local for load in row)
    segments = max(sum(-(-size * nbytes // (blocks * machine.segment_bytes)) for size in load.messages) for load in row)
    moved = max(max(load.sent, load.received) for load in row)
    exchanged, combined = max(load.exchanged for load in row), max(load.combined for load in row)
    slowed = moved + (machine.exchange_factor - 1) * exchanged
    return (
        (machine.local_latency_s if local else machine.latency_s)
        + machine.message_s * segments
        + nbytes / blocks * slowed * (machine.local_byte_s if local else machine.byte_s)
        + nbytes / blocks * combined * machine.combine_byte_s
    )

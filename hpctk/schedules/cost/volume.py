"""How much a plan moves, in whole blocks: the closed forms that pricing needs.

bytes = blocks / plan.blocks * nbytes. Block counts are exact; the bytes of a real tensor differ by less than
one element per block, because blocks are only almost equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive rounds alike: what the busiest rank does in each of them.

    Attributes
    ----------
    rounds : int
        How many rounds the phase has.
    blocks : int
        Blocks that the busiest rank sends or receives, whichever is more, in one message.
    combined : int
        Blocks that the busiest rank adds.
    exchanged : int
        Blocks that a pair of ranks sends both ways at once over the network: some networks are slower there.
        Inside a node none are counted, memory has no direction.
    local : bool
        Whether all messages of the phase stay inside nodes.
    """

    rounds: int
    blocks: int
    combined: int = 0
    exchanged: int = 0
    local: bool = False


@dataclass(frozen=True, slots=True)
class Volume:
    """What a plan moves, in blocks; all but `total_sent` is the maximum over ranks.

    Attributes
    ----------
    rounds : int
        Rounds.
    messages : int
        Messages that a rank sends.
    sent, received : int
        Blocks that a rank sends and receives.
    combined : int
        Blocks that a rank adds.
    kept : int
        Blocks that a rank keeps apart: extra memory.
    network_sent, local_sent : int
        The part of `sent` between nodes and the part inside a node.
    total_sent : int
        Blocks that all ranks together send.
    phases : tuple of Phase
        The critical path: bulk-synchronous rounds, those alike put together.
    """

    rounds: int
    messages: int
    sent: int
    received: int
    combined: int
    total_sent: int
    phases: tuple[Phase, ...]
    kept: int = 0
    network_sent: int = 0
    local_sent: int = 0

    @property
    def path(self) -> int:
        """Blocks that pass one after the other, if every round waits for its busiest rank."""
        return sum(phase.rounds * phase.blocks for phase in self.phases)

    @property
    def exchanged(self) -> int:
        """The part of `path` that travels both ways at once between two ranks."""
        return sum(phase.rounds * phase.exchanged for phase in self.phases)


def even(size: int, phases: Iterable[Phase], kept: int = 0) -> Volume:
    """Return the volume of a flat plan in which all ranks do the same in every round."""
    path = merged(phases)
    rounds = sum(phase.rounds for phase in path)
    sent = sum(phase.rounds * phase.blocks for phase in path)
    return Volume(
        rounds=rounds,
        messages=rounds,
        sent=sent,
        received=sent,
        combined=sum(phase.rounds * phase.combined for phase in path),
        total_sent=size * sent,
        phases=path,
        kept=kept,
        network_sent=sent,
    )


def merged(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Drop phases without rounds and put neighbours alike together, so that equal paths compare equal."""
    path: list[Phase] = []
    for phase in phases:
        if phase.rounds == 0:
            continue
        if path and replace(path[-1], rounds=phase.rounds) == phase:
            path[-1] = replace(phase, rounds=path[-1].rounds + phase.rounds)
        else:
            path.append(phase)
    return tuple(path)

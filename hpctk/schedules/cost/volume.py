"""How much a plan moves, in whole blocks: the closed forms that pricing needs.

bytes = blocks / plan.blocks * nbytes. Block counts are exact; the bytes of a real tensor differ by less than
one element per block, because blocks are only almost equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive rounds alike: what the busiest rank does in each of them, in blocks."""

    rounds: int
    #: Sent or received, whichever is more, in one message.
    blocks: int
    #: Added.
    combined: int = 0
    #: Sent both ways at once by a pair of ranks over the network, where some networks are slower. Inside a node none
    #: are counted, memory has no direction.
    exchanged: int = 0
    #: Whether all messages of the phase stay inside nodes.
    local: bool = False


@dataclass(frozen=True, slots=True)
class Volume:
    """What a plan moves, in blocks; all but `total_sent` is the maximum over ranks."""

    rounds: int
    #: Messages that a rank sends; blocks that it sends, receives and adds.
    messages: int
    sent: int
    received: int
    combined: int
    #: Blocks that all ranks together send.
    total_sent: int
    #: The critical path: bulk-synchronous rounds, those alike put together.
    phases: tuple[Phase, ...]
    #: Blocks that a rank keeps apart: extra memory.
    kept: int = 0
    #: The part of `sent` between nodes and the part inside a node.
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

"""What a plan costs on a machine: an alpha-beta-gamma model, bulk synchronous.

A round lasts as long as its busiest rank needs:

    latency_s + message_s * segments
    + byte_s * (bytes + (exchange_factor - 1) * exchanged bytes) + combine_byte_s * added bytes

and rounds follow one another. `price` evaluates that in closed form from the plan's Volume, in a time that
does not grow with the number of ranks (for halving_doubling with its logarithm); `replay_seconds` walks
through all rounds of all ranks and must come to the same result. Phases inside nodes use the machine's local
figures. An engine that overlaps rounds is faster than the model, most of all where rounds do not depend on
each other (rotation).
"""

from collections.abc import Callable, Sequence

from hpctk.errors import SettingError
from hpctk.schedules.core.plan import Plan
from hpctk.schedules.core.registry import build, names
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.proof.tally import Load, loads

__all__ = ["Machine", "best", "price", "replay_seconds", "site"]

Nodes = Sequence[Sequence[int]]


def price(plan: Plan, nbytes: int, machine: Machine) -> float:
    """Return the seconds that `plan` needs for a tensor of `nbytes` bytes, in closed form."""
    _check_bytes(nbytes)
    cut = _Cut(plan.blocks, nbytes, machine)
    return sum(
        phase.rounds
        * cut.seconds([phase.blocks], phase.blocks, phase.exchanged, phase.combined, local=phase.local)
        for phase in plan.volume.phases
    )


def replay_seconds(plan: Plan, nbytes: int, machine: Machine) -> float:
    """Return the seconds of `price`, found by walking through every round of every rank."""
    _check_bytes(nbytes)
    cut = _Cut(plan.blocks, nbytes, machine)
    return sum(cut.round_seconds(row) for row in loads(plan))


def site(machine: Machine, nodes: Nodes | None) -> Machine:
    """Return the machine as the ranks of these nodes see it: one node never uses the network."""
    return machine.inside() if nodes is not None and len(nodes) == 1 else machine


def best(
    kind: str,
    size: int,
    nbytes: int,
    machine: Machine,
    nodes: Nodes | None = None,
    correct: Callable[[Plan], float] = lambda plan: 1.0,
) -> tuple[str, float]:
    """Return the cheapest schedule for a collective, and its price in seconds.

    Parameters
    ----------
    kind, size : str, int
        The collective and its number of ranks.
    nbytes : int
        Bytes of the whole tensor.
    machine : Machine
        Where it runs.
    nodes : sequence of sequences of int, optional
        The ranks of every node. With a single node all schedules get the local figures; with several, only
        those that keep messages inside nodes do.
    correct : callable, optional
        plan -> a factor on its price, such as what a measurement found.
    """
    here = site(machine, nodes)
    plans = [build(name, kind, size, nodes=nodes) for name in names(kind, with_nodes=nodes is not None)]
    prices = [(plan.name, price(plan, nbytes, here) * correct(plan)) for plan in plans]
    return min(prices, key=lambda entry: entry[1])


class _Cut:
    """A tensor cut into blocks, on a machine: turns blocks into seconds."""

    def __init__(self, blocks: int, nbytes: int, machine: Machine) -> None:
        self._blocks, self._nbytes, self._machine = blocks, nbytes, machine

    def seconds(
        self, messages: Sequence[int], blocks: int, exchanged: int, combined: int, *, local: bool
    ) -> float:
        machine = self._machine
        latency_s = machine.local_latency_s if local else machine.latency_s
        byte_s = machine.local_byte_s if local else machine.byte_s
        slowed = blocks + (machine.exchange_factor - 1) * exchanged
        per_block = self._nbytes / self._blocks
        cpu_s = machine.message_s * self._segments(messages)
        return latency_s + cpu_s + per_block * (byte_s * slowed + machine.combine_byte_s * combined)

    def round_seconds(self, row: Sequence[Load]) -> float:
        if not any(load.messages for load in row):
            return 0.0
        return self.seconds(
            max((load.messages for load in row), key=self._segments),
            max(max(load.sent, load.received) for load in row),
            max(load.exchanged for load in row),
            max(load.combined for load in row),
            local=all(load.local for load in row),
        )

    def _segments(self, messages: Sequence[int]) -> int:
        # Whole numbers throughout: a quotient that rounds up across a segment's end would be a jump.
        step = self._blocks * self._machine.segment_bytes
        return sum(-(-size * self._nbytes // step) for size in messages)


def _check_bytes(nbytes: int) -> None:
    if nbytes < 0:
        raise SettingError(f"nbytes={nbytes}: allowed are 0 and more")

"""What a plan costs on a machine: an alpha-beta-gamma model, bulk synchronous.

A round lasts as long as its busiest rank needs:

    latency_s + message_s * segments
    + byte_s * (bytes + (exchange_factor - 1) * exchanged bytes) + combine_byte_s * added bytes

and rounds follow one another. `price` evaluates that in closed form from the plan's Volume, in a time that
does not grow with the number of ranks (for halving_doubling with its logarithm); tests walk through all
rounds of all ranks and come to the same result. Phases inside nodes use the machine's local figures. An
engine that overlaps rounds is faster than the model, most of all where rounds do not depend on each other
(rotation).
"""

from collections.abc import Callable, Sequence

from hpctk.errors import SettingError
from hpctk.schedules.core.plan import Plan
from hpctk.schedules.core.registry import build, names
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.volume import Phase

Nodes = Sequence[Sequence[int]]


def price(plan: Plan, nbytes: int, machine: Machine) -> float:
    """Return the seconds that `plan` needs for a tensor of `nbytes` bytes, in closed form."""
    if nbytes < 0:
        raise SettingError(f"nbytes={nbytes}: allowed are 0 and more")
    return sum(phase.rounds * _round_seconds(phase, plan.blocks, nbytes, machine) for phase in plan.volume.phases)


def _round_seconds(phase: Phase, blocks: int, nbytes: int, machine: Machine) -> float:
    latency_s = machine.local_latency_s if phase.local else machine.latency_s
    byte_s = machine.local_byte_s if phase.local else machine.byte_s
    slowed = phase.blocks + (machine.exchange_factor - 1) * phase.exchanged
    # Whole numbers: a quotient that rounds up across a segment's end would be a jump.
    segments = -(-phase.blocks * nbytes // (blocks * machine.segment_bytes))
    moving_s = nbytes / blocks * (byte_s * slowed + machine.combine_byte_s * phase.combined)
    return latency_s + machine.message_s * segments + moving_s


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
    """Return the cheapest schedule for a collective of `nbytes` over `size` ranks, and its price in seconds.

    `nodes` are the ranks of every node: with a single one all schedules get the local figures; with several, only
    those that keep messages inside nodes do. `correct` gives for a plan a factor on its price, such as what a
    measurement found.
    """
    here = site(machine, nodes)
    plans = [build(name, kind, size, nodes=nodes) for name in names(kind, with_nodes=nodes is not None)]
    prices = [(plan.name, price(plan, nbytes, here) * correct(plan)) for plan in plans]
    return min(prices, key=lambda entry: entry[1])

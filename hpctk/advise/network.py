"""What the transfers of a step cost: the prices of collective schedules, asked for by what a method moves.

There is no second model here: every figure comes from `Calibration.seconds` or, for the layout of ranks that was
measured, from the measured times themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctk.collectives.sparse_allreduce import offers
from hpctk.collectives.tuning.calibration import Calibration, interpolate, layout_of
from hpctk.schedules import Plan, build, ring, rotation
from hpctk.schedules.core.registry import names

#: Bytes of the all-reduce that opens every step of a gradient or update method.
OPENING_BYTES = 128


@dataclass(frozen=True)
class Transfer:
    """One way to move what a step moves: its schedule, its seconds, and what the busiest rank sends."""

    schedule: str
    seconds: float
    sent_bytes: float


class Network:
    """Some ranks on some nodes, and what is known of what joins them."""

    def __init__(self, calibration: Calibration, nodes: list[range]) -> None:
        self.size = sum(len(ranks) for ranks in nodes)
        self._known, self._nodes = calibration, nodes
        self._measured = calibration.measured if layout_of(nodes) == calibration.layout else {}

    def sums(self, nbytes: int) -> list[Transfer]:
        """Return the ways to all-reduce a tensor, the fastest first."""
        return sorted(self._sums(nbytes), key=lambda way: way.seconds)

    def _sums(self, nbytes: int) -> Iterator[Transfer]:
        least = 2 * (self.size - 1) / self.size * nbytes
        for name in names("allreduce", with_nodes=True):
            if self._measured and name not in self._measured:
                continue
            plan = build(name, "allreduce", self.size, nodes=self._nodes)
            seconds = interpolate(self._measured[name], nbytes) if name in self._measured else self._pay(plan, nbytes)
            yield Transfer(name, seconds, _sent(plan, nbytes))
        for name in sorted(set(self._measured) - set(names("allreduce", with_nodes=True))):
            # MPI does not tell what it sends: no all-reduce sends less than this.
            yield Transfer(name, interpolate(self._measured[name], nbytes), least)

    def rings(self, nbytes: int) -> list[Transfer]:
        """Return what torch's own library makes of a large all-reduce: a ring, within nodes first where there are."""
        return [way for way in self.sums(nbytes) if way.schedule in ("ring", "hierarchical")][:1]

    def lists(self, n: int, k: int) -> list[Transfer]:
        """Return the ways to sum sparse vectors of n float32, k of them on each rank, the fastest first."""
        made = offers(self.size, n, k, None, 4, self._pay)
        ways = [Transfer(name, offer.seconds, offer.sent_bytes) for name, offer in made.items()]
        return sorted(ways, key=lambda way: way.seconds)

    def gathered(self, nbytes: int) -> list[Transfer]:
        """Return the all-gather of one message of `nbytes` of each rank."""
        return [self._stages("ring", [(ring.allgather(self.size), self.size * nbytes)])]

    def parts(self, nbytes: int) -> list[Transfer]:
        """Return one pass of AdaCons: all parts of a shard to its owner, the weighted sums round a ring."""
        plans = [rotation.reduce_scatter(self.size, keep=True), ring.allgather(self.size)]
        return [self._stages("rotation", [(plan, nbytes) for plan in plans])]

    def one_bit(self, n: int) -> list[Transfer]:
        """Return signs to the owners of shards, and signs back."""
        plans = [rotation.reduce_scatter(self.size, keep=True), ring.allgather(self.size)]
        scales = [(ring.allgather(self.size), 8 * self.size)] * 2
        return [self._stages("rotation", [*scales, *((plan, -(-n // 8)) for plan in plans)])]

    def broadcasts(self, nbytes: int) -> list[Transfer]:
        """Return the ways to give one rank's tensor to all, the fastest first."""
        plans = [build(name, "broadcast", self.size) for name in names("broadcast")]
        return sorted((self._stages(p.name, [(p, nbytes)]) for p in plans), key=lambda way: way.seconds)

    def opening_s(self) -> float:
        """Return the seconds of the few bytes by which ranks agree."""
        return self.sums(OPENING_BYTES)[0].seconds

    def _stages(self, schedule: str, stages: list[tuple[Plan, int]]) -> Transfer:
        seconds = sum(self._pay(plan, nbytes) for plan, nbytes in stages)
        return Transfer(schedule, seconds, sum(_sent(plan, nbytes) for plan, nbytes in stages))

    def _pay(self, plan: Plan, nbytes: int) -> float:
        return self._known.seconds(plan, nbytes, self._nodes)


def _sent(plan: Plan, nbytes: int) -> float:
    return plan.volume.sent * nbytes / plan.blocks

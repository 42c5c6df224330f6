"""What must hold of a schedule: the proof of its plans, and a price in closed form that is the replayed one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hpctk.errors import HpctkError
from hpctk.schedules import Plan, Schedule
from hpctk.schedules.core.plan import KINDS
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import price
from hpctk.schedules.proof.check import check
from hpctk.schedules.proof.tally import replay_seconds

# Every figure counts, and so many bytes are no multiple of a segment or a block.
_MACHINE = Machine(exchange_factor=1.7, segment_bytes=50_000)
_NBYTES = 12_345_679


def check_schedule(schedule: Schedule, sizes: Iterable[int] = range(1, 33)) -> None:
    """Prove a schedule's plans for all sizes. Raise AssertionError if one does not do what it should.

    That is: no ranks wait for each other in a circle, every contribution arrives exactly once, all ranks end with the
    same bits, and `Plan.volume` is what is really moved. Sizes up to 64 take a second or two.
    """
    assert isinstance(schedule, Schedule), f"{schedule!r} is no hpctk.schedules.Schedule"
    assert schedule.builders, "a schedule without builders does nothing"
    for kind, build in schedule.builders.items():
        assert kind in KINDS, f"{kind!r} is no kind of collective: allowed are {', '.join(KINDS)}"
        for size in sizes:
            for nodes in _nodes(size) if schedule.needs_nodes else (None,):
                plan = build(size, nodes, 0)
                _prove(plan, size, schedule.summary)


def _nodes(size: int) -> list[tuple[tuple[int, ...], ...]]:
    ranks = tuple(range(size))
    in_order = tuple(ranks[start : start + 4] for start in range(0, size, 4))
    dealt = tuple(ranks[start::3] for start in range(min(3, size)))
    return [(ranks,), tuple((rank,) for rank in ranks), in_order, dealt]


def _prove(plan: Plan, size: int, summary: str) -> None:
    assert plan.size == size, f"{summary}: a plan for {plan.size} ranks where {size} were asked for"
    try:
        check(plan)
    except HpctkError as error:
        raise AssertionError(str(error)) from error
    stated, replayed = price(plan, _NBYTES, _MACHINE), replay_seconds(plan, _NBYTES, _MACHINE)
    assert math.isclose(stated, replayed, rel_tol=1e-9), (
        f"{plan.name} {plan.kind} over {size} ranks: priced at {stated} s by its phases, {replayed} s by its rounds"
    )

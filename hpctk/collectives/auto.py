"""Which schedule is best here: the machine's figures, the same on every rank, and the choice."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hpctk.schedules.cost import best
from hpctk.schedules.machine import Machine
from hpctk.world import World

#: Without a calibration: below this many bytes MPI's own all-reduce is hard to beat from Python.
MPI_BELOW_BYTES = 16384

_machines: WeakKeyDictionary[World, Machine] = WeakKeyDictionary()


def machine(here: World) -> Machine:
    if here not in _machines:
        _machines[here] = Machine()
    return _machines[here]


def choose(here: World, kind: str, nbytes: int) -> str:
    if kind == "allreduce" and nbytes < MPI_BELOW_BYTES:
        return "mpi"
    return best(kind, here.size, nbytes, machine(here), here.nodes)[0]

"""All schedules by name. A new one is a file beside this one and an entry in `SCHEDULES`.

Other packages bring theirs by the entry point `hpctk.schedules` (docs/extend.md). Those run where they are named, and
are never chosen by "auto": a rank on which the package is missing would choose another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpctk import plugins
from hpctk.errors import SettingError
from hpctk.nearest import hint
from hpctk.schedules import binomial, halving_doubling, hierarchical, recursive_doubling, ring, rotation
from hpctk.schedules.core import split
from hpctk.schedules.core.plan import KINDS, Plan

#: Not a plan: an all-reduce without messages, see collectives.engine.shared_memory_run.
SHARED_MEMORY = "shared_memory"
#: A plan, and where nodes share memory an all-reduce with messages between nodes alone: engine.hierarchical_run.
HIERARCHICAL = "hierarchical"
Nodes = Sequence[Sequence[int]]
Builder = Callable[[int, Nodes | None, int], Plan]


@dataclass(frozen=True)
class Schedule:
    """One line about a schedule, and how to build its plan for each kind of collective it knows."""

    summary: str
    builders: Mapping[str, Builder]
    needs_nodes: bool = False


def _by_size(make: Callable[[int], Plan]) -> Builder:
    return lambda size, nodes, root: make(size)


def _by_root(make: Callable[[int, int], Plan]) -> Builder:
    return lambda size, nodes, root: make(size, root)


def _by_nodes(make: Callable[[Nodes], Plan]) -> Builder:
    def build(size: int, nodes: Nodes | None, root: int) -> Plan:
        if nodes is None:
            raise SettingError("nodes=None: this schedule needs the ranks of every node")
        plan = make(nodes)
        if plan.size != size:
            raise SettingError(f"nodes have {plan.size} ranks in all, but size={size}")
        return plan

    return build


SCHEDULES: Mapping[str, Schedule] = {
    "ring": Schedule(
        "neighbours only, least volume; many rounds",
        {
            "allreduce": _by_size(ring.allreduce),
            "reduce_scatter": _by_size(ring.reduce_scatter),
            "allgather": _by_size(ring.allgather),
        },
    ),
    "rotation": Schedule(
        "every block straight to its owner, least volume; everyone talks to everyone",
        {
            "allreduce": _by_size(rotation.allreduce),
            "reduce_scatter": _by_size(rotation.reduce_scatter),
            "allgather": _by_size(rotation.allgather),
        },
    ),
    "recursive_doubling": Schedule(
        "whole tensors between partners, fewest rounds; for small tensors",
        {
            "allreduce": _by_size(recursive_doubling.allreduce),
            "sparse_allreduce": _by_size(recursive_doubling.allreduce),
        },
    ),
    "halving_doubling": Schedule(
        "halves, quarters, ... between partners: little volume in few rounds",
        {"allreduce": _by_size(halving_doubling.allreduce)},
    ),
    "binomial": Schedule(
        "a tree to rank 0 and back; broadcast from any root",
        {"broadcast": _by_root(binomial.broadcast), "allreduce": _by_size(binomial.allreduce)},
    ),
    "hierarchical": Schedule(
        "shared memory inside nodes, parallel rings between them",
        {"allreduce": _by_nodes(hierarchical.allreduce)},
        needs_nodes=True,
    ),
    "allgather": Schedule(
        "everyone's sparse list round a ring, summed by everyone; for few ranks",
        {"sparse_allreduce": _by_size(ring.allgather)},
    ),
    "split": Schedule(
        "each rank sums one range of indices, balanced by load; then round a ring",
        {"sparse_allreduce": _by_size(split.allreduce)},
    ),
}


def build(name: str, kind: str, size: int, *, nodes: Nodes | None = None, root: int = 0) -> Plan:
    """Return the plan of a schedule for `size` ranks.

    Parameters
    ----------
    name : str
        A key of `SCHEDULES`, or one of `offered`.
    kind : str
        What to do: one of `KINDS`. A "sparse_allreduce" is an all-reduce, or an all-gather that all ranks sum up.
    nodes : sequence of sequences of int, optional
        The ranks of every node, for schedules that use them; the others ignore it.
    root : int
        Where a broadcast starts; the other kinds ignore it.

    Raises
    ------
    SettingError
        For an unknown name, or a kind that this schedule does not know; the text lists the known ones.
    """
    if name not in SCHEDULES and name not in offered():
        known = ", ".join([*(names(kind, with_nodes=True) if kind in KINDS else SCHEDULES), *offered()])
        raise SettingError(
            f"schedule={name!r}: {hint(name, SCHEDULES)}known are {known}; where one may choose also auto, and for "
            f"all-reduce {SHARED_MEMORY} and mpi, or torch on a process group of torch.distributed"
        )
    builders = by_name(name).builders
    if kind not in builders:
        raise SettingError(f"kind={kind!r}: schedule {name!r} knows {', '.join(builders)}")
    return builders[kind](size, nodes, root)


def offered() -> list[str]:
    """Return the names of the schedules that other packages bring. Imports none of them."""
    return plugins.names(plugins.SCHEDULES, {*SCHEDULES, SHARED_MEMORY, "auto", "mpi", "torch", "dense"})


def by_name(name: str) -> Schedule:
    """Return a schedule of hpctk or of another package, whose name is known.

    Raise SettingError where another package's cannot be loaded, or is none.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    found = plugins.load(plugins.SCHEDULES, name)
    if not isinstance(found, Schedule):
        raise plugins.refuse(plugins.SCHEDULES, name, found, "a hpctk.schedules.Schedule")
    return found


#: As `build`, with nodes as tuples; a plan is data, so one may serve many times.
cached_plan = lru_cache(maxsize=1024)(build)


def names(kind: str, *, with_nodes: bool = False) -> list[str]:
    """Return the schedules of hpctk that know `kind`; those that need nodes only if there are any."""
    if kind not in KINDS:
        raise SettingError(f"kind={kind!r}: allowed are {', '.join(KINDS)}")
    known = (item for item in SCHEDULES.items() if kind in item[1].builders)
    return [name for name, schedule in known if with_nodes or not schedule.needs_nodes]

"""Which schedule is best here: the calibration of these ranks, the same on every one, and the choice.

The file is read by rank 0 at the first use and given to the others: ranks that chose differently
would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctk.collectives.tuning.calibration import POLLED_BELOW_BYTES, Calibration, read
from hpctk.collectives.tuning.learning import Learning, Trial
from hpctk.comm import environment
from hpctk.comm.world import World
from hpctk.errors import SettingError
from hpctk.schedules import Plan, build, cached_plan
from hpctk.schedules.core.registry import SHARED_MEMORY
from hpctk.schedules.cost.machine import Machine


@dataclass
class Choice:
    """A calibration, and what was chosen by it so far: (kind, bytes) -> schedule.

    `summing` are the same choices for sums and means as names on these ranks: bytes -> schedule. `learning` is there
    where the first calls of each size try what could be chosen.
    """

    calibration: Calibration
    chosen: dict[tuple[str, int], str] = field(default_factory=dict)
    summing: dict[int, str] = field(default_factory=dict)
    learning: Learning | None = None


def current(here: World) -> Choice:
    """Return the choice in use. Collective over the communicator at the first call."""
    choice: Choice | None = here.attached.get(Choice)
    if choice is None:
        text, learns = here.run_on_root(
            "reading the calibration",
            lambda: (read(environment.calibration_file()), environment.read("HPCTK_AUTO") == "learn"),
        )
        known = Calibration.from_json(text) if text else Calibration()
        choice = here.attached[Choice] = Choice(known, learning=Learning() if learns else None)
    return choice


def calibration(here: World) -> Calibration:
    """Return the calibration in use. Collective over the communicator at the first call."""
    return current(here).calibration


def use(here: World, new: Calibration) -> None:
    """Use another calibration from now on; every rank must be given the same."""
    here.attached[Choice] = Choice(new)


def resolved(here: World) -> dict[str, Any]:
    """Return what was resolved so far, to be used again by `resolve`. Collective at the first call."""
    choice = current(here)
    chosen = [[kind, nbytes, schedule] for (kind, nbytes), schedule in choice.chosen.items()]
    return {"calibration": choice.calibration.to_json(), "chosen": chosen}


def resolve(here: World, kept: Mapping[str, Any]) -> None:
    """Choose from now on as `resolved` says; every rank must be given the same."""
    chosen = {(str(kind), int(nbytes)): str(schedule) for kind, nbytes, schedule in kept["chosen"]}
    here.attached[Choice] = Choice(Calibration.from_json(kept["calibration"]), chosen, learning=current(here).learning)


def trial(here: World, nbytes: int) -> Trial | None:
    """Return what an all-reduce of so many bytes, in which the caller waits, is to try; None where nothing is tried.

    Collective over the communicator at the first call; whoever makes the call says how long it `took`.
    """
    choice = current(here)
    if choice.learning is None or ("allreduce", nbytes) in choice.chosen:
        return None
    return choice.learning.trial(here, choice.calibration, nbytes)


def took(here: World, tried: Trial, seconds: float) -> None:
    """Take note of how long a trial took on this rank. Collective over the communicator."""
    choice = current(here)
    if choice.learning is not None:
        choice.calibration = choice.learning.took(here, choice.calibration, tried, seconds)


def name_of(here: World, schedule: str) -> str:
    """Return a schedule's name on these ranks: the library's own is "mpi" in calibrations and checkpoints."""
    return here.native.name if schedule == "mpi" else schedule


def machine(here: World) -> Machine:
    """Return the machine's figures in use. Collective over the communicator at the first call."""
    return current(here).calibration.machine


def check(here: World, kind: str, schedule: str) -> None:
    """Raise SettingError where a schedule is not known on these ranks."""
    if schedule == SHARED_MEMORY and kind == "allreduce":
        if not here.shares_memory and here.size > 1:
            raise SettingError(f"schedule={schedule!r}: needs all ranks on one node, joined by MPI")
    elif schedule not in ("auto", here.native.name):
        build(schedule, kind, here.size, nodes=here.nodes)


def plan_for(here: World, kind: str, nbytes: int, schedule: str, root: int = 0) -> Plan:
    """Return the plan of a schedule, or of the best one where it is "auto".

    Collective over the communicator at the first call.
    """
    name = choose(here, kind, nbytes) if schedule == "auto" else schedule
    return cached_plan(name, kind, here.size, nodes=here.nodes, root=root)


def choose(here: World, kind: str, nbytes: int) -> str:
    """Return the schedule for a collective of `nbytes` bytes. Collective over the communicator at the first call."""
    choice = current(here)
    schedule = choice.chosen.get((kind, nbytes))
    if schedule is None:
        # The window is memory, too: not for those who never reduce more than a few bytes.
        shares = here.shares_memory and (nbytes < POLLED_BELOW_BYTES or here.shared_window() is not None)
        schedule = choice.calibration.best(
            kind, here.size, nbytes, here.nodes, shares_memory=shares, blocks=here.native.blocks,
            library=here.native.name,
        )  # fmt: skip
        choice.chosen[kind, nbytes] = schedule
    name = name_of(here, schedule)
    if kind == "allreduce":
        choice.summing[nbytes] = name
    return name

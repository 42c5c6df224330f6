"""Which schedule is best here: the calibration of these ranks, the same on every one, and the choice.

The file is read by rank 0 at the first use and given to the others: ranks that chose differently
would wait for each other forever.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hpctk import environment
from hpctk.collectives.calibration import Calibration, read
from hpctk.schedules.machine import Machine
from hpctk.world import World

_calibrations: WeakKeyDictionary[World, Calibration] = WeakKeyDictionary()
_choices: WeakKeyDictionary[World, dict[tuple[str, int], str]] = WeakKeyDictionary()


def calibration(here: World) -> Calibration:
    """Return the calibration in use. Collective over the communicator at the first call."""
    if here not in _calibrations:
        text = here.run_on_root("reading the calibration", lambda: read(environment.calibration_file()))
        use(here, Calibration.from_json(text) if text else Calibration())
    return _calibrations[here]


def use(here: World, new: Calibration) -> None:
    """Use another calibration from now on; every rank must be given the same."""
    _calibrations[here] = new
    _choices[here] = {}


def machine(here: World) -> Machine:
    """Return the machine's figures in use. Collective over the communicator at the first call."""
    return calibration(here).machine


def choose(here: World, kind: str, nbytes: int) -> str:
    """Return the schedule for a collective of `nbytes` bytes. Collective over the communicator at the first call."""
    known = calibration(here)
    choices = _choices[here]
    if (kind, nbytes) not in choices:
        choices[kind, nbytes] = known.best(kind, here.size, nbytes, here.nodes)
    return choices[kind, nbytes]

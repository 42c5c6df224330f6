"""Learning which all-reduce is the fastest from calls that a program makes anyway (HPCTK_AUTO=learn).

Sizes from one power of two to the next are a class. The first calls of a class take turns among the schedules that
could be chosen, TRIALS calls each. What counts of a call is the time of the rank on which it was shortest, which is the
one that came last and waited for nobody; of the calls, the shortest. The fastest schedule is taken from then on, and
all times are kept with the calibration: later runs choose by them, and try nothing of that class again.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctk.collectives.tuning.calibration import Calibration, keep, place_of, read, size_class
from hpctk.comm import environment
from hpctk.comm.world import World
from hpctk.log import log
from hpctk.schedules.core.registry import HIERARCHICAL, SHARED_MEMORY, names

#: Calls by each schedule: the first of them makes room, and finds its peers.
TRIALS = 3


@dataclass(frozen=True)
class Trial:
    """One call: the class of its size, and the schedule to take."""

    of_size: int
    schedule: str


class Learning:
    """What is being tried: the class of sizes -> schedule -> seconds of its calls so far. The same on all ranks."""

    def __init__(self) -> None:
        self._times: dict[int, dict[str, list[float]]] = {}

    def trial(self, here: World, known: Calibration, nbytes: int) -> Trial | None:
        """Return what the next call of so many bytes is to try, None where there is nothing to learn. Local."""
        of_size = size_class(nbytes)
        times = self._times.get(of_size)
        if times is None:
            if here.size == 1 or known.learned_times(here.native.name, here.nodes, nbytes):
                return None
            times = self._times[of_size] = {name: [] for name in candidates(here)}
        return Trial(of_size, min(times, key=lambda name: len(times[name])))

    def took(self, here: World, known: Calibration, trial: Trial, seconds: float) -> Calibration:
        """Take note of a trial; return the calibration to choose by from now on. Collective over the communicator."""
        nanoseconds = here.minimum([round(seconds * 1e9)], "learning how long calls take")[0]
        times = self._times[trial.of_size]
        times[trial.schedule].append(nanoseconds / 1e9)
        if any(len(calls) < TRIALS for calls in times.values()):
            return known
        del self._times[trial.of_size]
        found = {name: min(calls) for name, calls in times.items()}
        place = place_of(here.native.name, here.nodes)
        if here.rank == 0:
            _keep(place, trial.of_size, found)
        return known.with_learned(place, trial.of_size, found)


def candidates(here: World) -> list[str]:
    """Return the all-reduces that can be chosen among these ranks, "mpi" for the library's own. Collective at first."""
    found = ["mpi", *names("allreduce")]
    if here.shares_memory and here.shared_window() is not None:
        found.append(SHARED_MEMORY)
    return [*found, HIERARCHICAL] if len(here.nodes) > 1 else found


def _keep(place: str, of_size: int, times: dict[str, float]) -> None:
    """Add what was learned to the calibration file as it is now: another job may have learned meanwhile."""
    path = environment.calibration_file()
    try:
        text = read(path)
        now = Calibration.from_json(text) if text else Calibration()
        keep(path, now.with_learned(place, of_size, times).to_json())
    except Exception as error:
        log.warning("what was learned about schedules is not kept (%s: %s)", type(error).__name__, error)

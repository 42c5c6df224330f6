"""The seconds that a job has used, and rank 0's verdict on whether they are too many."""

from __future__ import annotations

import time

from hpctk.comm.world import World

#: Steps between two verdicts: each is a tiny all-reduce.
STEPS = 8


class Clock:
    """Runs from the moment it is made, on top of the seconds used before.

    Parameters
    ----------
    here : World
    budget_s : float or None
        How long the job may take.
    used_s : float
        What it used before it was stopped and resumed.
    """

    def __init__(self, here: World, budget_s: float | None, used_s: float) -> None:
        self._here, self._budget_s = here, budget_s
        self._began = time.perf_counter() - used_s
        self._asked: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds used so far, on this rank."""
        return time.perf_counter() - self._began

    def is_up(self, meeting: int) -> bool:
        """Return whether the budget is used up; only asked at a new meeting, and told the same on all ranks.

        Collective over the communicator at a new meeting. `meeting` is a number that all ranks come to: of blocks of
        steps, or of rounds where ranks do different numbers of steps.
        """
        if self._budget_s is None or meeting == self._asked:
            return False
        self._asked = meeting
        over = self._here.rank == 0 and self.seconds >= self._budget_s
        return self._here.minimum([0 if over else 1], "asking rank 0 for the time") == [0]

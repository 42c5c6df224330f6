"""When to save: every so many steps, every so many seconds, and before a job is ended from outside.

    checkpoints = hpctk.Checkpoints("run/checkpoints", opt, model, every_s=600)
    kept = checkpoints.resume() or {"epoch": 0}
    for epoch in range(kept["epoch"], epochs):
        for batch in ...:
            ...
            opt.step()
            checkpoints.after_step(epoch=epoch)

All ranks must decide alike. Steps they can count by themselves; clocks and signals they cannot, so they meet for them
about every MEETING_S seconds: how many steps that is, rank 0 says each time.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from hpctk.checkpoint import folder
from hpctk.checkpoint.save_load import load_checkpoint, save_checkpoint
from hpctk.checkpoint.training import Trainer
from hpctk.comm import environment, exit_status, postmortem
from hpctk.log import log
from hpctk.settings import Setting

#: Seconds between two meetings, about; and the most steps.
MEETING_S, MEETING_STEPS = 0.25, 1000
EVERY_STEPS = Setting("steps between two checkpoints", int, at_least=1, optional=True)
EVERY_S = Setting("seconds between two checkpoints", float, above=0, at_most=math.inf, optional=True)
#: What Slurm's templates send (NCCL has taken USR1), and what everyone else sends.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class Stopped(SystemExit):
    """All ranks have saved and leave: a signal asked for it (the exit status is 85), or to get lost ranks back (86)."""

    def __init__(self, message: str, status: int = exit_status.SAVED) -> None:
        super().__init__(status)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopSignals:
    """Listens for SIGTERM and SIGUSR2; `heard` is the number of the first that came, 0 before.

    Python runs no handler inside a blocking call of MPI, and a rank that stopped alone would leave the others waiting:
    so a handler only takes note.
    """

    def __init__(self) -> None:
        self.heard = 0
        self._before = {}
        # Elsewhere Python allows no handlers; then only the other ranks can be told to stop.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or number
        # Who asks twice does not want to wait for a step to end.
        self.close()

    def close(self) -> None:
        """Let the signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}


class Checkpoints:
    """The checkpoints of one training.

    Collective over the optimizer's communicator: making one, `resume`, `after_step`, `save`.

    After SIGTERM or SIGUSR2 on any rank all ranks save at the same step boundary and raise Stopped, which ends the
    program with status 85. A second signal does what it did before. Under `hpctk mpirun --respawn` ranks that have gone
    on without a lost one leave with status 86 after their next checkpoint, to be begun anew with all. So a program has
    one of these: what else is to be kept goes into its extra.

    Parameters
    ----------
    path : str or Path
        Their folder; made where it is missing. An error now if it cannot be written.
    opt : DistributedOptimizer
    model : torch.nn.Module
    every_steps : int, optional
        Save after every so many steps. With asynchronous GRAWA: rounds.
    every_s : float, optional
        Save after so many seconds, on rank 0's clock.
    """

    def __init__(
        self,
        path: str | Path,
        opt: Trainer,
        model: torch.nn.Module,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
    ) -> None:
        self._path, self._opt, self._model = Path(path), opt, model
        here = opt.world
        with here.shared_errors(f"keeping checkpoints in {path}"):
            EVERY_STEPS.check("every_steps", every_steps)
            EVERY_S.check("every_s", every_s)
            self._path.mkdir(parents=True, exist_ok=True)
            folder.check_writable(self._path, here.rank)
            self._respawns = bool(environment.read("HPCTK_RESPAWN"))
        same = [("path", path), ("every_steps", every_steps), ("every_s", every_s), ("HPCTK_RESPAWN", self._respawns)]
        here.agree("Checkpoints", same)
        self._every_steps, self._every_s = every_steps, every_s
        self._signals = StopSignals()
        self._start_counting()

    def _start_counting(self) -> None:
        """Begin from rank 0's number of steps: ranks that ran out of data in join() count fewer. Collective."""
        here = self._opt.world
        self._calls = here.run_on_root("counting steps", lambda: self._opt.stats.steps)
        self._saved_s = self._met_s = time.monotonic()
        self._marks = self._met = self._now()
        self._next_meeting = self._met + 1

    def resume(self) -> dict[str, Any] | None:
        """Load the newest whole checkpoint; return its extra, or None where there is none yet. Collective."""
        there = self._opt.world.run_on_root(
            f"looking for checkpoints in {self._path}", lambda: bool(folder.complete(self._path))
        )
        extra = load_checkpoint(self._path, self._opt, self._model) if there else None
        self._start_counting()
        return extra

    def after_step(self, **extra: Any) -> None:
        """Save if it is time to; raise Stopped then, after a signal or to get lost ranks back.

        Call it after every step, on every rank. Collective now and then, on all ranks in the same step. Not inside
        `opt.join()`.
        """
        self._calls += 1
        now = self._now()
        # With asynchronous GRAWA ranks are together only in rounds; between two rounds nothing can be agreed on.
        if now == self._marks:
            return
        self._marks = now
        due = self._every_steps is not None and now % self._every_steps == 0
        number = 0
        if now >= self._next_meeting:
            number, by_clock = self._meet(now)
            # Who never saves by itself does so as soon as ranks can be had back.
            due = due or by_clock or (self._lacks_ranks and self._every_steps is None and self._every_s is None)
        if due or number:
            place = self.save(**extra)
        if number:
            why = f"stopped by {signal.Signals(number).name}"
            self._leave(f"{why} and saved in {place}; run again with the same folder to go on", exit_status.SAVED)
        # Asked after the save, in which a rank may have been lost.
        if due and self._lacks_ranks:
            self._leave(f"saved in {place}, to go on from there with all ranks", exit_status.RESPAWN)

    def save(self, **extra: Any) -> Path:
        """Save now, and return where. Collective."""
        place = save_checkpoint(self._path, self._opt, self._model, **extra)
        self._saved_s = time.monotonic()
        return place

    @property
    def heard(self) -> int:
        """The number of the signal that this rank has heard, 0 for none; `after_step` acts on it, on all ranks."""
        return self._signals.heard

    def close(self) -> None:
        """Listen for signals no longer."""
        self._signals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _now(self) -> int:
        """Return what all ranks count alike: steps, or rounds where ranks do as many steps as they can."""
        if self._opt.method.lockstep:
            return self._calls
        return self._opt.stats.counts.get("rounds", 0)

    def _meet(self, now: int) -> tuple[int, bool]:
        """Return the signal that a rank has heard, 0 for none, and whether rank 0's clock says to save."""
        here, clock = self._opt.world, time.monotonic()
        pace = (clock - self._met_s) / max(1, now - self._met)
        steps = min(MEETING_STEPS, max(1, int(MEETING_S / max(pace, 1e-9))))
        by_clock = self._every_s is not None and clock - self._saved_s >= self._every_s

        def meet() -> list[int]:
            # Of all ranks the smallest counts: what only rank 0 may say is 0 and most elsewhere.
            mine = [-int(by_clock), steps] if here.rank == 0 else [0, MEETING_STEPS]
            return here.minimum([-self._signals.heard, *mine], "meeting after a step")

        least = self._opt.together(meet)
        self._met_s, self._met, self._next_meeting = time.monotonic(), now, now + least[2]
        return -least[0], bool(least[1])

    @property
    def _lacks_ranks(self) -> bool:
        """Whether ranks were lost that can be had back: the same on all ranks."""
        return self._respawns and self._opt.world.lost_ranks > 0

    def _leave(self, text: str, status: int) -> None:
        if self._opt.world.rank == 0:
            log.warning("%s", text)
        # Now, not at exit: a launcher may end this process as soon as another has left.
        self._opt.close_stats()
        # Nobody leaves before all have: who ends first may take the others along.
        self._opt.together(lambda: self._opt.world.barrier("stopping"))
        postmortem.leave_with(status)
        raise Stopped(text, status)

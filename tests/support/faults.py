"""Faults of ranks as a sentence: who fails, when, and at which point of a step.

    faults = Faults().kill(rank=2, step=7).kill(rank=0, step=9, during="exchange").stall(rank=1, step=3, seconds=2)
    faults.watch(rank)
    for t in range(steps):
        faults.begin(t)
        ...

Ranks are numbered as they were at the start. The points of a step, each a call of hpctk's in which it fires:

    "step"       before anything of it
    "status"     before the message that opens it
    "exchange"   after some messages of the payload
    "decision"   the exchange is over here; nothing counts yet
    "commit"     it counts, here and maybe elsewhere
    "shrink"     while the ranks that are left meet
    "save"       in the middle of a checkpoint
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

from hpctk.checkpoint import rank_file
from hpctk.collectives.engine.engine import Engine
from hpctk.comm.mpi import survivors
from hpctk.comm.mpi.allreduce import MpiAllreduce
from hpctk.comm.mpi.world import MpiTransport, MpiWorld
from hpctk.methods.core.step_status import StatusExchange

POINTS = ("step", "status", "exchange", "decision", "commit", "shrink", "save")


@dataclass(frozen=True)
class Fault:
    """One fault: `seconds` is how long a rank stalls, None where it is killed."""

    rank: int
    step: int
    during: str = "step"
    seconds: float | None = None

    def strike(self) -> None:
        """Let it happen to this process."""
        if self.seconds is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            time.sleep(self.seconds)


class Faults:
    """Faults that are to happen."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.faults = faults
        self._rank, self._step = -1, -1
        self._done: set[Fault] = set()

    def kill(self, rank: int, step: int, during: str = "step") -> Faults:
        """Kill a rank."""
        return self._with(Fault(rank, step, during))

    def stall(self, rank: int, step: int, seconds: float, during: str = "step") -> Faults:
        """Let a rank do nothing for some seconds."""
        return self._with(Fault(rank, step, during, seconds))

    def drop_host(self, ranks: list[int], step: int, during: str = "step") -> Faults:
        """Kill all ranks of a host."""
        return Faults((*self.faults, *(Fault(rank, step, during) for rank in ranks)))

    def _with(self, fault: Fault) -> Faults:
        if fault.during not in POINTS:
            raise ValueError(f"during={fault.during!r}: one of {', '.join(POINTS)}")
        return Faults((*self.faults, replace(fault)))

    def lost_before(self, steps: int) -> dict[int, list[int]]:
        """Return who is lost before each step, as a simulation wants it: a step that does not count is done anew."""
        lost: dict[int, list[int]] = {}
        for fault in self.faults:
            if fault.seconds is None:
                step = fault.step + (fault.during == "commit")
                lost.setdefault(min(step, steps), []).append(fault.rank)
        return lost

    def watch(self, rank: int) -> None:
        """Look at every point from now on; this process is rank `rank`."""
        self._rank = rank
        self._before(StatusExchange, "exchange", "status")
        self._before(MpiTransport, "isend", "exchange", after=1)
        self._before(MpiAllreduce, "allreduce_at_once", "exchange")
        self._before(Engine, "start_shared", "exchange")
        self._before(MpiWorld, "decide", "decision")
        self._before(survivors, "_copy_or_fail", "shrink")
        self._before(rank_file, "write", "save")
        decide = MpiWorld.decide

        def decided(world: Any, **done: bool) -> bool:
            counts = decide(world, **done)
            if counts:
                self.at("commit")
            return counts

        MpiWorld.decide = decided  # type: ignore[method-assign]

    def _before(self, owner: Any, name: str, point: str, after: int = 0) -> None:
        inner = getattr(owner, name)
        calls = [0]

        def watched(*args: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                calls[0] = 0
                self.at(point)
            return inner(*args, **named)

        setattr(owner, name, watched)

    def begin(self, step: int) -> None:
        """Say which step comes."""
        self._step = step
        self.at("step")

    def at(self, point: str) -> None:
        """Let the faults of this rank happen whose time has come."""
        for fault in self.faults:
            due = (fault.rank, fault.step, fault.during) == (self._rank, self._step, point)
            if due and fault not in self._done:
                self._done.add(fault)
                fault.strike()

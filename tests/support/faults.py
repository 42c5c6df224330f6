"""Faults of ranks as a sentence: who fails, when, and at which point of a step.

    faults = Faults().kill(rank=2, step=7).kill(rank=0, during="exchange").drop_host(1, step=9).stall(rank=1, seconds=5)
    faults.watch(rank, hosts=world.nodes)
    for t in range(steps):
        faults.begin(t)
        ...

Ranks and hosts are numbered as they were at the start. Without a step a fault happens the first time that its point is
reached. The points of a step, each a call of hpctk's in which it fires:

    "step"       before anything of it
    "status"     before the message that opens it
    "exchange"   before the first message of the payload
    "segment"    after some messages of the payload
    "decision"   the exchange is over here; nothing counts yet
    "commit"     it counts, here and maybe elsewhere
    "shrink"     while the ranks that are left meet
    "again"      before the first message of the payload when they do the work again
    "save"       in the middle of a checkpoint

A step in which a rank has no such message ends without that point: its fault then happens at the decision, which
comes to the same.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctk.checkpoint import rank_file
from hpctk.collectives.engine.engine import Engine
from hpctk.comm.mpi import survivors
from hpctk.comm.mpi.allreduce import MpiAllreduce
from hpctk.comm.mpi.world import MpiTransport, MpiWorld
from hpctk.methods.core.step_status import StatusExchange

POINTS = ("step", "status", "exchange", "segment", "decision", "commit", "shrink", "again", "save")
#: Those that may not come in a step.
BEFORE_DECISION = ("status", "exchange", "segment")


@dataclass(frozen=True)
class Fault:
    """One fault, of a rank or of a host: `seconds` is how long it stalls, None where it is lost."""

    rank: int | None
    step: int | None
    during: str = "step"
    seconds: float | None = None
    host: int | None = None

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
        self._rank, self._step, self._messages = -1, -1, 0
        #: "shrink" once ranks have met in this step, "again" once they have opened it again; "" once they have sent.
        self._last = ""
        self._hosts: Sequence[Sequence[int]] = ()
        self._done: set[Fault] = set()

    def kill(self, rank: int, step: int | None = None, during: str = "step") -> Faults:
        """Kill a rank."""
        return self._with(Fault(rank, step, during))

    def stall(self, rank: int, seconds: float, step: int | None = None, during: str = "step") -> Faults:
        """Let a rank do nothing for some seconds."""
        return self._with(Fault(rank, step, during, seconds))

    def drop_host(self, host: int, step: int | None = None, during: str = "step") -> Faults:
        """Kill all ranks of a host."""
        return self._with(Fault(None, step, during, host=host))

    def _with(self, fault: Fault) -> Faults:
        if fault.during not in POINTS:
            raise ValueError(f"during={fault.during!r}: one of {', '.join(POINTS)}")
        return Faults((*self.faults, fault))

    def ranks_of(self, fault: Fault) -> Sequence[int]:
        """Return whom a fault happens to."""
        return self._hosts[fault.host] if fault.host is not None else [fault.rank or 0]

    def lost_before(self, steps: int) -> dict[int, list[int]]:
        """Return who is lost before each step, as a simulation wants it: a step that does not count is done anew."""
        lost: dict[int, list[int]] = {}
        for fault in self.faults:
            if fault.seconds is None:
                step = (fault.step or 0) + (fault.during == "commit")
                lost.setdefault(min(step, steps), []).extend(self.ranks_of(fault))
        return lost

    def watch(self, rank: int, hosts: Sequence[Sequence[int]] = ()) -> Faults:
        """Look at every point from now on; this process is rank `rank`, and `hosts` are the ranks of each host."""
        self._rank, self._hosts = rank, hosts
        self._before(StatusExchange, "exchange", "status")
        for owner, name in ((MpiTransport, "isend"), (MpiAllreduce, "allreduce_at_once"), (Engine, "start_shared")):
            self._before(owner, name, "message")
        self._before(MpiWorld, "decide", "decision")
        self._before(survivors, "_of_the_living", "shrink")
        self._before(rank_file, "write", "save")
        decide = MpiWorld.decide

        def decided(world: Any, **done: bool) -> bool:
            counts = decide(world, **done)
            if counts:
                self.at("commit")
            return counts

        MpiWorld.decide = decided  # type: ignore[method-assign]
        return self

    def _before(self, owner: Any, name: str, point: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            if point == "message":
                if self._last == "again":
                    self._last = ""
                    self.at("again")
                self._messages += 1
                self.at("exchange" if self._messages == 1 else "segment")
            else:
                self.at(point)
                if point == "shrink":
                    self._last = point
                elif point == "status" and self._last:
                    self._last = "again"
            return inner(*args, **named)

        setattr(owner, name, watched)

    def begin(self, step: int) -> None:
        """Say which step comes."""
        self._step, self._messages, self._last = step, 0, ""
        self.at("step")

    def at(self, point: str) -> None:
        """Let the faults of this rank happen whose time has come."""
        for fault in self.faults:
            here = fault.during == point or (point == "decision" and fault.during in BEFORE_DECISION)
            due = here and fault.step in (None, self._step) and self._rank in self.ranks_of(fault)
            if due and fault not in self._done:
                self._done.add(fault)
                fault.strike()

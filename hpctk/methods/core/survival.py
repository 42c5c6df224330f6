"""Collective work that is done by all ranks that live, or by none: how training goes on without a rank that is lost.

    keep      what the attempt is going to change, so that it can be undone
    attempt   prepare and exchange, as if nothing could happen
    decide    all that live together: has everybody done it, those included that were lost since? (World.decide)
              yes, on all ranks: it counts, and is applied. No, on all ranks:
    shrink    the communicator becomes that of the survivors; undo; methods forget the lost ranks; attempt it again

What an attempt does not change needs no copy: where a step lasts as long as a pass over the model, results are applied
after the decision (SAEF, SASG), or lie beside the gradients until then (gradient methods).

A rank that fails in the attempt revokes the communicator, which gets all others out of theirs. Nobody goes on to the
next work before the decision, so survivors are never a step apart, and each has what it needs to go on: a step counts
on all of them or on none. What a rank holds for the next attempt is its gradient, or its model in a round.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from hpctk.comm.world import World
from hpctk.errors import PeerError, SettingError
from hpctk.log import log
from hpctk.methods.core.step_status import StatusExchange

T = TypeVar("T")

#: Puts back what an attempt has changed. Local.
Undo = Callable[[], None]
#: Called with the numbers that the ranks that are left had before, in the order of their new ones.
OnChange = Callable[[list[int]], object]

CHOICES = ("raise", "shrink")


class Recovery(Protocol):
    """What is to be done once with what lost ranks had.

    Attributes
    ----------
    pending : bool
        Whether there is anything to do; the same on all ranks.
    """

    @property
    def pending(self) -> bool: ...

    def keep(self) -> Undo:
        """Return what undoes `recover`. Local."""

    def recover(self) -> None:
        """Do it. Collective over the communicator. In place."""

    def commit(self) -> None:
        """Take it for done. Local."""


class Survival:
    """The ranks of a World, some of which may be lost.

    Parameters
    ----------
    world : World
    forget : callable
        Lets a method forget the lost ranks; given the numbers that those that are left had before. Local.
    recovery : Recovery, optional
        Cares for what lost ranks had, at the beginning of the attempt that follows.

    Attributes
    ----------
    lost : int
        Ranks lost so far.
    inside : bool
        Whether collective work is under way: it is begun anew where ranks are lost.
    """

    def __init__(self, world: World, forget: OnChange, recovery: Recovery | None = None) -> None:
        self._world, self._forget, self._recovery = world, forget, recovery
        self.lost = 0
        self._listeners: list[OnChange] = []
        #: The ranks that are left, by their numbers before, where the listeners have not been told yet.
        self._changed: list[int] | None = None
        self.inside = False
        world.expect_losses()
        world.attached.setdefault(Survival, weakref.WeakSet()).add(self)

    def listen(self, listener: OnChange) -> None:
        """Call `listener` whenever ranks were lost, once the work in which that was found out is done."""
        self._listeners.append(listener)

    def together(
        self, attempt: Callable[[], T], keep: Callable[[], Undo] | None = None, apply: Callable[[T], None] | None = None
    ) -> T:
        """Return what `attempt` returns, once it is done by all ranks that live. Collective over the communicator.

        Parameters
        ----------
        attempt : callable
            Collective. What it changes for good, `keep` knows how to undo.
        keep : callable, optional
            Called before each attempt; returns what undoes it.
        apply : callable, optional
            Given what `attempt` returned, once it counts. Local: what is not changed before needs no undoing.
        """
        if self.inside:
            result = attempt()
            if apply is not None:
                apply(result)
            return result
        self.inside = True
        try:
            while True:
                undo = None if keep is None else keep()
                recovery = self._recovery if self._recovery is not None and self._recovery.pending else None
                if recovery is not None:
                    undo = _both(undo, recovery.keep())
                lost: Exception | None = None
                try:
                    if recovery is not None:
                        recovery.recover()
                    result = attempt()
                except self._world.losses as error:
                    if not self._world.is_broken():
                        raise
                    lost = error
                if self._world.decide(done=lost is None):
                    if recovery is not None:
                        recovery.commit()
                    break
                self._shrink(undo, lost)
        finally:
            self.inside = False
        if apply is not None:
            apply(result)
        self._tell()
        return result

    def _shrink(self, undo: Undo | None, lost: Exception | None) -> None:
        world, before, began = self._world, self._world.size, time.perf_counter()
        number, others = world.attached.get(StatusExchange), world.attached.get(Survival)
        kept = world.shrink()
        if number is not None:
            world.attached[StatusExchange] = number
        world.attached[Survival] = others
        if undo is not None:
            undo()
        if len(kept) == before:
            # Nobody is lost: a rank has given up waiting.
            raise lost or PeerError("another rank has given up, though none is lost")
        for one in list(others or ()):
            one.go_on(kept, before - len(kept))
        if world.rank == 0:
            gone = sorted(set(range(before)) - set(kept))
            log.warning(
                "rank %s of %d is lost; %d go on (%.0f ms)", ", ".join(map(str, gone)), before, world.size,
                1e3 * (time.perf_counter() - began),
            )  # fmt: skip

    def go_on(self, kept: list[int], lost: int) -> None:
        """Go on with the ranks that are left, whose numbers were `kept`. Local."""
        self.lost += lost
        self._forget(kept)
        self._changed = kept if self._changed is None else [self._changed[old] for old in kept]
        if not self.inside:
            # Another optimizer of these ranks has found it out.
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            for listener in self._listeners:
                listener(changed)


def _both(first: Undo | None, second: Undo) -> Undo:
    def undo() -> None:
        if first is not None:
            first()
        second()

    return undo


def check(world: World, on_lost_rank: str) -> None:
    """Raise SettingError unless the choice is known, and these ranks can do it."""
    if on_lost_rank not in CHOICES:
        raise SettingError(f"on_lost_rank={on_lost_rank!r}: need one of {', '.join(map(repr, CHOICES))}")
    why = world.cannot_shrink() if on_lost_rank == "shrink" else ""
    if why:
        raise SettingError(f"on_lost_rank='shrink': {why}")


def copied(state: Any, room: Any = None) -> Any:
    """Return a copy of dicts and lists of tensors and numbers, tensors included.

    `room` is an earlier copy that nobody needs any more: its tensors are overwritten where they fit, as new memory
    costs more than copying.
    """
    if isinstance(state, torch.Tensor):
        if isinstance(room, torch.Tensor) and (room.shape, room.dtype) == (state.shape, state.dtype):
            return room.copy_(state.detach())
        return state.detach().clone()
    if isinstance(state, dict):
        rooms = room if isinstance(room, dict) else {}
        return {key: copied(value, rooms.get(key)) for key, value in state.items()}
    if isinstance(state, list | tuple):
        places = room if isinstance(room, list | tuple) and len(room) == len(state) else [None] * len(state)
        return type(state)(copied(value, place) for value, place in zip(state, places, strict=True))
    return state

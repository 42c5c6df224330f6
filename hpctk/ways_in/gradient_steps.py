"""The steps of a gradient method as a training loop asks for them: backward, exchange, base step."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hpctk.collectives.broadcast import broadcast_in_place
from hpctk.methods.core import drift
from hpctk.methods.core.run import Closure, GradientRun, evaluate
from hpctk.methods.core.step_status import StepStatus
from hpctk.methods.core.survival import Undo, kept_gradients
from hpctk.ways_in.gradient_exchange import exchange_gradients
from hpctk.ways_in.overlap import Overlap


class GradientSteps:
    """A gradient method and the optimizer that steps on what it makes of the gradients.

    Parameters
    ----------
    run : GradientRun
    base : torch.optim.Optimizer
    overlap : Overlap, optional
        Where gradients leave during backward.

    Attributes
    ----------
    synchronized, skipping : bool
        Whether the gradients of this step have been exchanged, and whether they are not to be applied.
    skipped : bool
        Whether the last step was not applied because a gradient was bad.
    """

    def __init__(self, run: GradientRun, base: torch.optim.Optimizer, overlap: Overlap | None = None) -> None:
        self._run, self._replica, self._base, self._overlap = run, run.replica, base, overlap
        self.synchronized = self.skipping = self.skipped = False
        #: The gradients before an exchange, where ranks may be lost in it.
        self._kept: list[torch.Tensor | None] = []
        #: Hooks that notice a backward between `ahead` and the step.
        self._watches: list[RemovableHandle] = []
        run.meet(base)

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Exchange the gradients, unless that was done, and step. Collective over the communicator."""
        value = evaluate(closure)
        if not self.synchronized:
            self._exchange()
        self._finish_step()
        return value

    def idle(self) -> bool:
        """Take part in a step without gradients of one's own; return whether any rank has data. Collective."""
        for parameter in self._replica.parameters:
            parameter.grad = None
        if not self._exchange(active=False):
            return False
        self._finish_step()
        return True

    def ahead(self) -> None:
        """Exchange the gradients before the step, unless that was done. Collective over the communicator.

        A backward after it begins anew: what the step applies is then exchanged once more.
        """
        if self.synchronized:
            return
        self.forget()
        self._exchange()
        self._watches = [
            parameter.register_post_accumulate_grad_hook(self._begin_anew)
            for parameter in self._replica.parameters
            if parameter.requires_grad
        ]

    def rescale(self, factor: float) -> None:
        """Take what is left of earlier gradients for `factor` times as much. Local. In place."""
        if factor != 1:
            self._run.rescale(factor)

    def _begin_anew(self, parameter: torch.Tensor) -> None:
        self.synchronized = self.skipping = False

    def forget(self) -> None:
        """Take the gradients for such that have not been exchanged. Local."""
        self.synchronized = self.skipping = False
        for watch in self._watches:
            watch.remove()
        self._watches.clear()

    def _exchange(self, *, active: bool = True) -> bool:
        """Exchange the gradients; return whether any rank has data. Collective over the communicator."""
        replica, overlap, survival = self._replica, self._overlap, self._replica.survival
        if overlap is not None:
            overlap.check_unchanged()

        def exchange() -> tuple[StepStatus, dict[str, torch.Tensor]]:
            return exchange_gradients(
                self._run,
                replica.gradients,
                self._base.param_groups,
                active=active,
                buckets=None if overlap is None else overlap.finish,
                commit=survival is None,
            )

        status, made = replica.together(exchange, self._keep)
        if not status.active:
            return False
        if survival is not None and status.bad is None and any(status.has):
            self._run.commit()
        self.skipping = self._run.skip_or_raise(status)
        self.synchronized = True
        for name, gradient in made.items():
            replica.parameters[replica.places[name]].grad = gradient
        return True

    def _keep(self) -> Undo:
        """Return what puts back the gradients, and what the method keeps of earlier ones. Local."""
        undo_gradients = kept_gradients(self._replica.parameters, self._kept)
        undo_method = self._run.undo()

        def undo() -> None:
            undo_gradients()
            undo_method()

        return undo

    def _finish_step(self) -> None:
        """Apply the exchanged gradients, unless the step is skipped."""
        self.skipped = self.skipping
        if not self.skipping:
            self._run.apply(self._base)
        self.forget()

    def follow(self, leader: int) -> None:
        """Give one rank's parameters, and its base optimizer's state and groups, to everyone.

        Collective over the communicator. In place.
        """
        replica = self._replica
        kept = [self._base.state.get(parameter, {}) for parameter in replica.parameters]
        kept += self._base.param_groups
        tensors = [x for one in kept for x in one.values() if isinstance(x, torch.Tensor)]
        replica.world.agree("what the base optimizer keeps", [(str(x.dtype), tuple(x.shape)) for x in tensors])
        broadcast_in_place(replica.world, [*replica.values, *tensors], leader)
        numbers = json.dumps([drift.numbers(one) for one in kept]).encode()
        theirs = json.loads(replica.world.broadcast_bytes(numbers, leader, "sharing the rates"))
        if replica.world.rank != leader:
            for mine, given in zip(kept, theirs, strict=True):
                mine |= {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}

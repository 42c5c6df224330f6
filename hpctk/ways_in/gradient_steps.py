"""The steps of a gradient method as a training loop asks for them: backward, exchange, base step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hpctk.collectives.broadcast import broadcast_in_place
from hpctk.methods.core import drift
from hpctk.methods.core.run import Closure, GradientRun, evaluate
from hpctk.methods.core.step_status import StepStatus
from hpctk.methods.core.survival import Undo
from hpctk.ways_in.gradient_exchange import Spares, exchange_gradients
from hpctk.ways_in.overlap import Overlap


class GradientSteps:
    """A gradient method and the optimizer that steps on what it makes of the gradients.

    Parameters
    ----------
    run : GradientRun
    base : torch.optim.Optimizer
    overlap : Overlap, optional
        Where gradients leave during backward.
    scale : callable, optional
        Called before gradients are exchanged ahead of the step: returns what they are multiplied by.

    Attributes
    ----------
    synchronized, skipping : bool
        Whether the gradients of this step have been exchanged, and whether they are not to be applied.
    skipped : bool
        Whether the last step was not applied because a gradient was bad.
    """

    def __init__(
        self,
        run: GradientRun,
        base: torch.optim.Optimizer,
        overlap: Overlap | None = None,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._run, self._replica, self._base, self._overlap, self._scale = run, run.replica, base, overlap, scale
        self.synchronized = self.skipping = self.skipped = False
        #: Where ranks may be lost in an exchange.
        self._spares = Spares()
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
        self._exchange(ahead=True)
        self._watches = [
            parameter.register_post_accumulate_grad_hook(self._begin_anew)
            for parameter in self._replica.own
            if parameter.requires_grad
        ]

    def _begin_anew(self, parameter: torch.Tensor) -> None:
        self.synchronized = self.skipping = False

    def forget(self) -> None:
        """Take the gradients for such that have not been exchanged. Local."""
        self.synchronized = self.skipping = False
        for watch in self._watches:
            watch.remove()
        self._watches.clear()

    def _exchange(self, *, active: bool = True, ahead: bool = False) -> bool:
        """Exchange the gradients; return whether any rank has data. Collective over the communicator."""
        replica, overlap, survival = self._replica, self._overlap, self._replica.survival
        if overlap is not None:
            overlap.check_unchanged()
        scale = 1.0
        if active and overlap is not None:
            # That in which buckets have left.
            scale = overlap.scale()
        elif active and ahead:
            scale = self._scale()

        def exchange() -> tuple[StepStatus, dict[str, torch.Tensor]]:
            buckets = overlap if overlap is not None and overlap.meet() else None
            return exchange_gradients(
                self._run,
                replica.gradients,
                self._base.param_groups,
                active=active,
                buckets=buckets,
                spares=None if survival is None else self._spares,
                scale=scale,
            )

        def commit(exchanged: tuple[StepStatus, dict[str, torch.Tensor]]) -> None:
            # Without survivors to wait for the exchange has done so.
            if survival is not None and exchanged[0].travels:
                self._run.commit()

        status, made = replica.together(exchange, self._keep, commit)
        if not status.active:
            return False
        self.skipping = self._run.skip_or_raise(status)
        self.synchronized = True
        before = {}
        for name, gradient in made.items():
            parameter = replica.parameters[replica.places[name]]
            if survival is not None:
                own = parameter.grad
                if own is not None and own.data_ptr() == gradient.data_ptr():
                    # Written over.
                    continue
                if own is not None and own.is_contiguous():
                    before[name] = own
            parameter.grad = gradient
        if before:
            self._spares.keep(before)
        return True

    def _keep(self) -> Undo:
        """Return what puts back what the method keeps of earlier gradients. Local."""
        undo_method = self._run.undo()

        def undo() -> None:
            # What is still on its way to this rank writes into the tensors that it was told of.
            self._spares.keep({})
            undo_method()

        return undo

    def _finish_step(self) -> None:
        """Apply the exchanged gradients, unless the step is skipped."""
        self.skipped = self.skipping
        if not self.skipping:
            self._run.apply(self._base)
        self.forget()

    def follow(self, steps: int) -> None:
        """Let all ranks hold what the one does that has done the most `steps` by itself; nothing where all have.

        Its parameters, and its base optimizer's state and groups. Collective over the communicator. In place.
        """
        self._replica.together(lambda: self._received(steps))()

    def _received(self, steps: int) -> Undo:
        """Return what writes down what that rank holds. Collective over the communicator. Not in place."""
        replica, here = self._replica, self._replica.world
        fewest, most = here.minimum([steps, -steps], "comparing the steps of all ranks")
        if fewest == -most:
            return lambda: None
        leader = here.minimum([here.rank if steps == -most else here.size], "choosing whom to follow")[0]
        kept = [self._base.state.get(parameter, {}) for parameter in replica.parameters]
        kept += self._base.param_groups
        tensors = [x for one in kept for x in one.values() if isinstance(x, torch.Tensor)]
        here.agree("what the base optimizer keeps", [(str(x.dtype), tuple(x.shape)) for x in tensors])
        held = [*replica.values, *tensors]
        copies = [x.clone(memory_format=torch.contiguous_format) for x in held]
        broadcast_in_place(here, copies, leader)
        numbers = json.dumps([drift.numbers(one) for one in kept]).encode()
        theirs = json.loads(here.broadcast_bytes(numbers, leader, "sharing the rates"))

        def write() -> None:
            for mine, copy in zip(held, copies, strict=True):
                mine.copy_(copy)
            for one, given in zip(kept, theirs, strict=True):
                one |= {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}

        return write

"""A step that all ranks have dropped, in the hands of an optimizer that is not ours.

Under DistributedDataParallel a bad gradient is known after backward, and the step is the user's own optimizer's. What
is left in `.grad` must tell a GradScaler on every rank that there was an infinity, and must change nothing where there
is no scaler and the optimizer simply steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class DroppedStep:
    """Whether the gradients of some parameters are not to be stepped on.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in self._parameters}
        self._dropped = self._inside = False
        for register, hook in (
            (register_optimizer_step_pre_hook, DroppedStep._before),
            (register_optimizer_step_post_hook, DroppedStep._after),
        ):
            # Torch keeps these hooks for good: one that held the model would keep that in memory, too.
            handle = register(partial(_call, ref(self), hook))
            finalize(self, handle.remove)

    def begin(self, bad: int) -> None:
        """Drop the step: leave an infinity in the gradient of parameter number `bad`, and let steps do nothing."""
        gradient = self._parameters[bad].grad
        # Inside a step, where a closure has run backward, nobody looks any more before the gradients are applied.
        if self._inside or gradient is None:
            self.clear()
            return
        gradient.detach().fill_(torch.inf)
        self._dropped = True

    def over(self) -> None:
        """Take the gradients that come now for good ones."""
        self._dropped = False

    def clear(self) -> None:
        """Leave no gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps_ours(optimizer):
            self._inside = True
            if self._dropped:
                self.clear()

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps_ours(optimizer):
            self._inside = False

    def _steps_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])


def _call(dropped: ref[DroppedStep], hook: Any, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    alive = dropped()
    if alive is not None:
        hook(alive, optimizer)

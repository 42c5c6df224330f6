"""Step hooks on Horovod's optimizer, for methods that do more than exchange gradients.

Horovod makes a class of its own from the user's, so the hooks of a step run twice:

    opt.step()                        before (outer)
      synchronize()                     compress, decompress
      the user's class: step()          before (inner)   <- the method makes its step here
                                        the step itself  <- finds no gradients, where the method has made it
                                        after (inner)    <- gives the gradients back
                                      after (outer)

hvd.broadcast_optimizer_state calls the user's step() alone, which then is the outer one: nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from hpctk.errors import SettingError

#: How deep the hooks of the user's own step() are.
INNER = 2


class BaseOptimizer:
    """The user's own class inside Horovod's optimizer, as methods know it: groups, state, a local step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        step = cast(Any, type(optimizer).__mro__[1]).step
        # Without hooks: those of this step are running already.
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: schedulers change them."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self._optimizer.state

    def step(self) -> None:
        """Do a local step."""
        self._step(self._optimizer)


class Attachment:
    """The hooks on one optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        That Horovod made.
    act : callable
        Called once in every step, when the gradients are final; returns whether the optimizer's own step is not to
        be made: because it has been made, or is skipped.
    backwards : callable
        Returns a number that grows with every gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, act: Callable[[], bool], backwards: Callable[[], int]) -> None:
        self.base = BaseOptimizer(optimizer)
        self._act, self._backwards = act, backwards
        self._depth = self._began_at = 0
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, arguments: Any, settings: dict[str, Any]) -> None:
        # Gradients that came since mean a new step: the last one ended by an exception.
        if self._depth == 0 or self._backwards() != self._began_at:
            self._depth, self._began_at = 0, self._backwards()
        self._depth += 1
        try:
            self._enter(arguments, settings)
        except BaseException:
            self._depth = 0
            raise

    def _enter(self, arguments: Any, settings: dict[str, Any]) -> None:
        if any(one is not None for one in (*arguments[1:], *settings.values())):
            raise SettingError(
                "step(closure): Horovod exchanges gradients before it calls the closure. Call backward() before "
                "step(), or use hpctk.horovod.DistributedOptimizer, which takes closures."
            )
        if self._depth == INNER and self._act():
            self._hide()

    def _hide(self) -> None:
        """Let the optimizer find no gradients."""
        for group in self.base.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after(self, optimizer: torch.optim.Optimizer, arguments: Any, settings: dict[str, Any]) -> None:
        if self._depth == INNER:
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
            self._hidden.clear()
        self._depth = max(0, self._depth - 1)

"""torch.amp.GradScaler, kept in step on all ranks.

A scaler looks for infinities on its own rank, and lowers its scale there alone: ranks then train with different scales,
or one of them makes no step while the others wait for it. An optimizer whose class says `_step_supports_amp_scaling`
is asked to step in any case, and is given the scaler where its step() takes `grad_scaler`: so a step unscales, lets all
ranks decide together, and tells the scaler what they have decided.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from hpctk.methods.core.run import GradientRun
from hpctk.torch_private import is_unscaled, scale_device, scaler_state

# torch would rather hand over two tensors, through which nothing can be told to the scaler.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


def unscale(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Unscale the gradients in place, unless that was done; return whether one was not finite. Local."""
    if not is_unscaled(scaler, optimizer):
        scaler.unscale_(optimizer)
    found = scaler_state(scaler, optimizer)["found_inf_per_device"]
    return any(bool(one) for one in found.values())


class LossScale:
    """The scale that gradients are in when they are exchanged before the scaler has unscaled them.

    They are divided by it to travel, so that residuals are in units of the gradient, and what comes of them is
    multiplied by it again, for the scaler to unscale. Without `scaler` it is known from the first step() on.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        As the scaler knows it.
    scaler : torch.amp.GradScaler, optional
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self._optimizer = ref(optimizer)
        self._scaler = ref(scaler) if scaler is not None and scaler.is_enabled() else None
        self._residuals = 1.0

    @property
    def scaler(self) -> Any:
        """The scaler, None where none is known."""
        return None if self._scaler is None else self._scaler()

    def unscale_residuals(self, run: GradientRun) -> None:
        """Bring residuals that are still in the scale of the first exchange to units of the gradient. Local.

        Nobody knew then that it was scaled. Before the next exchange.
        """
        factor, self._residuals = self._residuals, 1.0
        if factor != 1:
            run.rescale(factor)

    def begin_exchange(self, run: GradientRun) -> float:
        """Return what the gradients in `.grad` are multiplied by, with residuals that fit once they are not. Local."""
        self.unscale_residuals(run)
        return self.now()

    def learn(self, scaler: Any, *, exchanged_scaled: bool) -> None:
        """Take note of the scaler of a step, and whether what was exchanged in it was still scaled. Local."""
        if self._scaler is None:
            self._scaler = ref(scaler)
            if exchanged_scaled:
                # Until now nobody knew: what the first exchange has left behind is in this scale.
                self._residuals = 1 / float(scaler.get_scale())

    def now(self) -> float:
        """Return what the gradients in `.grad` are multiplied by; 1 where no scaler is known. Local."""
        scaler, optimizer = self.scaler, self._optimizer()
        if scaler is None or optimizer is None or is_unscaled(scaler, optimizer):
            return 1.0
        return float(scaler.get_scale())


def tell(scaler: Any, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
    """Let the scaler hear what all ranks have decided; the same on all, whatever it has found itself. Local."""
    found = torch.full((), float(skipped), dtype=torch.float32, device=scale_device(scaler))
    scaler_state(scaler, optimizer)["found_inf_per_device"] = {found.device: found}


def let_step_take_scaler(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Let `step(closure, grad_scaler)` stand for the step() of an optimizer that somebody else has made."""

    def stepped(self: Any, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        return step(closure, grad_scaler)

    # Schedulers leave a mark on the step that they have wrapped.
    stepped.__dict__.update(getattr(optimizer.step, "__dict__", {}))
    stepped.__dict__.pop("__wrapped__", None)
    target: Any = optimizer
    target._step_supports_amp_scaling = True
    target.step = types.MethodType(stepped, optimizer)

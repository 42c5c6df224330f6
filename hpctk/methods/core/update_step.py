"""The life of a step of update methods: backward, local base step, exchange of what that step would subtract."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from hpctk.comm import buffers
from hpctk.errors import HpctkError, TensorError
from hpctk.kernels import updates
from hpctk.methods.core.method import Closure, LocalStepRun, evaluate
from hpctk.methods.core.replica import Gradients, Replica
from hpctk.methods.core.step_status import StepStatus


class FlatBuffer:
    """Tensors of the parameters' shapes, one after the other in one piece of memory; zeros at first.

    Kept from step to step: in a large model, new memory costs more than the arithmetic on it.

    Attributes
    ----------
    flat : torch.Tensor
        All elements.
    parts : list of torch.Tensor
        Views of `flat`, one for each parameter; contiguous.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        edges = [0, *accumulate(tensor.numel() for tensor in like)]
        self.flat = like[0].new_zeros(edges[-1]) if like else torch.zeros(0)
        self.parts = [
            self.flat[lo:hi].view(tensor.shape) for (lo, hi), tensor in zip(pairwise(edges), like, strict=True)
        ]


class UpdateRun(LocalStepRun):
    """An update method at work: derive, and say what an iteration does once gradients are known to be good."""

    def __init__(self, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base)
        #: Iterations so far, t; the same on all ranks. One that all ranks skipped does not count.
        self.t = 0
        #: Why this rank's last update could not be sent: the next step tells all ranks.
        self._unsent: HpctkError | None = None

    def prepare(self, gradients: Gradients) -> None:
        """Raise what came up when the last step was under way already."""
        error, self._unsent = self._unsent, None
        if error is not None:
            raise error

    def keep_unsent(self, error: HpctkError) -> None:
        """Let all ranks raise `error` in the next step: this one goes on, without an update of this rank."""
        self._unsent = TensorError(f"{error} That update was not sent; the residual is what it was before it.")

    @abstractmethod
    def exchange(self, *, active: bool) -> None:
        """Do one iteration, or take part in the others' where this rank has no data (`active` is false).

        Collective over the communicator. In place.
        """

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do one iteration on the gradient that is there, or that the closure makes."""
        value = evaluate(closure)
        self._advance(self.open_step(self.replica.gradients, self.base.param_groups), active=True)
        return value

    def idle(self) -> bool:
        """Take part in an iteration without a gradient of one's own."""
        for parameter in self.replica.parameters:
            parameter.grad = None
        status = self.open_step(self.replica.gradients, self.base.param_groups, active=False)
        if status.active:
            self._advance(status, active=False)
        return status.active

    def _advance(self, status: StepStatus, *, active: bool) -> None:
        self.skipped = self.skip_or_raise(status)
        if not self.skipped:
            self.exchange(active=active)
            self.t += 1


def difference(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], out: FlatBuffer) -> None:
    """Write before - after into a row, in one pass and without new memory."""
    for a, b, part in zip(before, after, out.parts, strict=True):
        torch.sub(a, b, out=part)


def squared_distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return ||a - b||^2, summed in float64; None stands for zeros. Not in place."""
    if a is None:
        a, b = b, None
    if a is None:
        return 0.0
    if buffers.on_device(a) or (b is not None and b.stride() != a.stride()):
        return float((a if b is None else a - b).double().square().sum())
    rows = [_in_memory_order(one) for one in (a, b) if one is not None]
    return updates.squared_distance(rows[0], rows[1] if b is not None else None)


def _in_memory_order(tensor: torch.Tensor) -> Any:
    """Return a host tensor's elements as they lie in memory: a view, unless there are gaps between them."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).numpy()

"""The same minibatch, the same mode, the same dropout mask: a closure run again at another point.

SASG compares two gradients of one minibatch. Whatever else differs between the two evaluations would be taken for
news: random numbers are drawn again from where the first evaluation drew them (torch on the host and on CUDA
devices, Python's `random`, numpy's global generator; a generator that the closure made itself is not known here),
and buffers start from the values that they had. Afterwards all is as the first evaluation left it, so batch norm
counts every minibatch once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpctk import torch_private
from hpctk.methods.core import random_state
from hpctk.methods.core.method import Closure, evaluate
from hpctk.methods.core.replica import Replica


class Replay:
    """A closure that is about to be run, and may have to be run once more.

    Parameters
    ----------
    replica : Replica
        Its buffers are looked after, so far as it knows them.
    closure : callable
    """

    def __init__(self, replica: Replica, closure: Closure) -> None:
        self._replica, self._closure = replica, closure
        self._random = random_state.current()
        self._buffers = _copies(replica)

    def gradients_at(
        self, point: Sequence[torch.Tensor], room: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the closure's gradients at another point, None for parameters that have none.

        Not in place: parameters, gradients, buffers and random numbers are what they were, also when the
        closure raises. `room` is overwritten; it is where the parameters stay meanwhile.
        """
        replica = self._replica
        first = [parameter.grad for parameter in replica.parameters]
        after, drawn = _copies(replica), random_state.current()
        torch_private.foreach_copy_(list(room), replica.values)
        try:
            # Taken away, not zeroed: zero_grad(set_to_none=False) would wipe out the first ones.
            self._put([None] * len(first), self._buffers, self._random)
            replica.load(point)
            evaluate(self._closure)
            return replica.gradients()
        finally:
            replica.load(room)
            self._put(first, after, drawn)

    def _put(
        self, gradients: Sequence[torch.Tensor | None], buffers: Mapping[str, torch.Tensor], drawn: Any
    ) -> None:
        for parameter, gradient in zip(self._replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        # By name: a module may have put another tensor in a buffer's place.
        for name, buffer in self._replica.buffers.items():
            if name in buffers:
                buffer.detach().copy_(buffers[name])
        random_state.put_back(drawn)


def _copies(replica: Replica) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in replica.buffers.items()}

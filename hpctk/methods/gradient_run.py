"""The life of a step of gradient methods: backward, exchange the gradients, base step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from hpctk.methods.method import Closure, Run, evaluate
from hpctk.methods.replica import Council, Replica


class GradientRun(Run):
    """A gradient method at work: derive, and say how gradients are exchanged."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        #: Whether the gradients of this step have been exchanged, and whether they are not to be applied.
        self.synchronized = self.skipping = False
        #: Where buckets are under way since backward: brings them home instead of exchanging all at once.
        self.bring_home: Callable[[], object] | None = None

    @abstractmethod
    def exchange(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace gradients, contiguous and by name, by what the base optimizer is to see.

        Collective over the communicator. In place.
        """

    @property
    def by_buckets(self) -> bool:
        """Whether a part of the gradients can be exchanged without the others: then backward may overlap."""
        return False

    def start_bucket(self, number: int, gradients: dict[str, torch.Tensor]) -> Any:
        """Start exchanging some gradients, bucket `number` of the model; return what `finish_buckets` needs.

        Collective over the communicator. Not in place.
        """
        raise NotImplementedError

    def finish_buckets(self, buckets: list[Any], has: set[str]) -> list[torch.Tensor]:
        """Return what the base optimizer is to see of each bucket, as one flat tensor.

        Collective over the communicator. `has` names the parameters that have a gradient on some rank.
        """
        raise NotImplementedError

    def apply(self) -> None:
        """Let the base optimizer step on the exchanged gradients."""
        self.replica.base.step()

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Exchange the gradients, unless `synchronize` has, and step."""
        value = evaluate(closure)
        if not self.synchronized:
            self.synchronize()
        self.finish_step()
        return value

    def idle(self) -> bool:
        """Take part in a step without gradients of one's own."""
        for parameter in self.replica.parameters:
            parameter.grad = None
        council = self.replica.confer(active=False)
        if council.active:
            self._settle(council)
            self.finish_step()
        return council.active

    def synchronize(self) -> None:
        """Exchange the gradients now. Collective over the communicator."""
        if self.bring_home is not None:
            self.bring_home()
        else:
            self._settle(self.replica.confer())

    def _settle(self, council: Council) -> None:
        self.skipping = self.skip_or_raise(council)
        if not self.skipping:
            self._exchange_all(council)
        self.synchronized = True

    def _exchange_all(self, council: Council) -> None:
        replica = self.replica
        held: dict[str, torch.Tensor] = {}
        for name, parameter, has in zip(replica.names, replica.parameters, council.has, strict=True):
            if has:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                held[name] = parameter.grad.detach()
        if not held:
            return
        # Channels-last gradients and the like are not one row of memory.
        flat = {name: tensor.contiguous() for name, tensor in held.items()}
        self.exchange(flat)
        self.counts["rounds"] += 1
        for name, tensor in held.items():
            if flat[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(flat[name])

    def finish_step(self) -> None:
        """Apply the exchanged gradients, unless the step is skipped."""
        if not self.skipping:
            self.apply()
        self.synchronized = self.skipping = False

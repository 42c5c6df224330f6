"""The life of a step of gradient methods: backward, exchange the gradients, base step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hpctk.methods.core.method import Closure, Run, evaluate
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.step_status import StepStatus


class GradientRun(Run):
    """A gradient method at work: derive, and say how gradients are exchanged."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        #: Whether the gradients of this step have been exchanged, and whether they are not to be applied.
        self.synchronized = self.skipping = False
        #: Where buckets are under way since backward: brings them home instead of exchanging all at once.
        self.finish_overlap: Callable[[], object] | None = None
        #: Hooks that notice a backward between `ahead` and the step.
        self._watches: list[RemovableHandle] = []

    @abstractmethod
    def exchange(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace gradients, contiguous and by name, by what the base optimizer is to see.

        Collective over the communicator. In place.
        """

    def rescale(self, factor: float) -> None:
        """Take what is left of earlier gradients for `factor` times as much: the loss is scaled otherwise now.

        Nothing by default. In place.
        """

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
        status = self.exchange_status(active=False)
        if status.active:
            self._settle(status)
            self.finish_step()
        return status.active

    def ahead(self) -> None:
        """Exchange the gradients before the step, unless that was done. Collective over the communicator.

        A backward after it begins anew: what the step applies is then exchanged once more.
        """
        if self.synchronized:
            return
        self.forget()
        self.synchronize()
        self._watches = [
            parameter.register_post_accumulate_grad_hook(self._begin_anew)
            for parameter in self.replica.parameters
            if parameter.requires_grad
        ]

    def _begin_anew(self, parameter: torch.Tensor) -> None:
        self.synchronized = self.skipping = False

    def forget(self) -> None:
        """Take the gradients for such that have not been exchanged."""
        self.synchronized = self.skipping = False
        for watch in self._watches:
            watch.remove()
        self._watches.clear()

    def synchronize(self) -> None:
        """Exchange the gradients now. Collective over the communicator."""
        if self.finish_overlap is not None:
            self.finish_overlap()
        else:
            self._settle(self.exchange_status())

    def _settle(self, status: StepStatus) -> None:
        self.skipping = self.skip_or_raise(status)
        if not self.skipping:
            self._exchange_all(status)
        self.synchronized = True

    def _exchange_all(self, status: StepStatus) -> None:
        replica = self.replica
        held = {replica.names[i]: replica.writable_gradient(i) for i, has in enumerate(status.has) if has}
        if held:
            self.exchange_in_place(held)

    def exchange_in_place(self, held: dict[str, torch.Tensor]) -> None:
        """Exchange gradients, laid out in memory as they may be, and count a round.

        Collective over the communicator. In place.
        """
        # Channels-last gradients and the like are not one row of memory.
        flat = {name: tensor.contiguous() for name, tensor in held.items()}
        self.exchange(flat)
        self.counts["rounds"] += 1
        for name, tensor in held.items():
            if flat[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(flat[name])

    def finish_step(self) -> None:
        """Apply the exchanged gradients, unless the step is skipped."""
        self.skipped = self.skipping
        if not self.skipping:
            self.apply()
        self.forget()


class BucketRun(GradientRun):
    """A gradient method that can exchange a part of the gradients before the others are there."""

    @property
    @abstractmethod
    def by_buckets(self) -> bool:
        """Whether it can with these settings: then backward may overlap."""

    @abstractmethod
    def start_bucket(self, lane: int, gradients: dict[str, torch.Tensor], *, in_order: bool = False) -> Any:
        """Start exchanging some gradients; return what `finish_buckets` needs.

        Collective over the communicator. Not in place. `lane` is the engine's, reserved for this bucket: ranks come
        to it at different times, unless it is known that they start all their collectives `in_order`.
        """

    @abstractmethod
    def finish_buckets(self, buckets: list[Any], has: set[str]) -> list[torch.Tensor]:
        """Return what the base optimizer is to see of each bucket, as one flat tensor.

        Collective over the communicator. `has` names the parameters that have a gradient on some rank.
        """

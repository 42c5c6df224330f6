"""The replica that methods see under Horovod's optimizer: its gradients are those that Horovod wanted compressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hpctk.methods.core.replica import Replica


@dataclass
class TokenReplica(Replica):
    """A replica whose gradients wait here while Horovod moves tokens.

    Attributes
    ----------
    kept : dict
        The gradients that went through `compress` in this step, by name; after the exchange what it made of them.
    """

    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    _exchanging: bool = False

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Let the kept gradients stand for those of the parameters."""
        self._exchanging = True
        try:
            yield
        finally:
            self._exchanging = False

    def gradient(self, i: int) -> torch.Tensor | None:
        """Return a parameter's gradient, None where there is none; dense where it is sparse."""
        if self._exchanging:
            gradient = self.kept.get(self.names[i])
        else:
            held = self.parameters[i].grad
            gradient = None if held is None else held.detach().to_dense()
        if gradient is not None:
            self._check(i, gradient)
        return gradient

    def writable_gradient(self, i: int) -> torch.Tensor:
        """Return a gradient that was kept, to be overwritten in place."""
        name = self.names[i]
        if name not in self.kept:
            self.kept[name] = torch.zeros_like(self.parameters[i]).detach()
        elif 0 in self.kept[name].stride():
            # An expanded tensor has several elements in one place.
            self.kept[name] = self.kept[name].clone(memory_format=torch.contiguous_format)
        return self.kept[name]

"""Which parameter a tensor belongs to that Horovod wants compressed: it does not say.

A gradient that is dense is known by itself: it is its parameter's `.grad`. With sparse_as_dense it is not, so own
hooks note which gradient has just arrived; they run before Horovod's. What Horovod compresses outside backward, such as
the gradients of a step that comes before backward_passes_per_step, it takes in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from threading import local
from weakref import ref

import torch

from hpctk import torch_private
from hpctk.errors import TensorError


class Arrivals:
    """Notes gradients as they arrive.

    Parameters
    ----------
    parameters : mapping of str to torch.nn.Parameter
        Those that are trained.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        #: Gradients that have arrived so far.
        self.count = 0
        #: The names in the order in which their gradients came in this step.
        self._order: dict[str, None] = {}
        self._latest = local()
        self._by_id: dict[int, str] = {}
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(_on_arrival, ref(self), name))

    def note(self, name: str) -> None:
        """Take note of a gradient. Backward calls this, on a thread of its own for each device."""
        self.count += 1
        self._order[name] = None
        self._latest.name, self._latest.backward = name, torch_private.backward_id()

    def reset(self) -> None:
        """Begin a new step."""
        self._order.clear()

    def name_of(self, tensor: torch.Tensor, taken: Collection[str]) -> str:
        """Return the name of the parameter whose gradient Horovod gives; `taken` are the names it gave before.

        Raises
        ------
        TensorError
            For a tensor that is no gradient of these parameters.
        """
        found = self._just_arrived(tensor) or self._held(tensor) or self._next_sparse(tensor, taken)
        if found is None:
            raise TensorError(
                f"compress: a tensor of shape {tuple(tensor.shape)} is no gradient of the model that Compression was "
                "given. Give it the model whose parameters are optimized, after freezing and unfreezing."
            )
        return found

    def _just_arrived(self, tensor: torch.Tensor) -> str | None:
        name: str | None = getattr(self._latest, "name", None)
        if name is None:
            return None
        gradient = self._parameters[name].grad
        if gradient is tensor:
            return name
        # Only within its backward: afterwards it is just the last one of many.
        now = torch_private.backward_id()
        inside = now is not None and now == self._latest.backward
        return name if inside and _is_dense_of(tensor, gradient) else None

    def _held(self, tensor: torch.Tensor) -> str | None:
        name = self._by_id.get(id(tensor))
        if name is None or self._parameters[name].grad is not tensor:
            self._by_id = {id(one.grad): key for key, one in self._parameters.items() if one.grad is not None}
            name = self._by_id.get(id(tensor))
        return name

    def _next_sparse(self, tensor: torch.Tensor, taken: Collection[str]) -> str | None:
        waiting = (name for name in self._order if name not in taken)
        return next((n for n in waiting if _is_dense_of(tensor, self._parameters[n].grad)), None)


def _is_dense_of(tensor: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse and gradient.shape == tensor.shape


def _on_arrival(arrivals: ref[Arrivals], name: str, parameter: torch.Tensor) -> None:
    # A hook that held more would keep the model in memory for good.
    alive = arrivals()
    if alive is not None:
        alive.note(name)

"""One rank's copy of the model, and what all methods ask of it: gradients, updates, and meetings of the ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctk.collectives.broadcast import broadcast_in_place
from hpctk.compressors import finite
from hpctk.errors import HpctkError, TensorError
from hpctk.world import World

#: One of each parameter, None where there is none.
Gradients = Sequence[torch.Tensor | None]

#: No gradient is bad.
NONE = 2**62


@dataclass(frozen=True)
class Council:
    """What the ranks found out about a step, the same on all.

    Attributes
    ----------
    has : tuple of bool
        Which parameters have a gradient on some rank.
    bad : (int, str) or None
        The first rank whose gradient is NaN or infinite, and the parameter.
    active : bool
        Whether any rank still has data.
    """

    has: tuple[bool, ...]
    bad: tuple[int, str] | None
    active: bool


@dataclass
class Replica:
    """What a method works on.

    Attributes
    ----------
    world : World
    base : torch.optim.Optimizer
        The user's optimizer, which does the local steps.
    names, parameters
        The parameters that are trained, in the model's order; the same names on all ranks.
    model : torch.nn.Module, optional
        Where the user gave it.
    frozen : dict
        The optimizer's other parameters by name: nobody trains them.
    schedule : str
        Of dense all-reduces.
    on_bad_gradient : str
        "raise" or "skip".
    leader : int or None
        The lowest rank that had data in the last step, where another had none.
    """

    world: World
    base: torch.optim.Optimizer
    names: list[str]
    parameters: list[torch.nn.Parameter]
    model: torch.nn.Module | None = None
    frozen: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    schedule: str = "auto"
    on_bad_gradient: str = "raise"
    leader: int | None = None

    @property
    def lr(self) -> float:
        """The learning rate of the first group, now."""
        return float(self.base.param_groups[0]["lr"])

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name, where the model is known: those of now, modules may replace them."""
        return {} if self.model is None else dict(self.model.named_buffers())

    @property
    def values(self) -> list[torch.Tensor]:
        """The parameters without their history: to be read and changed in place."""
        return [parameter.detach() for parameter in self.parameters]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients as they are, None where there is none."""
        for name, parameter in self.frozen.items():
            if parameter.grad is not None:
                raise HpctkError(
                    f"{name!r} was frozen when the DistributedOptimizer was made and has a gradient now: every rank "
                    "would train it by itself. Make a new DistributedOptimizer, or set its .grad to None."
                )
        return [self.gradient(i) for i in range(len(self.parameters))]

    def gradient(self, i: int) -> torch.Tensor | None:
        """Return a parameter's gradient as it is, None where there is none."""
        gradient = self.parameters[i].grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise TensorError(
                f"the gradient of {self.names[i]!r} is {gradient.layout}: hpctk exchanges dense gradients; make the "
                "embedding with sparse=False"
            )
        return gradient.detach()

    def writable_gradient(self, i: int) -> torch.Tensor:
        """Return a parameter's gradient to be overwritten in place: zeros where there is none yet."""
        parameter, gradient = self.parameters[i], self.gradient(i)
        if gradient is None:
            parameter.grad = gradient = torch.zeros_like(parameter)
        elif 0 in gradient.stride():
            # An expanded tensor has several elements in one place.
            parameter.grad = gradient = gradient.clone(memory_format=torch.contiguous_format)
        return gradient

    def first_bad(self, gradients: Gradients | None = None) -> int | None:
        """Return the number of the first parameter whose gradient is not finite, None where all are."""
        for i, gradient in enumerate(self.gradients() if gradients is None else gradients):
            if gradient is not None and not finite.all_finite(gradient):
                return i
        return None

    def confer(self, *, active: bool = True, gradients: Gradients | None = None) -> Council:
        """Learn what all ranks have: gradients (those in `.grad` where none are given), bad ones, data.

        Collective over the communicator: one small all-reduce, a second one in steps in which some ranks
        have gradients that others lack.
        """
        gradients = self.gradients() if gradients is None else gradients
        has = [gradient is not None for gradient in gradients]
        # 62 bits: the number and its negative both fit, and are both least only if all are equal.
        digest = int.from_bytes(hashlib.blake2b(bytes(has), digest_size=8).digest(), "big") >> 2
        here = self.world
        mine = here.rank if active else here.size
        least = here.minimum(
            [digest, -digest, self._bad_code(self.first_bad(gradients)), mine, int(active)], "opening a step"
        )
        if least[0] != -least[1]:
            lacking = here.minimum([int(not one) for one in has], "opening a step")
            has = [not one for one in lacking]
        if least[3] < here.size:
            self.leader = None if least[4] else least[3]
        return Council(tuple(has), self._decoded(least[2]), least[3] < here.size)

    def follow(self, leader: int) -> None:
        """Give one rank's parameters, and its base optimizer's state and groups, to everyone.

        Collective over the communicator. In place.
        """
        kept = [self.base.state.get(parameter, {}) for parameter in self.parameters]
        kept += self.base.param_groups
        tensors = [x for one in kept for x in one.values() if isinstance(x, torch.Tensor)]
        self.world.agree("what the base optimizer keeps", [(str(x.dtype), tuple(x.shape)) for x in tensors])
        broadcast_in_place(self.world, [*self.values, *tensors], leader)
        numbers = json.dumps([_numbers(one) for one in kept]).encode()
        theirs = json.loads(self.world.broadcast_bytes(numbers, leader, "sharing the rates"))
        if self.world.rank != leader:
            for mine, given in zip(kept, theirs, strict=True):
                mine |= {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}

    def meet(self, bad: int | None, *, active: bool = True) -> Council:
        """Learn at a round of a model method whether a gradient was bad, and who has data. Collective."""
        least = self.world.minimum([self._bad_code(bad), int(not active)], "opening a round")
        return Council((), self._decoded(least[0]), not least[1])

    def _bad_code(self, bad: int | None) -> int:
        return NONE if bad is None else self.world.rank * len(self.names) + bad

    def _decoded(self, code: int) -> tuple[int, str] | None:
        if code == NONE:
            return None
        rank, i = divmod(code, len(self.names))
        return rank, self.names[i]

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Overwrite the parameters, in place."""
        torch._foreach_copy_(self.values, list(values))

    def named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors, one for each parameter, by the parameters' names."""
        return dict(zip(self.names, tensors, strict=True))

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the parameters, contiguous."""
        return [value.clone(memory_format=torch.contiguous_format) for value in self.values]


def _numbers(items: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers, and tuples of numbers, of a group or of a parameter's state."""
    parts = {key: x if isinstance(x, tuple) else (x,) for key, x in items.items()}
    return {key: items[key] for key in items if all(isinstance(x, int | float) for x in parts[key])}


def restore(targets: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], what: str) -> None:
    """Overwrite tensors, in place, by the saved ones of the same names.

    Raises
    ------
    TensorError
        Where names, shapes or dtypes are not the same; then nothing was changed.
    """
    if set(targets) != set(saved):
        odd = sorted(set(targets) ^ set(saved))[0]
        raise TensorError(f"{what}: {odd!r} is only in the {'model' if odd in targets else 'saved state'}")
    for name, target in targets.items():
        given = saved[name]
        if given.shape != target.shape or given.dtype != target.dtype:
            raise TensorError(
                f"{what} of {name!r}: {given.dtype} {tuple(given.shape)} was saved, but the model needs "
                f"{target.dtype} {tuple(target.shape)}"
            )
    for name, target in targets.items():
        target.copy_(saved[name])

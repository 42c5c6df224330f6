"""One rank's copy of the model, and what all methods ask of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import eq
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from hpctk import torch_private
from hpctk.comm.world import World
from hpctk.errors import HpctkError, TensorError
from hpctk.kernels import rows
from hpctk.methods.core.masters import Masters, are_half
from hpctk.methods.core.step_status import StatusExchange
from hpctk.methods.core.survival import Survival, Undo

T = TypeVar("T")

#: One of each parameter, None where there is none.
Gradients = Sequence[torch.Tensor | None]


@dataclass
class Replica:
    """What a method works on.

    Attributes
    ----------
    world : World
    names, parameters
        The parameters that are trained, in the model's order; the same names on all ranks. With `masters`, those.
    dtype : torch.dtype
        Of what travels and of what is kept: that of all parameters, float32 where some are in half precision.
    model : torch.nn.Module, optional
        Where the user gave it.
    frozen : dict
        The optimizer's other parameters by name: nobody trains them.
    schedule : str
        Of dense all-reduces.
    on_bad_gradient : str
        "raise" or "skip".
    check_every : int
        Steps between two looks whether the replicas have drifted apart; 0 for never.
    status : StatusExchange
        The messages that open its steps.
    scaled : bool
        Whether a GradScaler asked for this step: what overflows is its affair, never an error.
    dense : bool
        Whether sparse gradients are taken for dense ones; refused where not.
    survival : Survival or None
        Where training goes on without ranks that are lost.
    buddies : bool
        Whether lost ranks' residuals are shared out (buddies.py): an attempt must be undone to the bit then.
    masters : Masters or None
        Of parameters in half precision, where the base optimizer is hpctk's to ask.
    """

    world: World
    names: list[str]
    parameters: list[torch.nn.Parameter]
    model: torch.nn.Module | None = None
    frozen: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    schedule: str = "auto"
    on_bad_gradient: str = "raise"
    check_every: int = 100
    dtype: torch.dtype = field(init=False)
    status: StatusExchange = field(init=False)
    scaled: bool = False
    dense: bool = False
    survival: Survival | None = None
    buddies: bool = False
    masters: Masters | None = None

    def __post_init__(self) -> None:
        self.agreed_on(self.names, self.parameters)

    def agreed_on(self, names: list[str], parameters: list[torch.nn.Parameter]) -> None:
        """Train these parameters, on whose names, shapes and dtypes all ranks have agreed."""
        self.names, self.parameters = names, parameters
        vars(self).pop("places", None)
        self._dtypes = [parameter.dtype for parameter in parameters]
        self.has_half = are_half(parameters)
        self.dtype = torch.float32 if self.has_half else parameters[0].dtype
        self._shapes = [parameter.shape for parameter in parameters]
        layout = [(n, f"{p.dtype} {tuple(p.shape)}") for n, p in zip(names, parameters, strict=True)]
        self.status = StatusExchange(self.world, names, layout, self.check_every)

    def hold_masters(self, base: torch.optim.Optimizer) -> None:
        """Work on float32 masters from now on, and let `base` step on them, where parameters are in half precision."""
        if self.has_half:
            self.masters = Masters(self.parameters, base)
            self.parameters = self.masters.parameters

    @property
    def own(self) -> list[torch.nn.Parameter]:
        """The model's parameters, on which backward leaves gradients."""
        return self.parameters if self.masters is None else self.masters.own

    @contextmanager
    def float32(self, *, keep_gradients: bool = False) -> Iterator[None]:
        """Let the masters, if there are any, stand for the model's parameters; see masters.py. Local."""
        if self.masters is None or self.masters.wide:
            yield
            return
        self.masters.widen()
        try:
            yield
        finally:
            self.masters.narrow(keep_gradients=keep_gradients)

    @contextmanager
    def forward_and_backward(self) -> Iterator[None]:
        """Let the model have its parameters, as they are now, and leave gradients on them; inside `float32`. Local."""
        if self.masters is None or not self.masters.wide:
            yield
            return
        self.masters.narrow()
        try:
            yield
        finally:
            self.masters.widen()

    @contextmanager
    def under_scaler(self, known: bool = True) -> Iterator[None]:
        """Let a bad gradient be a GradScaler's affair, where one is known: all ranks skip its step. Local."""
        before = self.scaled
        self.scaled = before or known
        try:
            yield
        finally:
            self.scaled = before

    def together(
        self, attempt: Callable[[], T], keep: Callable[[], Undo] | None = None, apply: Callable[[T], None] | None = None
    ) -> T:
        """Return what `attempt` returns; where ranks may be lost, once all that live have done it (survival.py).

        Collective over the communicator. `apply` is given that first.
        """
        if self.survival is None:
            made = attempt()
            if apply is not None:
                apply(made)
            return made
        opened = self.status.opened

        def begin() -> T:
            # Some ranks may have heard how an attempt was opened in which others have failed.
            self.status.opened = opened
            return attempt()

        return self.survival.together(begin, keep, apply)

    @cached_property
    def places(self) -> dict[str, int]:
        """The number of each parameter, by name."""
        return {name: i for i, name in enumerate(self.names)}

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
        found = [parameter.grad for parameter in self.parameters]
        held = [gradient for gradient in found if gradient is not None]
        # In bulk: with many parameters a Python call for each would take as long as the base optimizer.
        kinds = {(gradient.dtype, gradient.layout, gradient.requires_grad) for gradient in held}
        if kinds <= {(self.dtype, torch.strided, False)}:
            shapes = self._shapes
            if len(held) < len(found):
                shapes = [shape for shape, one in zip(shapes, found, strict=True) if one is not None]
            # Not as a list: a hundred thousand new tuples would set the garbage collector to work.
            if all(map(eq, (gradient.shape for gradient in held), shapes)):
                return found
        return [self.gradient(i) for i in range(len(self.parameters))]

    def gradient(self, i: int) -> torch.Tensor | None:
        """Return a parameter's gradient as it is, None where there is none."""
        return self.dense_gradient(i, self.parameters[i].grad)

    def dense_gradient(self, i: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return what is the gradient of parameter i, once it is known to be what the ranks have agreed on."""
        if gradient is None:
            return None
        self.check(i, gradient)
        if gradient.layout != torch.strided:
            if self.dense:
                return gradient.detach().to_dense()
            raise TensorError(
                f"the gradient of {self.names[i]!r} is {gradient.layout}: hpctk exchanges dense gradients; make the "
                "embedding with sparse=False"
            )
        return gradient.detach()

    def check(self, i: int, gradient: torch.Tensor) -> None:
        """Raise TensorError unless a gradient is what the ranks have agreed on: others would be sent as many bytes."""
        if gradient.dtype not in (self.dtype, self._dtypes[i]) or gradient.shape != self._shapes[i]:
            raise TensorError(
                f"the gradient of {self.names[i]!r} is {gradient.dtype} {tuple(gradient.shape)}, but all ranks have "
                f"agreed on {self._dtypes[i]} {tuple(self._shapes[i])}. Convert the model (model.double(), "
                "model.half()) before the optimizer is made, or make a new one on every rank."
            )

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Overwrite the parameters, in place."""
        torch_private.foreach_copy_(self.values, list(values))

    def named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors, one for each parameter, by the parameters' names."""
        return dict(zip(self.names, tensors, strict=True))

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the parameters, contiguous."""
        return [value.clone(memory_format=torch.contiguous_format) for value in self.values]


class Look(NamedTuple):
    """What one look at all gradients has found.

    Attributes
    ----------
    bad : int or None
        The number of the first gradient that is not finite.
    largest : float
        The largest magnitude, where all are finite.
    """

    bad: int | None
    largest: float


def look(gradients: Gradients) -> Look:
    """Look once at every element of the gradients. Local; changes nothing."""
    held = [gradient for gradient in gradients if gradient is not None]
    if not held:
        return Look(None, 0.0)
    sizes, together = rows.sizes_of(held), rows.are_rows(held)
    # Long ones by torch, one by one: they are worth its threads.
    alone = sizes > rows.SMALL if together else np.ones(len(held), bool)
    small = held if not alone.any() else [held[i] for i in np.flatnonzero(~alone)]
    bad: int | None = None
    largest = 0.0
    if small:
        bad, largest = rows.largest(small, sizes[~alone])
        bad = None if bad is None else int(np.flatnonzero(~alone)[bad])
    for i in np.flatnonzero(alone):
        if bad is not None and i > bad:
            break
        low, high = (float(extreme) for extreme in torch.aminmax(held[i])) if sizes[i] else (0.0, 0.0)
        if not math.isfinite(low) or not math.isfinite(high):
            bad = int(i)
            break
        largest = max(largest, -low, high)
    if bad is not None and len(held) < len(gradients):
        bad = [i for i, gradient in enumerate(gradients) if gradient is not None][bad]
    return Look(bad, largest)


def look_at_others(names: Sequence[str], gradients: Gradients, looks: Mapping[str, Look]) -> Look:
    """Return what `look` would, where some gradients, by name, have been looked at one by one. Local."""
    rest = look([None if name in looks else gradient for name, gradient in zip(names, gradients, strict=True)])
    known = [(i, looks[name]) for i, name in enumerate(names) if name in looks and gradients[i] is not None]
    bad = [i for i, one in known if one.bad is not None] + ([] if rest.bad is None else [rest.bad])
    return Look(min(bad, default=None), max([rest.largest, *(one.largest for _, one in known)]))


def first_bad(gradients: Gradients) -> int | None:
    """Return the number of the first gradient that is not finite, None where all are."""
    return look(gradients).bad


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

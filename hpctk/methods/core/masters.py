"""float32 masters of parameters in half precision: what methods and the base optimizer work on in their place.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv 1710.03740, section 3.1. w16 is what the model holds,
w its master:

    a step begins    w <- w16 where w16 is not round(w): somebody else has written there;  g <- float32(g16)
    the step         all in float32: what travels, what is kept, the base optimizer and its state
    it ends          w16 <- round(w), to nearest: the only rounding of a step;  g16 <- round(g)

Outside of steps the optimizer's groups hold the model's own parameters, so that loops, schedulers and GradScalers find
what they know; the masters go into state_dict(), under `KEY` in each parameter's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from hpctk import torch_private

HALVES = (torch.float16, torch.bfloat16)
#: Where state_dict() has a parameter's master.
KEY = "float32"

#: The hooks on each optimizer, of the masters that were made last.
_hooks: WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = WeakKeyDictionary()


def are_half(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor is in half precision."""
    return any(tensor.dtype in HALVES for tensor in tensors)


class Masters:
    """The masters of a model, and the optimizer that steps on them.

    Parameters
    ----------
    own : list of torch.nn.Parameter
        The model's, some of them in half precision.
    base : torch.optim.Optimizer

    Attributes
    ----------
    own
        As given.
    parameters : list of torch.nn.Parameter
        The masters; of float32 parameters these themselves.
    wide : bool
        Whether the masters are in the place of the model's parameters.
    """

    def __init__(self, own: list[torch.nn.Parameter], base: torch.optim.Optimizer) -> None:
        self.own, self._base = own, base
        self.parameters = [torch.nn.Parameter(p.detach().float()) if p.dtype in HALVES else p for p in own]
        self._pairs = [(p, master) for p, master in zip(own, self.parameters, strict=True) if p is not master]
        self.wide = False
        #: By place among the pairs: what was written to `.grad`, whose float32 value the master still has.
        self._written: dict[int, tuple[torch.Tensor, int]] = {}
        #: By place among all parameters of the groups: masters that are about to be loaded.
        self._loading: dict[int, torch.Tensor] = {}
        for hook in _hooks.pop(base, ()):
            hook.remove()
        _hooks[base] = [
            base.register_state_dict_post_hook(self._on_state_dict),
            base.register_load_state_dict_pre_hook(self._before_loading),
            base.register_load_state_dict_post_hook(self._after_loading),
        ]

    def widen(self) -> None:
        """Put the masters in the place of the model's parameters: values, gradients, the optimizer's groups. Local."""
        self._take_values()
        for place, (p, master) in enumerate(self._pairs):
            noted = self._written.get(place)
            if p.grad is None:
                master.grad = None
            elif noted is None or noted[0] is not p.grad or noted[1] != torch_private.version(p.grad):
                master.grad = p.grad.detach().float()
        self._written = {}
        self._trade(to_masters=True)
        self.wide = True

    def narrow(self, *, keep_gradients: bool = False) -> None:
        """Put the model's parameters back, with what has become of the masters, rounded. Local.

        `keep_gradients` lets the float32 gradients stay, for a step on `.grad` as it is left now.
        """
        self.wide = False
        self._trade(to_masters=False)
        for place, (p, master) in enumerate(self._pairs):
            p.detach().copy_(master.detach())
            _write_gradient(p, master.grad)
            if keep_gradients and p.grad is not None:
                self._written[place] = p.grad, torch_private.version(p.grad)
            elif not keep_gradients:
                master.grad = None

    def _take_values(self) -> None:
        for p, master in self._pairs:
            held, kept = p.detach(), master.detach()
            rounded = kept.to(p.dtype)
            if not torch.equal(rounded, held):
                kept.copy_(torch.where(rounded == held, kept, held.float()))

    def _trade(self, *, to_masters: bool) -> None:
        """Let the optimizer's groups and its state be about the masters, or about the model's parameters."""
        pairs = self._pairs if to_masters else [(master, p) for p, master in self._pairs]
        instead = {id(old): new for old, new in pairs}
        for group in self._base.param_groups:
            group["params"] = [instead.get(id(p), p) for p in group["params"]]
        state = self._base.state
        for old, new in pairs:
            if old in state:
                # Half where Horovod had it made, or an earlier optimizer's steps on the model itself.
                state[new] = {key: _float32(x) for key, x in state.pop(old).items()}

    def _on_state_dict(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        if not self.wide:
            self._take_values()
        if not saved["state"] and all(torch.equal(p.detach().float(), master.detach()) for p, master in self._pairs):
            # Nothing that the model does not hold; and Horovod looks whether there is any state.
            return None
        masters = {id(one): master.detach() for pair in self._pairs for master in pair[1:] for one in pair}
        state = dict(saved["state"])
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, self._grouped(), strict=True):
            if id(p) in masters:
                state[number] = {**state.get(number, {}), KEY: masters[id(p)]}
        return {**saved, "state": state}

    def _before_loading(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        state = saved["state"]
        self._loading = {place: state[n][KEY] for place, n in enumerate(numbers) if KEY in state.get(n, {})}
        # Torch converts what it loads to the dtype of the parameter that it finds.
        self._trade(to_masters=True)
        plain = {n: {key: x for key, x in kept.items() if key != KEY} for n, kept in state.items()}
        return {**saved, "state": {n: kept for n, kept in plain.items() if kept or KEY not in state[n]}}

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        masters = {id(master): p for p, master in self._pairs}
        for place, p in enumerate(self._grouped()):
            if place in self._loading and id(p) in masters:
                p.detach().copy_(self._loading[place])
                masters[id(p)].detach().copy_(p.detach())
        self._loading = {}
        if not self.wide:
            self._trade(to_masters=False)

    def _grouped(self) -> list[torch.Tensor]:
        return [p for group in self._base.param_groups for p in group["params"]]


def _float32(kept: Any) -> Any:
    return kept.float() if isinstance(kept, torch.Tensor) and kept.dtype in HALVES else kept


def _write_gradient(p: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Let a parameter have this gradient, rounded; where it has one, in place."""
    mine = p.grad
    alike = mine is not None and gradient is not None and mine.layout == gradient.layout == torch.strided
    if mine is not None and gradient is not None and alike and 0 not in mine.stride():
        mine.detach().copy_(gradient)
    else:
        p.grad = None if gradient is None else gradient.to(p.dtype)

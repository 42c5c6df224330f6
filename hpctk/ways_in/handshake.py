"""What all ranks must agree on before the first step: which parameters, in which groups, trained how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hpctk.comm import buffers
from hpctk.errors import SettingError, TensorError
from hpctk.methods.core.masters import HALVES
from hpctk.methods.core.method import Method

ON_BAD_GRADIENT = ("raise", "skip")


def check(optimizer: Any, method: Any, on_bad_gradient: str) -> None:
    """Raise SettingError for what no DistributedOptimizer can be made from."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"optimizer={optimizer!r}: need a torch optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError("LBFGS evaluates its closure several times in a step, each rank as often as it likes")
    check_method(method, on_bad_gradient)


def check_not_wrapped(model: Any) -> None:
    """Raise SettingError for a model in DistributedDataParallel, which averages gradients itself."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise SettingError(
            "model is wrapped in DistributedDataParallel, which averages all gradients in full during backward: every "
            "byte that the method saves would be sent before it sees a gradient. Give the bare model (model.module), "
            "never wrapped (accelerate: leave the model out of accelerator.prepare), or keep the wrapper and its "
            "optimizer, and for gradient methods call hpctk.ddp.attach(model, method)"
        )


def check_method(method: Any, on_bad_gradient: str) -> None:
    """Raise SettingError for what is no method, and for an unknown way to treat bad gradients."""
    if not isinstance(method, Method):
        raise SettingError(f"method={method!r}: need a method such as hpctk.AdaCons()")
    if on_bad_gradient not in ON_BAD_GRADIENT:
        raise SettingError(f"on_bad_gradient={on_bad_gradient!r}: allowed are {', '.join(ON_BAD_GRADIENT)}")


def names(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters by name, in the model's order."""
    if (model is None) == (named_parameters is None):
        raise SettingError("give either model= or named_parameters=: parameters are known by their names")
    named = list(model.named_parameters() if model is not None else named_parameters or ())
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = {name: parameter for name, parameter in named if id(parameter) in optimized}
    if len({name for name, _ in named}) != len(named):
        raise SettingError("named_parameters gives a name twice")
    if len(found) != len({id(parameter) for parameter in found.values()}):
        raise SettingError("named_parameters gives a parameter under two names")
    if len(found) != len(optimized):
        raise SettingError(
            f"{len(optimized) - len(found)} parameters of the optimizer have no name in "
            f"{'the model' if model is not None else 'named_parameters'}"
        )
    check_dtypes(found)
    return found


def check_dtypes(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise where nothing is trained, or what is trained is neither all float64 nor float32 and half precision."""
    kinds = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
    if kinds - {torch.float32, *HALVES} and kinds != {torch.float64}:
        shown = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise TensorError(f"parameters of {shown}: need all float64, or float32, float16 and bfloat16")
    if not kinds:
        raise SettingError("no parameter of the optimizer requires a gradient")


def check_values(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise where a parameter or buffer has no values: TensorError on the meta device, SettingError of a lazy module.

    Only when all ranks have agreed that it has none: see `digest`.
    """
    for name, tensor in tensors.items():
        if buffers.is_uninitialised(tensor):
            raise SettingError(f"{name} {buffers.UNINITIALISED}")
        if tensor.is_meta:
            raise TensorError(f"{name} {buffers.NO_VALUES}")


def digest(
    optimizer: torch.optim.Optimizer,
    method: Method,
    optimized: dict[str, torch.nn.Parameter],
    parameters: dict[str, torch.nn.Parameter],
    model_buffers: dict[str, torch.Tensor],
) -> list[tuple[str, object]]:
    """Return what all ranks must agree on."""
    items: list[tuple[str, object]] = list(method.settings().items())
    items.append(("optimizer", type(optimizer).__name__))
    for number, group in enumerate(optimizer.param_groups):
        items += [(f"{key} of group {number}", value) for key, value in group.items() if key != "params"]
    # Where a parameter stands decides its learning rate, and what a loaded state means.
    places = {
        id(parameter): f" in group {number}, number {place}"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }
    for name, tensor in (*parameters.items(), *model_buffers.items()):
        trained = " trained" if name in optimized and tensor.requires_grad else ""
        shape = "uninitialised" if buffers.is_uninitialised(tensor) else tuple(tensor.shape)
        valueless = " on the meta device, without values" if tensor.is_meta else ""
        place = places.get(id(tensor), "")
        items.append((name, f"{tensor.dtype} {shape}{valueless}{trained}{place}"))
    return items

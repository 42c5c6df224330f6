"""All that hpctk uses of torch beyond its documented interface: where a new torch breaks something, look here first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

# One call for many tensors, in place: torch's own optimizers stand on these.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with every change of a tensor in place."""
    return tensor._version


def backward_id() -> int | None:
    """Return the number of the backward that this thread is in, None outside of one."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def after_backward(action: Callable[[], None]) -> None:
    """Run `action` when the callbacks that are queued until the end of this backward have run; else at once."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    try:
        # What is queued between now and the end of backward, as DDP's own callback is, comes before the second.
        queue(lambda: queue(action))
    except RuntimeError:
        action()


def scaler_state(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a GradScaler knows of an optimizer in this step: "stage" and "found_inf_per_device". Not a copy."""
    state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    return state


def is_unscaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether scaler.unscale_(optimizer) was called in this step."""
    return scaler_state(scaler, optimizer)["stage"] is not OptState.READY


def scale_device(scaler: Any) -> torch.device:
    """Return where a GradScaler keeps its scale."""
    device: torch.device = scaler._scale.device
    return device


def fsdp_groups(module: Any) -> list[tuple[int, Any]]:
    """Return, of each group of parameters that FSDP2 moves as one, its mesh's dimensions and its all-reduce hook."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    return [(group.mesh_info.mesh.ndim, group._all_reduce_hook) for group in groups]

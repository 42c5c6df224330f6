"""Clipping by the learning rate: with a schedule, the rate and the bound fall together.

R = clip / lr is fixed at the start, lr being the first group's `initial_lr` where a scheduler has left one.
A step on a gradient of norm n is made with the rate lr_group * min(1, R / (1e-10 + n)) in every group, so
clipping also scales weight decay and momentum (Liu, Zhuang, Lei, Liao, NeurIPS 2022, arXiv 2205.05040).

Norms are accumulated in float64: a float32 sum of squares overflows at a norm of 1.8e19.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpctk.comm import buffers
from hpctk.errors import SettingError
from hpctk.kernels.updates import squared_distance

SMALL = 1e-10
#: What the setting means, wherever a method has it.
CLIP = "the longest step, in units of the parameters; clip / lr is the largest norm that is not clipped"


class Clipping:
    """How much a step is shortened.

    Parameters
    ----------
    clip : float
        The longest step, in units of the parameters, at the first learning rate.
    base : torch.optim.Optimizer
        Its first group's rate is the first learning rate.
    """

    def __init__(self, clip: float, base: torch.optim.Optimizer) -> None:
        group = base.param_groups[0]
        first_rate = float(group.get("initial_lr", group["lr"]))
        if first_rate <= 0:
            raise SettingError(f"clip={clip}: needs a learning rate above 0 at the start, not {first_rate}")
        self.clip, self.first_rate = clip, first_rate

    @property
    def bound(self) -> float:
        """R, the largest norm that is not clipped."""
        return self.clip / self.first_rate

    def factor(self, norm: float) -> float:
        """Return what the learning rates are multiplied with for a gradient of this norm."""
        return min(1.0, self.bound / (SMALL + norm))


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the 2-norm of each tensor."""
    return [_norm(tensor.detach()) for tensor in tensors]


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all tensors as one vector."""
    return math.hypot(*norms(tensors))


def _norm(tensor: torch.Tensor) -> float:
    if buffers.on_device(tensor) or tensor.dtype not in (torch.float32, torch.float64):
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    # One pass: torch would write a float64 copy of the tensor first.
    return math.sqrt(squared_distance(tensor.reshape(-1).numpy(), None))

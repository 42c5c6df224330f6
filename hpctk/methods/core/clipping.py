"""Clipping by the learning rate: with a schedule, the rate and the bound fall together.

R = clip / lr is fixed at the start, lr being the first group's `initial_lr` where a scheduler has left one.
A step on a gradient of norm n is made with the rate lr_group * min(1, R / (1e-10 + n)) in every group, so
clipping also scales weight decay and momentum (Liu, Zhuang, Lei, Liao, NeurIPS 2022, arXiv 2205.05040).
"""

from __future__ import annotations

import torch

from hpctk.errors import SettingError

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

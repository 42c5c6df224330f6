"""CELGC: local gradient clipping with periodic averaging.

Liu, Zhuang, Lei, Liao, "A Communication-Efficient Distributed Gradient Clipping Algorithm for Training Deep
Neural Networks", NeurIPS 2022, arXiv 2205.05040.

    every `period` steps   x_i <- mean_j x_j
    in every step          rate = lr * min(1, R / (1e-10 + ||g_i||)), R = clip / lr at the start;
                           the base optimizer steps with that rate

The norm is of the raw local gradient over all parameters, in float64. What travels: the model, once every
`period` steps, or with a compressor what it makes of the difference to the last average; never gradients, never the
base optimizer's state. The model to evaluate is the mean of the workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hpctk.compressors import Compressor
from hpctk.methods.core.clipping import CLIP, Clipping, global_norm
from hpctk.methods.core.method import LocalStepMethod, scaled_rates
from hpctk.methods.core.model_step import DIFFERENCES, ModelRun
from hpctk.methods.core.replica import Replica
from hpctk.settings import documented, required, setting


@documented
@dataclass(frozen=True)
class CELGC(LocalStepMethod):
    """Clip locally, average the models every `period` steps."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "local clipping, models averaged every period steps"

    clip: float = field(metadata=required(CLIP, at_least=0, at_most=math.inf))
    period: int = setting(16, "local steps between averages", at_least=1)
    compressor: Compressor | None = setting(None, **DIFFERENCES)

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> CelgcRun:
        """Return CELGC at work on a replica."""
        return CelgcRun(self, replica, base)


class CelgcRun(ModelRun):
    """CELGC at work on one rank."""

    def __init__(self, settings: CELGC, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base, settings.period, compressor=settings.compressor)
        self._clipping = Clipping(settings.clip, base)

    def local_step(self) -> None:
        """Step with the clipped rate."""
        norm = global_norm([gradient for gradient in self.replica.gradients() if gradient is not None])
        factor = self._clipping.factor(norm)
        self.counts["clipped_steps"] += factor < 1
        with scaled_rates(self.base, factor):
            self.base.step()

    def local_state(self) -> dict[str, Any]:
        """Return where in its period this rank is, and the rate at the start, which fixes the bound."""
        return {**super().local_state(), "first_rate": self._clipping.first_rate}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        super().load_local_state(state)
        self._clipping.first_rate = float(state["first_rate"])

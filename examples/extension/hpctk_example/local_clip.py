"""LocalClip: every rank shortens its own gradient before the gradients are averaged.

    mean_i(g_i * min(1, norm / ||g_i||))

What travels: gradients, dense, every step. A rank with an outlier then cannot pull all others along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hpctk.extend import GradientMethod, GradientRun, Replica, dense_mean, documented, global_norm, setting


@documented
@dataclass(frozen=True)
class LocalClip(GradientMethod):
    """Average gradients that every rank has clipped by itself."""

    summary: ClassVar[str] = "averaging of gradients that every rank has clipped by itself"

    norm: float = setting(1.0, "largest norm of a rank's gradient", above=0)

    def begin(self, replica: Replica) -> LocalClipRun:
        """Return local clipping at work on a replica."""
        return LocalClipRun(self, replica)


class LocalClipRun(GradientRun):
    """Local clipping at work on one rank."""

    def __init__(self, settings: LocalClip, replica: Replica) -> None:
        super().__init__(replica)
        self._norm = settings.norm

    def exchange(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace gradients by the mean of the clipped ones. Collective over the communicator. In place."""
        norm = global_norm(list(gradients.values()))
        if norm > self._norm:
            for gradient in gradients.values():
                gradient.mul_(self._norm / norm)
        dense_mean(self.replica.world, gradients, self.replica.schedule, "gradients")

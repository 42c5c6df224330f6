"""LSGD: workers are pulled toward the one that does best.

Teng, Gao, Chalus, Choromanska, Goldfarb, Weller, "Leader Stochastic Gradient Descent for Distributed Training of
Deep Learning Models", NeurIPS 2019, arXiv 1905.10395; here the form that GRAWA's authors compare with:

    after every local step   x_m <- (1 - prox/period)*x_m + (prox/period)*x_L
    every `period` steps     leader = the worker with the lowest mean of its last 4 training losses
                             x_L = the leader's x;  x_m <- (1-pull)*x_m + pull*x_L

What travels in a round: one number of each worker, then the leader's model to all. x_L starts as the initial model.
The base optimizer's state stays where it is. The model to evaluate is the plain mean of the workers. The loss of a
step is what the closure returns, or `opt.step(loss=...)`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.broadcast import broadcast_in_place
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.errors import SettingError
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.model_step import ModelRun
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.resharding import SavedRanks
from hpctk.settings import documented, setting

#: Losses that a worker is judged by.
LAST = 4


@documented
@dataclass(frozen=True)
class LSGD(LocalStepMethod):
    """Pull workers toward the one with the lowest loss."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "pulled toward the worker with the lowest loss"

    period: int = setting(4, "local steps between rounds", at_least=1)
    pull: float = setting(0.1, "how far a round moves a worker toward the leader", at_least=0, at_most=1)
    prox: float = setting(
        0.1, "how far the local steps of a period move it toward the last leader's model", at_least=0, at_most=1
    )

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> LsgdRun:
        """Return LSGD at work on a replica."""
        return LsgdRun(self, replica, base)


class LsgdRun(ModelRun):
    """LSGD at work on one rank.

    Attributes
    ----------
    leader : int or None
        The rank that led in the last round; None before, and where no worker had a finite loss.
    centre : list of torch.Tensor
        The leader's model of the last round in which there was one, the same bits on all ranks.
    """

    def __init__(self, settings: LSGD, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base, settings.period)
        self._settings = settings
        self.leader: int | None = None
        self.centre = replica.copies()
        self._losses: deque[Any] = deque(maxlen=LAST)

    def note_loss(self, loss: Any) -> None:
        """Remember the loss of this step; a tensor stays on its device until a round asks."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone())
        elif isinstance(loss, int | float | np.number):
            self._losses.append(float(loss))
        else:
            given = f"a tensor of {loss.numel()} elements" if isinstance(loss, torch.Tensor) else repr(loss)
            raise SettingError(
                f"loss={given}: LSGD follows the worker with the lowest loss, so every step needs one: "
                "opt.step(closure) with a closure that returns the loss, or opt.step(loss=...)"
            )

    def after_local_step(self) -> None:
        """Move a little toward the last leader's model."""
        self._move(self._settings.prox / self._settings.period)

    def _move(self, share: float) -> None:
        if share > 0:
            torch_private.foreach_lerp_(self.replica.values, self.centre, share)

    def average(self) -> None:
        """Find the leader, and pull toward it. Collective over the communicator. In place."""
        here = self.replica.world
        means = gather_rows(here, np.array([self._mean_loss()]))[:, 0]
        # The lowest rank of equals.
        self.leader = int(means.argmin()) if np.isfinite(means).any() else None
        if self.leader is None:
            return
        if here.rank == self.leader:
            torch_private.foreach_copy_(self.centre, self.replica.values)
        broadcast_in_place(here, self.centre, self.leader)
        self._move(self._settings.pull)

    def _mean_loss(self) -> float:
        """Return the mean of the last losses; infinity where it is not finite, or where there was none."""
        losses = [float(loss) for loss in self._losses]
        mean = sum(losses) / len(losses) if losses else math.inf
        return mean if math.isfinite(mean) else math.inf

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return the centre."""
        return self.replica.named(self.centre)

    def local_state(self) -> dict[str, Any]:
        """Return the last losses, the leader's model, and where in its period this rank is."""
        return {
            **super().local_state(),
            "losses": torch.tensor([float(loss) for loss in self._losses], dtype=torch.float64),
            "centre": self.replica.named(self.centre),
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        super().load_local_state(state)
        self._losses = deque(state["losses"].tolist(), maxlen=LAST)
        restore(self.replica.named(self.centre), state["centre"], "the centre")

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return the leader's model; losses of workers that are gone say nothing about the new ones."""
        return {**super().resized_state(earlier), "losses": torch.zeros(0, dtype=torch.float64)}

"""EASGD: workers and a centre that pull each other.

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, arXiv 1412.6651; here the
synchronous form that GRAWA's authors compare with, every `period` local steps:

    x_m <- (1 - pull/N)*x_m + (pull/N)*xt
    xt  <- (1 - pull)*xt + pull*mean_m x_m        (of the x_m before they are pulled)

What travels: the model, once every `period` steps; every rank keeps xt, which starts as the initial model. The base
optimizer's state stays where it is. The model to evaluate is xt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hpctk import torch_private
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.model_step import ModelRun
from hpctk.methods.core.replica import Replica, restore
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class EASGD(LocalStepMethod):
    """Let workers and centre pull each other every `period` steps."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "workers and a centre that pull each other every period steps"

    period: int = setting(4, "local steps between rounds", at_least=1)
    pull: float = setting(
        0.1,
        "how far a round moves the centre toward the mean of the workers; a worker moves pull/N of its way",
        at_least=0,
        at_most=1,
    )

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> EasgdRun:
        """Return EASGD at work on a replica."""
        return EasgdRun(self, replica, base)


class EasgdRun(ModelRun):
    """EASGD at work on one rank.

    Attributes
    ----------
    centre : list of torch.Tensor
        xt, the same bits on all ranks.
    """

    def __init__(self, settings: EASGD, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base, settings.period)
        self._pull = settings.pull
        self.centre = replica.copies()

    def average(self) -> None:
        """Let workers and centre pull each other. Collective over the communicator. In place."""
        mean = self.mean_parameters()
        torch_private.foreach_lerp_(self.replica.values, self.centre, self._pull / self.replica.world.size)
        torch_private.foreach_lerp_(self.centre, mean, self._pull)

    def evaluated_parameters(self) -> list[torch.Tensor]:
        """Return the centre; not a copy."""
        return self.centre

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return the centre."""
        return self.replica.named(self.centre)

    def local_state(self) -> dict[str, Any]:
        """Return the centre, and where in its period this rank is."""
        return {**super().local_state(), "centre": self.replica.named(self.centre)}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        super().load_local_state(state)
        restore(self.replica.named(self.centre), state["centre"], "the centre")

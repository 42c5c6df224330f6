"""Local SGD: models averaged every `period` steps, nothing else.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767; McMahan et al., AISTATS
2017, arXiv 1602.05629. What travels: the model, once every `period` steps. The base optimizer's state stays
where it is. The model to evaluate is the mean of the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hpctk.collectives.compressed_mean import dense_mean
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.model_step import ModelRun
from hpctk.methods.core.replica import Replica
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class LocalSGD(LocalStepMethod):
    """Average the models every `period` steps."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "models averaged every period steps"

    period: int = setting(16, "local steps between averages", at_least=1)

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> LocalSgdRun:
        """Return local SGD at work on a replica."""
        return LocalSgdRun(replica, base, self.period)


class LocalSgdRun(ModelRun):
    """Local SGD at work on one rank."""

    def average(self) -> None:
        """Replace the parameters by their mean over the workers. Collective over the communicator."""
        values = self.replica.named(self.replica.values)
        dense_mean(self.replica.world, values, self.replica.schedule, "parameters")

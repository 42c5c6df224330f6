"""Local SGD: models averaged every `period` steps, nothing else.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767; McMahan et al., AISTATS
2017, arXiv 1602.05629. What travels: the model, once every `period` steps; with a compressor what it makes of the
difference to the last average, the rest of which travels later (methods/core/common_model.py). The base optimizer's
state stays where it is. The model to evaluate is the mean of the workers.

`period_rule=QSR(...)` lets the period grow as the learning rate falls (methods/core/period_rule.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hpctk.compressors import Compressor
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.model_step import DIFFERENCES, ModelRun
from hpctk.methods.core.period_rule import A_RULE, QSR, rule_by_name
from hpctk.methods.core.replica import Replica
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class LocalSGD(LocalStepMethod):
    """Average the models every `period` steps."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "models averaged every period steps"

    period: int = setting(16, "local steps between averages", at_least=1)
    period_rule: QSR | None = setting(None, "says the period anew for each round", parser=rule_by_name, allowed=A_RULE)
    compressor: Compressor | None = setting(None, **DIFFERENCES)

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> ModelRun:
        """Return local SGD at work on a replica."""
        return ModelRun(replica, base, self.period, self.period_rule, self.compressor)

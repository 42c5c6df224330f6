"""Averaging without a compressor where Horovod was asked for the sum."""

from __future__ import annotations

import torch

from hpctk.collectives.dense_mean import dense_sum
from hpctk.methods.core.method import Method
from hpctk.methods.core.replica import Replica
from hpctk.methods.mean import Mean, MeanRun


class SumRun(MeanRun):
    """The sum itself: N times the mean would be rounded twice."""

    def exchange(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace gradients by their sum. Collective over the communicator. In place."""
        dense_sum(self.replica.world, gradients, self.replica.schedule, "gradients")


def sum_run(method: Method, replica: Replica) -> SumRun | None:
    """Return what adds gradients up, where a method does nothing else to them."""
    if not isinstance(method, Mean) or method.unit_norm or method.clip is not None:
        return None
    lossless = method.compressor is None or method.compressor.lossless
    return SumRun(Mean(), replica) if lossless else None

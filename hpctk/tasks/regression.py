"""Linear regression, the experiment of AdaCons's authors: 1000 weights, fresh random data, a step of the best length.

    loss 0.5 * mean((x.w)^2), w0 ~ U(-5, 5), x ~ U[0, 1]^1000 drawn anew for every micro-batch; the optimum is 0
    an update accumulates 2 micro-batches of B samples, split over the ranks: the workers are the ranks
    lr = <out, w> / ||out||^2, the best step along what the method made of the gradients

The oracle's rate needs the aggregated gradient, so it exists for gradient methods only; others take a fixed rate.
The verdict is the exact expected loss, 0.5 * (||w||^2 / 12 + (sum w)^2 / 4), not that of a sample.
benchmarks/regression.py simulates the published 8 and 32 workers in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk.errors import SettingError
from hpctk.methods.core.method import Method
from hpctk.optimizer import DistributedOptimizer
from hpctk.tasks.core.settings import RegressionSettings
from hpctk.tasks.core.task import Task

WEIGHTS = 1000
MICRO_BATCHES = 2


class Regression(Task[RegressionSettings]):
    """Find the weights 0."""

    settings_class = RegressionSettings
    recipes: ClassVar[Mapping[str, Mapping[str, Any]]] = {"adacons": {"scale": "unit"}}

    def load(self) -> None:
        """There is nothing to load: an epoch is the whole job."""
        self.samples = self.settings.updates * self.step_samples(1)

    @property
    def epochs(self) -> int:
        """One: no sample is seen twice."""
        return 1

    def step_samples(self, size: int) -> int:
        """Return the samples of one update: the batch is split, so they are not more with more ranks."""
        return MICRO_BATCHES * self.settings.global_batch

    def check(self, size: int, method: Method) -> None:
        """Raise SettingError where the batch cannot be split, or the oracle has no gradient to look at."""
        if self.settings.global_batch % size:
            raise SettingError(
                f"global_batch={self.settings.global_batch}: need a multiple of the {size} ranks, it is split evenly"
            )
        if self.settings.step_size == "oracle" and method.kind != "gradient":
            raise SettingError(
                f"step_size='oracle' needs a method that aggregates gradients (mean, adacons): "
                f"{type(method).__name__} does not. Give --step-size fixed --lr {self.settings.lr:g}"
            )

    def batch(self, rank: int, size: int, epoch: int, done: int) -> torch.Tensor:
        """Return this rank's micro-batches, drawn from a seed of their own."""
        # Another epoch comes only where ranks do different numbers of steps.
        place = [self.settings.seed, epoch, done, size, rank]
        seed = int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(1))
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(MICRO_BATCHES, self.settings.global_batch // size, WEIGHTS, generator=generator)

    def make_model(self) -> torch.nn.Module:
        """Return a linear map without bias."""
        model = torch.nn.Linear(WEIGHTS, 1, bias=False)
        torch.nn.init.uniform_(model.weight, -5, 5)
        return model

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean over the micro-batches, which are of equal size."""
        errors: torch.Tensor = model(batch)
        return 0.5 * errors.square().mean()

    def step(self, optimizer: DistributedOptimizer, model: torch.nn.Module, batch: Any) -> float:
        """Do one update. Collective over the communicator."""
        if self.settings.step_size == "fixed":
            return super().step(optimizer, model, batch)
        loss = self.closure(optimizer, model, batch)()
        optimizer.synchronize()
        (weight,) = model.parameters()
        assert weight.grad is not None
        out, w = weight.grad.double(), weight.detach().double()
        length = float((out * out).sum())
        for group in optimizer.param_groups:
            group["lr"] = float((out * w).sum()) / length if length > 0 else 0.0
        optimizer.step()
        return loss

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the expected loss."""
        (weight,) = model.parameters()
        w = weight.detach().double()
        return {"expected loss": 0.5 * (float(w.square().sum()) / 12 + float(w.sum()) ** 2 / 4)}

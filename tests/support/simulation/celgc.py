"""CELGC: local steps at a rate clipped by the local gradient's norm, models averaged every period."""

from __future__ import annotations

from collections.abc import Sequence

from . import tensors
from .optimizers import Base, Schedule, rates
from .problem import FixedProblem
from .tensors import Tensors
from .trajectory import Trajectory
from .workers import Average, Clip, Workers


def simulate(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    clip: float,
    period: int = 16,
    starts: Sequence[Tensors] | None = None,
    compressor=None,
) -> Trajectory:
    """Log: norms; rates (of the first group) and factors (rate / lr); local (x^i before averaging)."""
    workers, trajectory = Workers(problem, base, lr, starts), Trajectory()
    average = Average(workers, compressor)
    rule = Clip(clip, workers.optimizers[0])
    for t in range(steps):
        workers.lose(t)
        norms, factors, used = [], [], []
        for k in range(workers.size):
            gradient = workers.gradient(k, t)
            norms.append(tensors.norm(gradient))
            factors.append(rule.factor(norms[-1]) if tensors.finite(gradient) else 0.0)
            used.append(factors[-1] * rates(workers.optimizers[k])[0])
            workers.step(k, gradient, factors[-1])
        local = list(workers.x)
        if (t + 1) % period == 0:
            average()
        trajectory.record(workers.x, workers.mean(), norms=norms, rates=used, factors=factors, local=local)
    return trajectory

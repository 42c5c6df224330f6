"""EPISODE: gradients corrected toward the mean one of the round's beginning, clipped by rounds."""

from __future__ import annotations

from . import tensors
from .optimizers import Base, Schedule, rates
from .problem import FixedProblem
from .trajectory import Trajectory
from .workers import Clip, Workers


def simulate(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    clip: float,
    period: int = 16,
    probes=None,
) -> Trajectory:
    """Log: norm (of G) and clips, None but in a round's first step; norms (n); rates; local (x^i before averaging).

    `probes(k, x, t)` is worker k's gradient for the corrections; its own one where not given.
    """
    workers, trajectory = Workers(problem, base, lr), Trajectory()
    bound = Clip(clip, workers.optimizers[0]).ratio
    own, mean, clips, count = [], None, None, 0
    for t in range(steps):
        workers.lose(t, *([own] if own else []))
        gradients = [workers.gradient(k, t) for k in range(workers.size)]
        size = None
        if clips is None and all(map(tensors.finite, gradients)):
            own = gradients if probes is None else [probes(k, workers.x[k], t) for k in range(workers.size)]
            mean = tensors.mean(own)
            size = tensors.norm(mean)
            clips = size > bound
        norms, used = [], []
        for k, gradient in enumerate(gradients):
            if clips is None:
                continue
            corrected = tensors.add(tensors.subtract(gradient, own[k]), mean)
            norms.append(tensors.norm(corrected))
            factor = min(bound / (1e-10 + norms[-1]), 1000.0) if clips else 1.0
            used.append(factor * rates(workers.optimizers[k])[0])
            workers.step(k, corrected, factor)
        local, decision = list(workers.x), clips if size is not None else None
        count += 1
        if count == period:
            workers.x, count, clips = [workers.mean()] * workers.size, 0, None
        trajectory.record(workers.x, workers.mean(), norm=size, clips=decision, norms=norms, rates=used, local=local)
    return trajectory

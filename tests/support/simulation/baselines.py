"""The baselines: Mean, LocalSGD, EASGD, LSGD."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import tensors
from .compress import per_tensor
from .optimizers import Base, Schedule, rates
from .problem import FixedProblem
from .tensors import Tensors
from .trajectory import Trajectory
from .workers import Average, Clip, Workers


def unit(gradient: Tensors) -> Tensors:
    """g/||g|| over the whole model; a zero gradient stays zero."""
    size = tensors.norm(gradient)
    return tensors.scale(gradient, 1 / size) if size > 0 else gradient


def mean(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    compressor=None,
    feedback: bool = True,
    clip: float | None = None,
    unit_norm: bool = False,
) -> Trajectory:
    """Log: out (what the base optimizer gets), sent, residuals, norm (of out), factor (of the rates)."""
    workers, trajectory = Workers(problem, base, lr), Trajectory()
    rule = None if clip is None else Clip(clip, workers.optimizers[0])
    residuals = [tensors.zeros(x) for x in workers.x]
    for t in range(steps):
        workers.lose_shared(t, residuals)
        gradients = workers.gradients(t)
        sent = [unit(g) for g in gradients] if unit_norm else gradients
        if compressor is not None:
            wanted = [tensors.add(g, e) for g, e in zip(sent, residuals, strict=True)]
            sent = [per_tensor(compressor, p) for p in wanted]
            if feedback:
                residuals = [tensors.subtract(p, c) for p, c in zip(wanted, sent, strict=True)]
        out = tensors.mean(sent)
        if unit_norm:
            out = tensors.scale(out, sum(tensors.norm(g) for g in gradients) / workers.size)
        size = tensors.norm(out)
        factor = 1.0 if rule is None else rule.factor(size)
        for k in range(workers.size):
            workers.step(k, out, factor)
        trajectory.record(workers.x, workers.x[0], out=out, sent=sent, residuals=residuals, norm=size, factor=factor)
    return trajectory


def local_sgd(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    period: int = 16,
    starts: Sequence[Tensors] | None = None,
    compressor=None,
    period_rule=None,
) -> Trajectory:
    """Log: local (parameters before averaging)."""
    workers, trajectory = Workers(problem, base, lr, starts), Trajectory()
    average, until = Average(workers, compressor), 0
    for t in range(steps):
        workers.lose_shared(t, average.residuals)
        gradients = [workers.gradient(k, t) for k in range(workers.size)]
        if t == until:
            until += period if period_rule is None else period_rule(period, rates(workers.optimizers[0])[0], t)
        for k, gradient in enumerate(gradients):
            workers.step(k, gradient)
        local = list(workers.x)
        if t + 1 == until:
            average()
        trajectory.record(workers.x, workers.mean(), local=local)
    return trajectory


def easgd(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    period: int = 4,
    pull: float = 0.1,
    starts: Sequence[Tensors] | None = None,
) -> Trajectory:
    """Log: centre (x tilde, which is also the consensus). Both formulas of a round use the old values."""
    workers, trajectory = Workers(problem, base, lr, starts), Trajectory()
    centre = problem.start()
    for t in range(steps):
        workers.lose(t)
        for k in range(workers.size):
            workers.step(k, workers.gradient(k, t))
        if (t + 1) % period == 0:
            before = workers.mean()
            workers.x = [tensors.mix(x, centre, pull / workers.size) for x in workers.x]
            centre = tensors.mix(centre, before, pull)
        trajectory.record(workers.x, centre, centre=centre)
    return trajectory


def running_mean(losses: list[float]) -> float:
    """Over the last 4, or as many as there are; a worker whose mean is not finite never leads."""
    last = losses[-4:]
    value = sum(last) / len(last)
    return value if math.isfinite(value) else math.inf


def lsgd(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    period: int = 4,
    pull: float = 0.1,
    prox: float = 0.1,
    starts: Sequence[Tensors] | None = None,
) -> Trajectory:
    """Log: leader and means (None in a step without a round), centre (the leader's copy)."""
    workers, trajectory = Workers(problem, base, lr, starts), Trajectory()
    centre = problem.start()
    losses: list[list[float]] = [[] for _ in range(workers.size)]
    for t in range(steps):
        workers.lose(t, losses)
        for k in range(workers.size):
            losses[k].append(problem.loss(workers.numbers[k], workers.x[k], t))
            workers.step(k, workers.gradient(k, t))
            workers.x[k] = tensors.mix(workers.x[k], centre, prox / period)
        leader = means = None
        if (t + 1) % period == 0:
            means = [running_mean(own) for own in losses]
            leader = means.index(min(means))
            centre = workers.x[leader]
            workers.x = [tensors.mix(x, centre, pull) for x in workers.x]
        trajectory.record(workers.x, workers.mean(), leader=leader, means=means, centre=centre)
    return trajectory

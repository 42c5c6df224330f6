"""AdaCons, the two-pass way: alpha from the mean gradient, then the weighted sum of unit gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import tensors
from .optimizers import Base, Schedule
from .problem import FixedProblem
from .tensors import Tensors
from .trajectory import Trajectory
from .workers import Workers

EPS = 1e-8
SCALES = ("unit", "mean_norm", "coefficients")


@dataclass
class Outcome:
    """One aggregation: out = sum_i coefficients[i] * g_i, unless it fell back on the plain mean."""

    out: Tensors
    alpha: np.ndarray
    weights: np.ndarray
    coefficients: np.ndarray
    fallback: bool


def unsafe(terms: np.ndarray) -> bool:
    """Whether the terms' sum must not be divided by."""
    total = np.sum(terms)
    return not np.isfinite(total) or total <= 0.1 * np.sum(np.abs(terms))


class Aggregator:
    """One momentum state m: the whole model's, or one tensor's."""

    def __init__(self, momentum: float = 0.99, scale: str = "mean_norm") -> None:
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r}: one of {SCALES}")
        self.beta, self.scale = momentum, scale
        self.m: np.ndarray | None = None

    def __call__(self, gradients: list[Tensors]) -> Outcome:
        if len(gradients) == 1 and self.scale != "unit":
            # Said of N = 1 in so many words: out = g, without eps.
            return Outcome(gradients[0], np.ones(1), np.ones(1), np.ones(1), False)
        mean = tensors.mean(gradients)
        norms = np.array([tensors.norm(g) for g in gradients])
        units = [tensors.scale(g, 1 / (n + EPS)) for g, n in zip(gradients, norms, strict=True)]
        alpha = np.array([tensors.dot(u, mean) for u in units])
        smoothed, m = self.smooth(alpha)
        found = None if unsafe(smoothed) else self.coefficients(smoothed / np.sum(smoothed), norms)
        if found is None:
            uniform = np.full(len(gradients), 1 / len(gradients))
            return Outcome(mean, alpha, uniform, uniform, True)
        self.m = m
        weights, coefficients = found
        return Outcome(tensors.weighted(gradients, coefficients), alpha, weights, coefficients, False)

    def smooth(self, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The momentum runs over the sorted values; return it un-sorted, and sorted."""
        order = np.argsort(alpha, kind="stable")
        ranked = alpha[order]
        m = ranked if self.m is None else self.beta * self.m + (1 - self.beta) * ranked
        smoothed = np.empty_like(m)
        smoothed[order] = m
        return smoothed, m

    def coefficients(self, weights: np.ndarray, norms: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """a, and the factor each g_i gets; None where the scale's own sum is unsafe."""
        terms = weights / (norms + EPS)
        if self.scale == "unit":
            return weights, terms
        if self.scale == "mean_norm":
            return weights, terms * np.mean(norms)
        terms = np.where(norms > 0, terms, 0.0)
        return None if unsafe(terms) else (weights, terms / np.sum(terms))


def aggregate(aggregators: list[Aggregator], gradients: list[Tensors]) -> tuple[Tensors, list[Outcome]]:
    """Aggregate with one aggregator for the model, or one for each tensor."""
    if len(aggregators) == 1:
        outcome = aggregators[0](gradients)
        return outcome.out, [outcome]
    outcomes = [one([[g[i]] for g in gradients]) for i, one in enumerate(aggregators)]
    return [outcome.out[0] for outcome in outcomes], outcomes


def simulate(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    momentum: float = 0.99,
    scale: str = "mean_norm",
    layerwise: bool = False,
) -> Trajectory:
    """Log: out; alpha, weights (a), coefficients (out = sum_i coefficients_i*g_i), fallback.

    The latter four are lists: of one entry for the whole model, or of one per tensor if layerwise.
    """
    workers, trajectory = Workers(problem, base, lr), Trajectory()
    states = len(problem.start()) if layerwise else 1
    aggregators = [Aggregator(momentum, scale) for _ in range(states)]
    for t in range(steps):
        if workers.lose(t):
            for one in aggregators:
                one.m = None
        out, outcomes = aggregate(aggregators, workers.gradients(t))
        for k in range(workers.size):
            workers.step(k, out)
        names = ("alpha", "weights", "coefficients", "fallback")
        entries = {name: [getattr(outcome, name) for outcome in outcomes] for name in names}
        trajectory.record(workers.x, workers.x[0], out=out, **entries)
    return trajectory

"""DiLoCo: outer SGD on what local steps have come to; fragments, QSR and compressed pseudo-gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from . import tensors
from .compress import as_saef
from .optimizers import Base, Schedule, rates
from .problem import FixedProblem
from .tensors import Tensors
from .trajectory import Trajectory
from .workers import Workers


@dataclass(frozen=True)
class QSR:
    """H of a cycle that begins at step t, which has the rate lr."""

    alpha: float
    power: float = 2
    warmup: int = 0
    steps: int | None = None

    def __call__(self, period: int, lr: float, t: int) -> int:
        found = period
        if t >= self.warmup and lr > 0:
            found = max(period, math.floor((self.alpha / lr) ** self.power))
        return found if self.steps is None else max(1, min(found, self.steps - t))


def cut(x: Tensors, fragments: int) -> list[list[int]]:
    """The tensors of each fragment: tensor [lo, hi) of d belongs to floor(P*(lo+hi)/(2d))."""
    ends = np.cumsum([0, *(np.size(a) for a in x)])
    homes = [int(fragments * (lo + hi) // (2 * ends[-1])) for lo, hi in pairwise(ends)]
    return [[j for j, home in enumerate(homes) if min(home, fragments - 1) == p] for p in range(fragments)]


def feed(compressor, deltas: list[Tensors], residuals: list[Tensors], feedback: float = 1.0):
    """What each worker sends of feedback*e + delta, and what is left."""
    if compressor is None:
        return deltas, residuals
    wanted = [tensors.add(tensors.scale(e, feedback), d) for e, d in zip(residuals, deltas, strict=True)]
    sent = [as_saef(compressor, p) for p in wanted]
    return sent, [tensors.subtract(p, c) for p, c in zip(wanted, sent, strict=True)]


def combine(sent: list[Tensors], reduce: str) -> Tensors:
    """The mean of what was sent, or the sum over the number of those who sent an element."""
    if reduce == "mean":
        return tensors.mean(sent)
    senders = [np.maximum(1, sum(c[j] != 0 for c in sent)) for j in range(len(sent[0]))]
    return tensors.each(lambda s, n: s / n, tensors.total(sent), senders)


def simulate(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    period: int = 32,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    compressor=None,
    feedback: float = 1.0,
    reduce: str = "mean",
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
    period_rule=None,
) -> Trajectory:
    """Log: buf, residuals, periods (H of the cycle that a step belongs to), sent (in a round's last step)."""
    workers, trajectory = Workers(problem, base, lr), Trajectory()
    x, buf = problem.start(), tensors.zeros(problem.start())
    residuals = [tensors.zeros(x) for _ in range(workers.size)]
    members = cut(x, fragments)
    slot, inside, length, flight, whole = 0, 0, 0, None, period
    for t in range(steps):
        # What a lost worker has under way does not arrive.
        workers.lose_shared(t, residuals, *([] if flight is None else [flight]))
        gradients = [workers.gradient(k, t) for k in range(workers.size)]
        if inside == 0 and slot % fragments == 0:
            whole = period
            if period_rule is not None:
                whole = period_rule(period, rates(workers.optimizers[0])[0], t)
            length = math.ceil(whole / fragments)
        for k, gradient in enumerate(gradients):
            workers.step(k, gradient)
        inside += 1
        mine, sent = members[slot % fragments], None
        if mine and inside == length - min(delay, length - 1):
            deltas = [[x[j] - y[j] for j in mine] for y in workers.x]
            kept = [[e[j] for j in mine] for e in residuals]
            flight, kept = feed(compressor, deltas, kept, feedback)
            for e, new in zip(residuals, kept, strict=True):
                for j, value in zip(mine, new, strict=True):
                    e[j] = value
        if inside == length:
            if mine:
                sent = flight
                for j, delta in zip(mine, combine(sent, reduce), strict=True):
                    buf[j] = outer_momentum * buf[j] + delta
                    x[j] = x[j] - outer_lr * (delta + outer_momentum * buf[j] if nesterov else buf[j])
                    for k in range(workers.size):
                        workers.x[k] = list(workers.x[k])
                        workers.x[k][j] = (1 - mixing) * x[j] + mixing * workers.x[k][j]
            slot, inside = slot + 1, 0
        trajectory.record(
            workers.x, list(x), buf=list(buf), residuals=[list(e) for e in residuals], periods=whole, sent=sent
        )
    return trajectory

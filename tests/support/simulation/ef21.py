"""EF21: compressed differences between every worker's momentum and the estimate of it."""

from __future__ import annotations

from . import tensors
from .compress import per_tensor
from .optimizers import Base, Schedule
from .problem import FixedProblem
from .trajectory import Trajectory
from .workers import Workers


def simulate(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    compressor,
    momentum: float = 0.9,
    start: str = "dense",
) -> Trajectory:
    """Log: sent (c_i), momentum (v_i), estimates (h_i), out (h)."""
    workers, trajectory = Workers(problem, base, lr), Trajectory()
    v: list = []
    estimates = [tensors.zeros(x) for x in workers.x]
    out = tensors.zeros(workers.x[0])
    for t in range(steps):
        n = len(out)
        # Copies are of both, as one.
        both = [[*a, *h] for a, h in zip(v, estimates, strict=True)] if t else []
        if workers.lose_shared(t, both, v, estimates):
            v, estimates = [a[:n] for a in both], [a[n:] for a in both]
            out = tensors.mean(estimates)
        gradients = workers.gradients(t)
        if t == 0:
            v = gradients
        else:
            v = [
                tensors.add(tensors.scale(a, momentum), tensors.scale(g, 1 - momentum))
                for a, g in zip(v, gradients, strict=True)
            ]
        differences = [tensors.subtract(a, h) for a, h in zip(v, estimates, strict=True)]
        dense = start == "dense" and t == 0
        sent = differences if dense else [per_tensor(compressor, d) for d in differences]
        estimates = [tensors.add(h, c) for h, c in zip(estimates, sent, strict=True)]
        out = tensors.add(out, tensors.mean(sent))
        for k in range(workers.size):
            workers.step(k, out)
        trajectory.record(workers.x, workers.x[0], sent=sent, momentum=v, estimates=estimates, out=out)
    return trajectory

"""SAEF: error feedback whose gradient is taken at x - e_k, optionally compressed both ways."""

from __future__ import annotations

from . import tensors
from .compress import as_saef
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
    server=None,
    average_every: int = 0,
    step_ahead: float = True,
    period: int = 1,
) -> Trajectory:
    """Log: updates, deltas, sent (c_k), residuals (e_k = delta_k - c_k), out (o), server (s), x, carried.

    `carried` is e_k as it is between steps: `residuals`, after the averaging due in the next iteration.
    `held` is y_k of the next iteration.
    """
    workers, trajectory = Workers(problem, base, lr), Trajectory()
    x = problem.start()
    residuals = [tensors.zeros(x)] * workers.size
    server_residual = tensors.zeros(x)
    for t in range(steps // period):
        workers.lose_shared(t * period, residuals)
        updates = [tensors.zeros(x)] * workers.size
        for local in range(t * period, (t + 1) * period):
            news = [workers.update(k, g) for k, g in enumerate(workers.gradients(local))]
            updates = [tensors.add(u, v) for u, v in zip(updates, news, strict=True)]
            workers.x = [tensors.subtract(y, v) for y, v in zip(workers.x, news, strict=True)]
        deltas = [tensors.add(e, u) for e, u in zip(residuals, updates, strict=True)]
        sent = [as_saef(compressor, delta) for delta in deltas]
        residuals = [tensors.subtract(delta, c) for delta, c in zip(deltas, sent, strict=True)]
        out = tensors.mean(sent)
        if server is not None:
            wanted = tensors.add(server_residual, out)
            out = as_saef(server, wanted)
            server_residual = tensors.subtract(wanted, out)
        x = tensors.subtract(x, out)
        own = residuals
        upcoming = t + 1  # the averaging due in iteration t+1 comes before its parameters are written
        if average_every > 0 and (upcoming + 1) % average_every == 0:
            residuals = [tensors.mean(own)] * workers.size
        workers.x = [tensors.subtract(x, tensors.scale(e, float(step_ahead))) for e in residuals]
        trajectory.record(
            workers.x,
            x,
            updates=updates,
            deltas=deltas,
            sent=sent,
            residuals=own,
            out=out,
            server=server_residual,
            x=x,
            carried=residuals,
        )
    return trajectory

"""SASG: upload the top-k of update plus residual, and only when the gradient has changed enough."""

from __future__ import annotations

from dataclasses import dataclass

from . import tensors
from .compress import TopK, per_tensor
from .optimizers import Base, Schedule
from .problem import FixedProblem
from .tensors import Tensors
from .trajectory import Trajectory
from .workers import Workers


@dataclass
class Memory:
    """What one worker remembers: residual e, last message q, snapshot w_snap, delay tau."""

    residual: Tensors
    message: Tensors | None = None
    snapshot: Tensors | None = None
    delay: int = 0


def simulate(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    lr: Schedule | None = None,
    density: float = 0.01,
    alpha: float | None = None,
    max_delay: int = 10,
    terms: int | None = None,
    warmup: int = 10,
    reduce: str = "sum",
    compressor=None,
) -> Trajectory:
    """Log: theta, left (None where not asked), uploads, q, residuals, updates (None on a skip), delays."""
    workers, trajectory = Workers(problem, base, lr), Trajectory()
    terms = max_delay - 1 if terms is None else terms
    memories = [Memory(tensors.zeros(x)) for x in workers.x]
    lengths: list[float] = []  # squared step lengths, newest first
    for t in range(steps):
        # Who has news finds that out before it can know that another is lost in this step.
        known = workers.size
        residuals = [memory.residual for memory in memories]
        workers.lose_shared(t, residuals, memories, summed=reduce == "sum")
        for memory, residual in zip(memories, residuals, strict=True):
            memory.residual = residual
            if workers.shared:
                memory.message, memory.delay = None, 0
        size = workers.size
        w = workers.x[0]
        gradients = workers.gradients(t)
        rate = workers.optimizers[0].groups[0].lr
        factor = alpha if alpha is not None else (known if reduce == "mean" else 1) / rate
        theta = factor / known**2 * sum(lengths[:terms])
        left, uploads, updates = [], [], []
        for k, (g, memory) in enumerate(zip(gradients, memories, strict=True)):
            change = None
            if t >= warmup and memory.message is not None:
                difference = tensors.subtract(g, problem.gradient(workers.numbers[k], memory.snapshot, t))
                change = tensors.dot(difference, difference)
            upload = change is None or change > theta or memory.delay > max_delay
            update = workers.update(k, g) if upload else None
            left.append(change)
            uploads.append(upload)
            updates.append(update)
            if upload:
                wanted = tensors.add(update, memory.residual)
                memory.message = per_tensor(TopK(density) if compressor is None else compressor, wanted)
                memory.residual = tensors.subtract(wanted, memory.message)
                memory.snapshot, memory.delay = w, 1
            else:
                memory.delay += 1
        move = tensors.total([memory.message for memory in memories])
        if reduce == "mean":
            move = tensors.scale(move, 1 / size)
        after = tensors.subtract(w, move)
        moved = tensors.subtract(after, w)
        lengths.insert(0, tensors.dot(moved, moved))
        workers.x = [after] * size
        trajectory.record(
            workers.x,
            after,
            theta=theta,
            left=left,
            uploads=uploads,
            updates=updates,
            q=[memory.message for memory in memories],
            residuals=[memory.residual for memory in memories],
            delays=[memory.delay for memory in memories],
        )
    return trajectory

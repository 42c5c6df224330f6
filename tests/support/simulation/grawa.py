"""MGRAWA and LGRAWA: local steps, then a pull toward a mean that weighs small gradient norms more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from . import tensors
from .optimizers import Base, Schedule
from .problem import FixedProblem
from .tensors import Tensors
from .trajectory import Trajectory
from .workers import Average, Workers

#: (worker, its parameters, number of the round from 1) -> gradients
Probe = Callable[[int, Tensors, int], Tensors]


def smoothed_norms(v: np.ndarray, count: int, norms: np.ndarray, ema: float) -> tuple[np.ndarray, np.ndarray]:
    """v after its count-th update, and nhat."""
    v = ema * v + (1 - ema) * norms
    return v, v / (1 - ema**count)


def betas(nhat: np.ndarray) -> np.ndarray:
    """Weights from an array (workers, norms); a row of NaN is a worker that gets weight 0."""
    taking_part = np.isfinite(nhat).all(axis=1)
    if not taking_part.any():
        raise FloatingPointError("no worker has a finite gradient")
    here = nhat[taking_part]
    here = np.maximum(here, 1e-3 * here.mean(axis=0))
    frozen = (here == 0).all(axis=0)
    inverse = 1 / np.where(frozen, 1.0, here)
    weights = np.zeros_like(nhat)
    weights[taking_part] = inverse / inverse.sum(axis=0)
    return weights


class Rounds:
    """The workers of a run, what each remembers of its norms, and the centre."""

    def __init__(
        self,
        workers: Workers,
        *,
        layerwise: bool,
        period: int = 32,
        pull: float = 0.5,
        prox: float = 0.01,
        ema: float = 0.9**8,
        norms: str = "step",
        probe: Probe | None = None,
        compressor=None,
    ) -> None:
        if norms not in ("step", "probe") or (norms == "probe") != (probe is not None):
            raise ValueError('norms="step", or norms="probe" together with probe')
        self.workers, self.layerwise = workers, layerwise
        self.period, self.pull, self.prox, self.ema, self.probe = period, pull, prox, ema, probe
        self.centre = workers.problem.start()
        self.average = None
        if compressor is not None:
            self.average = Average(workers, compressor)
            self.average.x = self.centre
        width = len(self.centre) if layerwise else 1
        self.v = [np.zeros(width) for _ in range(workers.size)]
        self.counts = [0] * workers.size
        self.last: list[Tensors | None] = [None] * workers.size
        self.rounds = 0

    def local_step(self, k: int, t: int) -> None:
        gradient = self.workers.gradient(k, t)
        self.workers.step(k, gradient)
        self.last[k] = gradient
        self.workers.x[k] = tensors.mix(self.workers.x[k], self.centre, self.prox / self.period)

    def norms(self, k: int) -> np.ndarray:
        """The norms worker k brings: one per tensor or their sum; NaN where it has no finite gradient."""
        gradient = self.last[k] if self.probe is None else self.probe(k, self.workers.x[k], self.rounds)
        if gradient is None or not tensors.finite(gradient):
            return np.full(len(self.v[k]), np.nan)
        per_tensor = np.array([tensors.norm([g]) for g in gradient])
        return per_tensor if self.layerwise else per_tensor.sum(keepdims=True)

    def nhat(self, k: int, norms: np.ndarray) -> np.ndarray:
        if np.isnan(norms).any():
            return norms
        self.counts[k] += 1
        self.v[k], nhat = smoothed_norms(self.v[k], self.counts[k], norms, self.ema)
        return nhat

    def round(self) -> dict[str, np.ndarray]:
        """Weigh, form the centre, pull; return arrays (workers, tensors or 1)."""
        self.rounds += 1
        norms = np.array([self.norms(k) for k in range(self.workers.size)])
        nhat = np.array([self.nhat(k, n) for k, n in enumerate(norms)])
        weights = betas(nhat)
        wide = np.broadcast_to(weights, (self.workers.size, len(self.centre)))
        x = self.workers.x
        if self.average is None:
            self.centre = tensors.total(
                [tensors.each(lambda w, y: w * y, list(row), mine) for row, mine in zip(wide, x, strict=True)]
            )
        else:
            self.average.move(self.workers.size * wide)
            self.centre = self.average.x
        self.workers.x = [tensors.mix(mine, self.centre, self.pull) for mine in x]
        return {"norms": norms, "nhat": nhat, "betas": weights}


NO_ROUND = {"norms": None, "nhat": None, "betas": None}


def simulate(
    problem: FixedProblem,
    steps: int,
    base: Base,
    *,
    layerwise: bool,
    lr: Schedule | None = None,
    starts: Sequence[Tensors] | None = None,
    asynchronous: bool = False,
    time_budget_s: float | None = None,
    **settings,
) -> Trajectory:
    """The synchronous protocol: a round after every `period` local steps.

    Log: norms, nhat, betas: arrays (workers, tensors or 1), None in a step without a round; centre.
    `starts` are the workers' parameters, set after the optimizer is made. A time budget is not simulated.
    """
    if asynchronous or time_budget_s is not None:
        raise ValueError("asynchronous and time_budget_s: see simulate_asynchronous, which needs the order")
    workers, trajectory = Workers(problem, base, lr, starts), Trajectory()
    rounds = Rounds(workers, layerwise=layerwise, **settings)
    for t in range(steps):
        workers.lose(t, rounds.v, rounds.counts, rounds.last)
        for k in range(workers.size):
            rounds.local_step(k, t)
        entries = rounds.round() if (t + 1) % rounds.period == 0 else NO_ROUND
        trajectory.record(workers.x, workers.mean(), centre=rounds.centre, **entries)
    return trajectory


mgrawa = partial(simulate, layerwise=False)
lgrawa = partial(simulate, layerwise=True)


def tickets(order: Sequence[int], workers: int, period: int) -> list[str]:
    """What each ticket means, given the worker that takes it: "local" step or join the "round".

    A worker that has joined waits until all have: an order in which it takes a ticket before is refused.
    """
    meanings, waiting = [], set()
    for number, worker in enumerate(order):
        if worker in waiting:
            raise ValueError(f"ticket {number}: worker {worker} is waiting in the round")
        local = number % (workers * (period + 1)) < workers * period
        meanings.append("local" if local else "round")
        if not local:
            waiting.add(worker)
            if len(waiting) == workers:
                waiting.clear()
    return meanings


def simulate_asynchronous(
    problem: FixedProblem,
    order: Sequence[int],
    base: Base,
    *,
    layerwise: bool,
    lr: Schedule | None = None,
    starts: Sequence[Tensors] | None = None,
    **settings,
) -> Trajectory:
    """The ticket protocol, for a given order of the workers' tickets; one record per ticket.

    The step t of a gradient or a learning rate is the worker's own count of local steps. The round happens
    when its last worker joins. Log as `simulate`, and: worker, kind ("local", "round"), own_steps.
    """
    workers, trajectory = Workers(problem, base, lr, starts), Trajectory()
    rounds = Rounds(workers, layerwise=layerwise, **settings)
    own, joined = [0] * workers.size, 0
    for k, kind in zip(order, tickets(order, workers.size, rounds.period), strict=True):
        entries = NO_ROUND
        if kind == "local":
            rounds.local_step(k, own[k])
            own[k] += 1
        else:
            joined += 1
            if joined % workers.size == 0:
                entries = rounds.round()
        trajectory.record(
            workers.x, workers.mean(), centre=rounds.centre, worker=k, kind=kind, own_steps=tuple(own), **entries
        )
    return trajectory

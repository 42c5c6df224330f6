"""Training problems whose gradients are known exactly.

Worker k in step t: loss = sum 0.5*A_k*(x-b_k)^2 + c_kt*x, gradient = A_k*(x-b_k) + c_kt, elementwise.
c_kt stands for the minibatch: small, and the same whenever the same (k, t) is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .tensors import Tensors, copy, each, unflatten


def as_tensors(value: object) -> Tensors:
    """A list of arrays as it is; a flat list of numbers, or an array, as the only tensor of a model."""
    if isinstance(value, list | tuple) and all(isinstance(x, np.ndarray | list | tuple) for x in value):
        return [np.array(x, dtype=np.float64) for x in value]
    return [np.array(value, dtype=np.float64)]


class FixedProblem:
    """The quadratic of the worked examples: gradient A_k*(x-b_k), the same in every step.

    Parameters
    ----------
    scales, targets
        A_k and b_k of each worker: a list of arrays, or a flat list of numbers for a single tensor.
    start
        The initial parameters, of all workers alike.
    """

    def __init__(self, scales: Sequence, targets: Sequence, start: object) -> None:
        self.scales = [as_tensors(a) for a in scales]
        self.targets = [as_tensors(b) for b in targets]
        self.initial = as_tensors(start)
        self.workers = len(self.scales)
        #: The workers that are lost before a step, by steps.
        self.lost: dict[int, list[int]] = {}
        #: Every so many steps residuals are copied to the next worker; None for never.
        self.buddy: int | None = None

    def start(self) -> Tensors:
        return copy(self.initial)

    def shift(self, k: int, t: int) -> Tensors:
        """c_kt, the part of worker k's gradient that is its minibatch of step t."""
        return [np.zeros(x.shape) for x in self.initial]

    def gradient(self, k: int, x: Tensors, t: int) -> Tensors:
        return each(lambda a, y, b, c: a * (y - b) + c, self.scales[k], x, self.targets[k], self.shift(k, t))

    def loss(self, k: int, x: Tensors, t: int) -> float:
        rows = zip(self.scales[k], x, self.targets[k], self.shift(k, t), strict=True)
        return float(sum(np.sum(0.5 * a * (y - b) ** 2 + c * y) for a, y, b, c in rows))


class Problem(FixedProblem):
    """A random quadratic for each worker.

    Parameters
    ----------
    anisotropy
        The elements of A_k are log-uniform in [1/anisotropy, 1].
    noise
        Standard deviation of the elements of c_kt.
    same
        All workers have the data of worker 0.
    """

    def __init__(
        self,
        workers: int,
        seed: int = 0,
        shapes: Sequence[tuple[int, ...]] = ((), (5,), (3, 4), (2, 2, 2)),
        anisotropy: float = 10.0,
        noise: float = 0.1,
        same: bool = False,
    ) -> None:
        self.seed, self.noise, self.same = seed, noise, same
        self.shapes = [tuple(shape) for shape in shapes]
        sources = [0 if same else k for k in range(workers)]
        low = -np.log(anisotropy)
        scales = [self._draw(lambda g, s: np.exp(g.uniform(low, 0, s)), 0, k, 0) for k in sources]
        targets = [self._draw(lambda g, s: g.normal(size=s), 1, k, 0) for k in sources]
        super().__init__(scales, targets, self._draw(lambda g, s: g.normal(size=s), 2, 0, 0))
        self._shifts: dict[tuple[int, int], Tensors] = {}

    def _draw(self, sample, *key: int) -> Tensors:
        # Keys of one length: numpy pads shorter ones with zeros, so that (1, 2) and (1, 2, 0) are one stream.
        generator = np.random.default_rng([self.seed, *key])
        return unflatten(sample(generator, sum(map(math.prod, self.shapes))), self.shapes)

    def shift(self, k: int, t: int) -> Tensors:
        key = (0 if self.same else k, t)
        if key not in self._shifts:
            self._shifts[key] = self._draw(lambda g, s: self.noise * g.normal(size=s), 3, *key)
        return self._shifts[key]

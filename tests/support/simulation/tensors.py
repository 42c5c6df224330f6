"""Arithmetic on lists of float64 arrays, one array per named parameter; nothing works in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Tensors = list[np.ndarray]


def each(function: Callable, *lists: Tensors) -> Tensors:
    """Apply a function tensor by tensor; a 0-d tensor stays an array."""
    return [np.asarray(function(*row), dtype=np.float64) for row in zip(*lists, strict=True)]


def copy(a: Tensors) -> Tensors:
    return [np.array(x, dtype=np.float64) for x in a]


def zeros(a: Tensors) -> Tensors:
    return [np.zeros(np.shape(x)) for x in a]


def add(a: Tensors, b: Tensors) -> Tensors:
    return each(np.add, a, b)


def subtract(a: Tensors, b: Tensors) -> Tensors:
    return each(np.subtract, a, b)


def scale(a: Tensors, factor: float) -> Tensors:
    return each(lambda x: factor * x, a)


def mix(a: Tensors, b: Tensors, weight: float) -> Tensors:
    """(1 - weight) * a + weight * b."""
    return each(lambda x, y: (1 - weight) * x + weight * y, a, b)


def total(many: Sequence[Tensors]) -> Tensors:
    """The sum over workers, in the order of the ranks."""
    result = many[0]
    for a in many[1:]:
        result = add(result, a)
    return result


def mean(many: Sequence[Tensors]) -> Tensors:
    return each(lambda x: x / len(many), total(many))


def weighted(many: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    return total([scale(a, w) for a, w in zip(many, weights, strict=True)])


def dot(a: Tensors, b: Tensors) -> float:
    return float(sum(np.vdot(x, y) for x, y in zip(a, b, strict=True)))


def norm(a: Tensors) -> float:
    """The 2-norm over all tensors together."""
    return float(np.sqrt(dot(a, a)))


def finite(a: Tensors) -> bool:
    return all(np.isfinite(x).all() for x in a)


def flatten(a: Tensors) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in a])


def unflatten(vector: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> Tensors:
    """Cut a vector into tensors of these shapes, in order."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    rows = zip(ends, shapes, strict=True)
    return [vector[end - math.prod(shape) : end].reshape(shape) for end, shape in rows]

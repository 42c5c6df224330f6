"""TopK, Sign and Identity: what arrives after compressing and decompressing one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .tensors import Tensors, each, flatten, unflatten


def kept(density: float, numel: int) -> int:
    """k = max(1, floor(density*numel)); 1e-9 forgives a density such as 0.1 its last bit."""
    return min(numel, max(1, math.floor(density * numel + 1e-9)))


@dataclass(frozen=True)
class Identity:
    whole_model = False

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        return np.array(tensor)


@dataclass(frozen=True)
class TopK:
    """The k elements of largest magnitude; ties: lowest index first."""

    density: float
    whole_model = False

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        flat = np.ravel(tensor)
        chosen = np.argsort(-np.abs(flat), kind="stable")[: kept(self.density, flat.size)]
        result = np.zeros(flat.size)
        result[chosen] = flat[chosen]
        return result.reshape(np.shape(tensor))


@dataclass(frozen=True)
class Sign:
    """sign(z) * ||z||_1 / d with sign(0) = sign(-0) = +1."""

    whole_model = True

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        size = np.sum(np.abs(tensor)) / max(1, np.size(tensor))
        return np.where(np.asarray(tensor) >= 0, size, -size)


def per_tensor(compressor, a: Tensors) -> Tensors:
    """As Mean and SASG compress: each tensor by itself."""
    return each(compressor, a)


def as_saef(compressor, a: Tensors) -> Tensors:
    """As SAEF compresses: Sign sees the whole model as one vector, others each tensor."""
    if compressor.whole_model:
        return unflatten(compressor(flatten(a)), [np.shape(x) for x in a])
    return per_tensor(compressor, a)

"""TopK, ChunkTopK, Sign and Identity: what arrives after compressing and decompressing one tensor."""

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
class ChunkTopK:
    """The k elements of largest magnitude of every chunk, each as the mean of its cell."""

    k: int = 64
    chunk: int = 4096
    bits: int | None = 2
    codebook: str = "sigma"
    whole_model = False

    def places(self, tensor: np.ndarray) -> np.ndarray:
        """The indices of what is sent."""
        flat, found = np.ravel(tensor), []
        for low in range(0, flat.size, self.chunk):
            part = flat[low : low + self.chunk]
            order = np.argsort(-np.abs(part), kind="stable")
            found.append(low + order[: max(1, math.floor(self.k * part.size / self.chunk))])
        return np.sort(np.concatenate(found)) if found else np.zeros(0, int)

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        flat, chosen = np.ravel(tensor), self.places(tensor)
        result = np.zeros(flat.size)
        values = flat[chosen]
        result[chosen] = values
        if self.bits is not None and values.size:
            codes = self.sigma(values) if self.codebook == "sigma" else self.signed(values)
            result[chosen] = [values[codes == code].mean() for code in codes]
        return result.reshape(np.shape(tensor))

    def sigma(self, values: np.ndarray) -> np.ndarray:
        levels = 2**self.bits
        width = 6 * (values.std(ddof=1) if values.size > 1 else 0.0) / levels
        if width == 0 or not np.isfinite(width):
            width = 1.0
        return np.clip(np.rint((values - values.mean()) / width + levels / 2), 0, levels - 1).astype(int)

    def signed(self, values: np.ndarray) -> np.ndarray:
        codes = np.where(values >= 0, 0, 1)
        for _ in range(self.bits - 1):
            means = {code: np.abs(values[codes == code]).mean() for code in set(codes.tolist())}
            codes = 2 * codes + (np.abs(values) > [means[code] for code in codes.tolist()])
        return codes


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

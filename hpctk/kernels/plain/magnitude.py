"""`kernels.magnitude` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.plain.ordered import pieces

Array = NDArray[Any]


def magnitudes(values: Array) -> Array:
    """Return the bits of floats, or of their unsigned view, without the sign."""
    unsigned = np.dtype(f"u{values.itemsize}")
    found: Array = values.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    return found


def top(sizes: Array, k: int) -> Array:
    """Return the indices of the k largest magnitudes, ascending; of equal ones the lowest."""
    threshold = np.partition(sizes, len(sizes) - k)[len(sizes) - k] if k else np.iinfo(sizes.dtype).max
    return _first_reaching(sizes, threshold, k - int(np.count_nonzero(sizes > threshold)))


def _first_reaching(sizes: Array, threshold: Any, ties: int) -> Array:
    """Return the indices of magnitudes above a threshold, and of the first `ties` that equal it; ascending."""
    chosen = sizes > threshold
    chosen[np.flatnonzero(sizes == threshold)[:ties]] = True
    return np.flatnonzero(chosen)


def sums(source: Array, other: Array | None, weight: Any, places: Any) -> Array:
    """Return source + weight * other at some places, or the source alone."""
    summed: Array = source[places] if other is None else source[places] + weight * other[places]
    return summed


def first_not_finite(source: Array, other: Array | None, weight: Any, inf: Any) -> int:
    for lo, hi in pieces(0, len(source)):
        bad = magnitudes(sums(source, other, weight, slice(lo, hi))) >= inf
        if bad.any():
            return lo + int(bad.argmax())
    return -1


def sample(source: Array, other: Array | None, weight: Any, chosen: Array) -> None:
    numbers, stride = np.arange(len(chosen), dtype=np.uint64), np.uint64(len(source) // len(chosen))
    jitter = (((numbers * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)) * stride) >> np.uint64(32)
    chosen[:] = sums(source, other, weight, numbers * stride + jitter)


def histogram(source: Array, other: Array | None, weight: Any, low: Any, shift: Any, counts: Array) -> None:
    for lo, hi in pieces(0, len(source)):
        sizes = magnitudes(sums(source, other, weight, slice(lo, hi))).astype(np.uint64)
        bins = (sizes - np.uint64(low)) >> np.uint64(shift)
        counts += np.bincount(bins[bins < np.uint64(len(counts))].astype(np.intp), minlength=len(counts))


def largest(source: Array) -> Any:
    return magnitudes(source).max()


def count(source: Array, other: Array | None, weight: Any, threshold: Any) -> tuple[int, int]:
    above, equal = 0, 0
    for lo, hi in pieces(0, len(source)):
        sizes = magnitudes(sums(source, other, weight, slice(lo, hi)))
        above += int(np.count_nonzero(sizes > threshold))
        equal += int(np.count_nonzero(sizes == threshold))
    return above, equal


def write_indices(
    source: Array, other: Array | None, weight: Any, threshold: Any, ties: int, first: int, indices: Array
) -> None:
    found = _first_reaching(magnitudes(sums(source, other, weight, slice(None))), threshold, ties)
    indices[:] = first + found[: len(indices)]


def collect(
    source: Array,
    other: Array | None,
    weight: Any,
    threshold: Any,
    start: int,
    stop: int,
    indices: Array,
    values: Array,
) -> tuple[int, int]:
    found = 0
    for lo, hi in pieces(start, stop):
        summed = sums(source, other, weight, slice(lo, hi))
        hits = np.flatnonzero(magnitudes(summed) >= threshold)
        taken = hits[: len(indices) - found]
        indices[found : found + len(taken)] = lo + taken
        values[found : found + len(taken)] = summed[taken]
        found += len(taken)
        if len(taken) < len(hits):
            return found, lo + int(hits[len(taken)])
    return found, stop


def pick_small(source: Array, other: Array, weight: Any, inf: Any, indices: Array, values: Array) -> int:
    summed = sums(source, other, weight, slice(None))
    sizes = magnitudes(summed)
    bad = sizes >= inf
    if bad.any():
        return int(bad.argmax())
    indices[:] = top(sizes, len(indices))
    values[:] = summed[indices]
    return -1


def feed_small(source: Array, gradient: Array, inf: Any, indices: Array, values: Array) -> int:
    bad = pick_small(source, gradient, source.dtype.type(1), inf, indices, values)
    if bad < 0:
        add_and_clear(source, gradient, indices, None, 0)
    return bad


def add_and_clear(source: Array, gradient: Array | None, cleared: Array, left: Array | None, first: int) -> None:
    if gradient is not None:
        source += gradient
    source[cleared - first] = 0 if left is None else left


def keep_largest(
    indices: Array, values: Array, threshold: Any, ties: int, kept_indices: Array, kept_values: Array
) -> None:
    found = _first_reaching(magnitudes(values), threshold, ties)[: len(kept_indices)]
    kept_indices[:], kept_values[:] = indices[found], values[found]

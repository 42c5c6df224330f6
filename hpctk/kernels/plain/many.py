"""`kernels.many` in numpy: a call of Python for each array."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.plain.magnitude import magnitudes, top

Array = NDArray[Any]


def _row(address: int, n: int, dtype: np.dtype[Any]) -> Array:
    """Return the array that begins at an address, not a copy."""
    memory = (ctypes.c_byte * (int(n) * dtype.itemsize)).from_address(int(address))
    return np.ndarray((int(n),), dtype, memoryview(memory).cast("B"))


def gather(addresses: Array, edges: Array, flat: Array) -> None:
    for address, lo, hi in zip(addresses, edges, edges[1:], strict=False):
        flat[lo:hi] = _row(address, hi - lo, flat.dtype) if address else 0


def scatter(flat: Array, addresses: Array, edges: Array) -> None:
    for address, lo, hi in zip(addresses, edges, edges[1:], strict=False):
        _row(address, hi - lo, flat.dtype)[:] = flat[lo:hi]


def largest(addresses: Array, edges: Array, inf: Any, like: Array) -> tuple[int, Any]:
    peak = np.dtype(f"u{like.itemsize}").type(0)
    for s, n in enumerate(np.diff(edges)):
        if n:
            peak = max(peak, magnitudes(_row(addresses[s], n, like.dtype)).max())
        if peak >= inf:
            return s, peak
    return -1, peak


def first_bad_sum(residuals: Array, gradients: Array, edges: Array, inf: Any, like: Array) -> tuple[int, int]:
    for s, n in enumerate(np.diff(edges)):
        summed = _row(gradients[s], n, like.dtype)
        if residuals[s]:
            summed = _row(residuals[s], n, like.dtype) + summed
        bad = magnitudes(summed) >= inf
        if bad.any():
            return s, int(bad.argmax())
    return -1, -1


def take_largest(
    residuals: Array,
    gradients: Array,
    edges: Array,
    which: Array,
    counts: Array,
    places: Array,
    indices: Array,
    values: Array,
) -> None:
    for s in which:
        start, n, at = edges[s], edges[s + 1] - edges[s], slice(places[s], places[s] + counts[s])
        if n == 0:
            continue
        summed = _row(gradients[s], n, values.dtype)
        if residuals[s]:
            kept = _row(residuals[s], n, values.dtype)
            kept += summed
            summed = kept
        found = top(magnitudes(summed), int(counts[s]))
        indices[at], values[at] = start + found, summed[found]
        if residuals[s]:
            kept[found] = 0


def write_sparse(addresses: Array, edges: Array, indices: Array, values: Array, clear: bool) -> None:
    cuts = np.searchsorted(indices, edges)
    for s, address in enumerate(addresses):
        if address:
            row = _row(address, edges[s + 1] - edges[s], values.dtype)
            if clear:
                row[:] = 0
            part = slice(cuts[s], cuts[s + 1])
            row[indices[part] - edges[s]] = values[part]

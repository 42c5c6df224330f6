"""Sums of two arrays, shared by threads: whether they stay below a limit, and adding one to the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels import magnitude
from hpctk.kernels.threads import share, spans

Array = NDArray[Any]


def all_below(a: Array, b: Array, limit: float, *, threads: int | None = None) -> bool:
    """Return whether every |a + b| is below a limit, which no NaN is. Not in place.

    Arrays of float32 or float64: flat, contiguous, of one length and dtype.
    """
    # In the order of their bits magnitudes are integers, and the first that is not finite the first at the limit.
    bits = a.dtype.type(limit).view(f"u{a.itemsize}")
    calls = [(a[lo:hi], b[lo:hi], a.dtype.type(1), bits) for lo, hi in spans(len(a), threads)]
    return all(index < 0 for index in share(magnitude.first_not_finite, calls))


def add(a: Array, b: Array, *, threads: int | None = None) -> None:
    """Add b to a, in place."""
    share(np.add, [(a[lo:hi], b[lo:hi], a[lo:hi]) for lo, hi in spans(len(a), threads)])

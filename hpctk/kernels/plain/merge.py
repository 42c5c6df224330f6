"""`kernels.merge` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _merge(a_indices: Array, a_values: Array, b_indices: Array, b_values: Array, indices: Array, values: Array) -> int:
    together = np.concatenate([a_indices, b_indices])
    # Stable: of two equal indices a's comes first.
    order = np.argsort(together, kind="stable")
    together, given = together[order], np.concatenate([a_values, b_values])[order]
    again = np.flatnonzero(together[1:] == together[:-1]) + 1
    given[again - 1] += given[again]
    n = len(together) - len(again)
    indices[:n], values[:n] = np.delete(together, again), np.delete(given, again)
    return n


def _not_in(indices: Array, kept: Array, missing: Array) -> None:
    missing[:] = True
    if len(kept):
        places = np.minimum(np.searchsorted(kept, indices), len(kept) - 1)
        missing[:] = kept[places] != indices


def _first_outside(indices: Array, n: int) -> int:
    outside = (indices < 0) | (indices >= n)
    return int(outside.argmax()) if outside.any() else -1


def _scatter_add(dense: Array, indices: Array, values: Array) -> None:
    np.add.at(dense, indices, values)


def _scatter(dense: Array, indices: Array, values: Array) -> None:
    dense[indices] = values


def _take(dense: Array, indices: Array, values: Array) -> None:
    values[:] = dense[indices]

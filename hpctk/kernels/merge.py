"""Sparse vectors as two lists, ascending indices and their values: sums, and to and from dense ones."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled

Array = NDArray[Any]


def same_length(indices: Sized, values: Sized) -> None:
    """Raise ValueError unless there are as many indices as values."""
    if len(indices) != len(values):
        raise ValueError(f"{len(indices)} indices, but {len(values)} values")


def merge(a_indices: Array, a_values: Array, b_indices: Array, b_values: Array) -> tuple[Array, Array]:
    """Return the sum of two sparse vectors, as new arrays.

    Indices, of int32 or int64, ascend without duplicates; where both vectors have one the result holds a + b, in the
    dtype of the values, float32 or float64.
    """
    same_length(a_indices, a_values)
    same_length(b_indices, b_values)
    if a_indices.dtype != b_indices.dtype or a_values.dtype != b_values.dtype:
        raise ValueError(f"cannot merge {a_indices.dtype}/{a_values.dtype} with {b_indices.dtype}/{b_values.dtype}")
    indices = np.empty(len(a_indices) + len(b_indices), a_indices.dtype)
    values = np.empty(len(indices), a_values.dtype)
    n = _merge(a_indices, a_values, b_indices, b_values, indices, values)
    return indices[:n], values[:n]


def not_in(indices: Array, kept: Array) -> NDArray[np.bool_]:
    """Return for each of `indices` whether it is missing in `kept`; both ascending, without duplicates."""
    missing = np.empty(len(indices), np.bool_)
    _not_in(indices, kept, missing)
    return missing


def scatter_add(dense: Array, indices: Array, values: Array) -> None:
    """Add values at indices, in place; a duplicate index adds twice. Out of bounds: nothing is written."""
    same_length(indices, values)
    _check_bounds(dense, indices)
    _scatter_add(dense, indices, values)


def scatter(dense: Array, indices: Array, values: Array) -> None:
    """Write values at indices, in place. Out of bounds: nothing is written."""
    same_length(indices, values)
    _check_bounds(dense, indices)
    _scatter(dense, indices, values)


def take(dense: Array, indices: Array) -> Array:
    """Return the values at indices, as a new array."""
    _check_bounds(dense, indices)
    values = np.empty(len(indices), dense.dtype)
    _take(dense, indices, values)
    return values


def _check_bounds(dense: Array, indices: Array) -> None:
    position = _first_outside(indices, len(dense))
    if position >= 0:
        raise IndexError(f"index {indices[position]} is outside an array of length {len(dense)}")


@compiled
def _merge(a_indices: Array, a_values: Array, b_indices: Array, b_values: Array, indices: Array, values: Array) -> int:
    i, j, n = 0, 0, 0
    # -0.0, not 0.0, leaves every number as it is: -0.0 + 0.0 would lose the sign.
    nothing = values.dtype.type(-0.0)
    # Which list comes next cannot be predicted: select, do not branch.
    while i < len(a_indices) and j < len(b_indices):
        a, b = a_indices[i], b_indices[j]
        a_value, b_value = a_values[i], b_values[j]
        indices[n] = a if a <= b else b
        values[n] = (a_value if a <= b else nothing) + (b_value if b <= a else nothing)
        i += a <= b
        j += b <= a
        n += 1
    for rest in range(i, len(a_indices)):
        indices[n], values[n] = a_indices[rest], a_values[rest]
        n += 1
    for rest in range(j, len(b_indices)):
        indices[n], values[n] = b_indices[rest], b_values[rest]
        n += 1
    return n


@compiled
def _not_in(indices: Array, kept: Array, missing: Array) -> None:
    j = 0
    for i in range(len(indices)):
        while j < len(kept) and kept[j] < indices[i]:
            j += 1
        missing[i] = j == len(kept) or kept[j] != indices[i]


@compiled
def _first_outside(indices: Array, n: int) -> int:
    outside = False
    for i in range(len(indices)):
        outside |= indices[i] < 0 or indices[i] >= n
    if outside:
        for i in range(len(indices)):
            if indices[i] < 0 or indices[i] >= n:
                return i
    return -1


@compiled
def _scatter_add(dense: Array, indices: Array, values: Array) -> None:
    for i in range(len(indices)):
        dense[indices[i]] += values[i]


@compiled
def _scatter(dense: Array, indices: Array, values: Array) -> None:
    for i in range(len(indices)):
        dense[indices[i]] = values[i]


@compiled
def _take(dense: Array, indices: Array, values: Array) -> None:
    for i in range(len(indices)):
        values[i] = dense[indices[i]]

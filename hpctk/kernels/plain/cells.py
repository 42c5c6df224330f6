"""`kernels.cells` in numpy. `np.bincount` adds in the order of the values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.plain.ordered import add_in_order

Array = NDArray[Any]


def _by_deviation(values: Array, codes: Array, levels: int) -> float:
    mean = add_in_order(values) / len(values)
    away = values - mean
    width = 6 * math.sqrt(add_in_order(away * away) / max(1, len(values) - 1)) / levels
    if not 0 < width < math.inf:
        width = 1.0
    codes[:] = np.rint(np.clip(away / width + levels / 2, 0.0, levels - 1.0))
    return mean


def _by_means(values: Array, codes: Array, bits: int) -> None:
    sizes = np.abs(values)
    codes[:] = values < 0
    for bit in range(1, bits):
        means = np.bincount(codes, sizes, 1 << bit) / np.bincount(codes, minlength=1 << bit)
        codes[:] = 2 * codes + (sizes > means[codes])


def _means(values: Array, codes: Array, book: Array) -> None:
    sums, counts = np.bincount(codes, values, len(book)), np.bincount(codes, minlength=len(book))
    low, high = np.full(len(book), math.inf), np.full(len(book), -math.inf)
    np.minimum.at(low, codes, values)
    np.maximum.at(high, codes, values)
    means = sums / counts
    # Not by np.clip, which makes -0.0 of 0.0.
    means = np.where(low > means, low, means)
    book[counts > 0] = np.where(high < means, high, means)[counts > 0]

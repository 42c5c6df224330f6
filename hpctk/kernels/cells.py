"""Values on a few bits: cut into cells, of which each stands for the mean of its values.

All in float64 and in the order of the values, on one thread: the same bits wherever it is done.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled

Array = NDArray[Any]


def cut(values: Array, bits: int, rule: str) -> tuple[Array, Array]:
    """Return the cell of each value, and what each of the 2**bits cells stands for, in float64. Not in place.

    Rule "sigma": cells of equal width around the mean, which reach three standard deviations to each side.
    Rule "signed": by sign, then bits - 1 times every cell is cut at its mean magnitude.
    """
    codes, book = np.zeros(len(values), np.uint8), np.zeros(1 << bits)
    if not len(values):
        return codes, book
    # By a power of two, which rounds nothing: no sum and no square overflows or vanishes.
    exponent = max(-1000, math.frexp(float(np.abs(values).max()))[1])
    scaled = np.multiply(values, math.ldexp(1.0, -exponent), dtype=np.float64)
    if rule == "sigma":
        book[:] = _by_deviation(scaled, codes, 1 << bits)
    else:
        _by_means(scaled, codes, bits)
    _means(scaled, codes, book)
    return codes, np.ldexp(book, exponent)


@compiled
def _by_deviation(values: Array, codes: Array, levels: int) -> float:
    """Write the cell of each value; return their mean."""
    n, total, squares = len(values), 0.0, 0.0
    for i in range(n):
        total += values[i]
    mean = total / n
    for i in range(n):
        squares += (values[i] - mean) ** 2
    width = 6 * math.sqrt(squares / max(1, n - 1)) / levels
    if not 0 < width < math.inf:
        width = 1.0
    for i in range(n):
        # Bounds first: a value far outside must not leave the range of integers.
        place = min(max((values[i] - mean) / width + levels / 2, 0.0), levels - 1.0)
        codes[i] = int(np.rint(place))
    return mean


@compiled
def _by_means(values: Array, codes: Array, bits: int) -> None:
    """Write the cell of each value."""
    for i in range(len(values)):
        codes[i] = values[i] < 0
    for bit in range(1, bits):
        sums, counts = np.zeros(1 << bit), np.zeros(1 << bit, np.int64)
        for i in range(len(values)):
            sums[codes[i]] += abs(values[i])
            counts[codes[i]] += 1
        for i in range(len(values)):
            code = codes[i]
            codes[i] = 2 * code + (abs(values[i]) > sums[code] / counts[code])


@compiled
def _means(values: Array, codes: Array, book: Array) -> None:
    """Write the mean of every cell that has values into the book, in place."""
    sums, counts = np.zeros(len(book)), np.zeros(len(book), np.int64)
    low, high = np.full(len(book), math.inf), np.full(len(book), -math.inf)
    for i in range(len(values)):
        value, code = values[i], codes[i]
        sums[code] += value
        counts[code] += 1
        low[code] = min(low[code], value)
        high[code] = max(high[code], value)
    for code in range(len(book)):
        if counts[code]:
            # A mean lies between; equal values must be met exactly, however their sum was rounded.
            book[code] = min(max(sums[code] / counts[code], low[code]), high[code])

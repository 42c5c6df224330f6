"""What AdaCons computes of everyone's parts of a gradient, each in one pass: inner products, and the weighted sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled

Array = NDArray[Any]

#: Elements whose products are kept at a time, and summed as pairs of pairs: a power of 2.
BLOCK = 256


def add_products(parts: Array, lo: int, hi: int, inner: Array, squared: Array) -> None:
    """Add <g_j, S> and ||g_j||^2 of all ranks j to `inner` and `squared`, in place. S is the sum of all g_j.

    `parts` are ranks x elements of float32 or float64, contiguous, of which elements lo .. hi-1 are looked at. Products
    and their sums are float64.
    """
    _add_products(parts.reshape(-1), len(parts), parts.shape[1], lo, hi, inner, squared)


def weighted_sum(parts: Array, lo: int, hi: int, weights: Array, out: Array) -> None:
    """Write the sum of weights[j] * parts[j, lo:hi] into `out`, in the order of j. Arrays as for `add_products`."""
    _weighted_sum(parts.reshape(-1), parts.shape[1], lo, weights, out[: hi - lo])


@compiled
def _add_products(flat: Array, ranks: int, width: int, lo: int, hi: int, inner: Array, squared: Array) -> None:
    total, products, squares = np.empty(BLOCK), np.zeros(BLOCK), np.zeros(BLOCK)
    for first in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - first)
        summed = total[:n]
        row = flat[first : first + n]
        for k in range(n):
            summed[k] = np.float64(row[k])
        for j in range(1, ranks):
            row = flat[j * width + first : j * width + first + n]
            for k in range(n):
                summed[k] += np.float64(row[k])
        for j in range(ranks):
            row = flat[j * width + first : j * width + first + n]
            products[n:] = 0.0
            squares[n:] = 0.0
            for k in range(n):
                value = np.float64(row[k])
                products[k] = value * summed[k]
                squares[k] = value * value
            half = BLOCK // 2
            while half:
                upper, upper_squares = products[half : 2 * half], squares[half : 2 * half]
                for k in range(half):
                    products[k] += upper[k]
                    squares[k] += upper_squares[k]
                half //= 2
            inner[j] += products[0]
            squared[j] += squares[0]


@compiled
def _weighted_sum(flat: Array, width: int, lo: int, weights: Array, out: Array) -> None:
    for first in range(0, len(out), BLOCK):
        piece = out[first : first + BLOCK]
        for j in range(len(weights)):
            weight = weights[j]
            begin = j * width + lo + first
            row = flat[begin : begin + len(piece)]
            if j == 0:
                for k in range(len(piece)):
                    piece[k] = row[k] * weight
            else:
                for k in range(len(piece)):
                    piece[k] += row[k] * weight

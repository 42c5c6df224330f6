"""What AdaCons computes of everyone's parts of a gradient, each in one pass: inner products, and the weighted sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled

Array = NDArray[Any]

#: Elements whose products are kept at a time, and summed as pairs of pairs: a power of 2.
BLOCK = 256


def add_products(parts: Array, lo: int, hi: int, inner: Array, squared: Array, own: Array, rank: int) -> None:
    """Add <g_j, S> and ||g_j||^2 of all ranks j to `inner` and `squared`, in place. S is the sum of all g_j.

    `parts` are ranks x elements of float32 or float64, contiguous, of which elements lo .. hi-1 are looked at; those of
    `rank` are not there, but in `own`, from its beginning. Products and their sums are float64.
    """
    _add_products(parts.reshape(-1), len(parts), parts.shape[1], lo, hi, inner, squared, own[: hi - lo], rank)


def weighted_sum(parts: Array, lo: int, hi: int, weights: Array, own: Array, rank: int) -> None:
    """Overwrite `own` by the sum of weights[j] * parts[j, lo:hi], in the order of j. Arrays as for `add_products`."""
    _weighted_sum(parts.reshape(-1), parts.shape[1], lo, weights, own[: hi - lo], rank)


@compiled
def _add_products(
    flat: Array, ranks: int, width: int, lo: int, hi: int, inner: Array, squared: Array, own: Array, rank: int
) -> None:
    total, products, squares = np.empty(BLOCK), np.zeros(BLOCK), np.zeros(BLOCK)
    for first in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - first)
        summed = total[:n]
        for j in range(ranks):
            begin = j * width + first
            row = own[first - lo : first - lo + n] if j == rank else flat[begin : begin + n]
            if j == 0:
                for k in range(n):
                    summed[k] = np.float64(row[k])
            else:
                for k in range(n):
                    summed[k] += np.float64(row[k])
        for j in range(ranks):
            begin = j * width + first
            row = own[first - lo : first - lo + n] if j == rank else flat[begin : begin + n]
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
def _weighted_sum(flat: Array, width: int, lo: int, weights: Array, own: Array, rank: int) -> None:
    kept = np.empty(BLOCK, own.dtype)
    for first in range(0, len(own), BLOCK):
        piece = own[first : first + BLOCK]
        n = len(piece)
        mine = kept[:n]
        for k in range(n):
            mine[k] = piece[k]
        for j in range(len(weights)):
            weight = weights[j]
            begin = j * width + lo + first
            row = mine if j == rank else flat[begin : begin + n]
            if j == 0:
                for k in range(n):
                    piece[k] = row[k] * weight
            else:
                for k in range(n):
                    piece[k] += row[k] * weight

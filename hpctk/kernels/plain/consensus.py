"""`kernels.consensus` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.consensus import BLOCK
from hpctk.kernels.plain.ordered import add_in_order, pieces

Array = NDArray[Any]


def _add_products(
    flat: Array, ranks: int, width: int, lo: int, hi: int, inner: Array, squared: Array, own: Array, rank: int
) -> None:
    for first, end in pieces(lo, hi):
        rows = [
            (own[first - lo : end - lo] if j == rank else flat[j * width + first : j * width + end]).astype(np.float64)
            for j in range(ranks)
        ]
        total = rows[0].copy()
        for row in rows[1:]:
            total += row
        for j, row in enumerate(rows):
            inner[j] = add_in_order(_block_sums(row * total), inner[j])
            squared[j] = add_in_order(_block_sums(row * row), squared[j])


def _block_sums(products: Array) -> Array:
    blocks = np.zeros((-(-len(products) // BLOCK), BLOCK))
    blocks.reshape(-1)[: len(products)] = products
    half = BLOCK // 2
    while half:
        blocks[:, :half] += blocks[:, half : 2 * half]
        half //= 2
    return blocks[:, 0]


def _weighted_sum(flat: Array, width: int, lo: int, weights: Array, own: Array, rank: int) -> None:
    for first, end in pieces(0, len(own)):
        piece = own[first:end]
        mine = piece.copy()
        for j, weight in enumerate(weights):
            row = mine if j == rank else flat[j * width + lo + first : j * width + lo + end]
            if j == 0:
                np.multiply(row, weight, out=piece)
            else:
                piece += row * weight

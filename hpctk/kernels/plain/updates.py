"""`kernels.updates` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.plain.ordered import add_in_order, pieces
from hpctk.kernels.updates import BLOCK

Array = NDArray[Any]


def _block_sums(a: Array, sums: Array, first: int, last: int) -> None:
    for block in range(first, last):
        sums[block] = add_in_order(np.abs(a[block * BLOCK : (block + 1) * BLOCK]))


def _move_ahead(point: Array, move: Array | None, held: Array) -> None:
    if move is not None:
        point -= move
    np.subtract(point, held, out=held)


def _take_back(before: Array, after: Array, out: Array) -> None:
    np.subtract(before, after, out=out)
    after[:] = before


def _squared_distance(a: Array, b: Array | None) -> float:
    total = 0.0
    for lo, hi in pieces(0, len(a)):
        apart = (a[lo:hi] if b is None else a[lo:hi] - b[lo:hi]).astype(np.float64)
        total = add_in_order(apart * apart, total)
    return total

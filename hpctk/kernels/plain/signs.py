"""`kernels.signs` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.plain.ordered import add_in_order, pieces
from hpctk.kernels.updates import BLOCK

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


def _block_sums(residual: Array, gradient: Array, sums: Array, first: int, last: int) -> None:
    for block in range(first, last):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        sums[block] = add_in_order(np.abs(residual[part] + gradient[part]))


def _take_signs(residual: Array, gradient: Array, scale: Any, packed: Bytes) -> None:
    for lo, hi in pieces(0, len(residual)):
        total = residual[lo:hi] + gradient[lo:hi]
        below = total < 0
        packed[lo // 8 : (hi + 7) // 8] = np.packbits(below, bitorder="little")
        residual[lo:hi] = total + np.where(below, scale, -scale)

"""Sums in the order of a loop, and arrays in pieces that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Elements that are worked on together: a multiple of 64.
PIECE = 1 << 16


def add_in_order(values: Array, start: float = 0.0) -> float:
    """Return start + values[0] + values[1] + ..., one after the other, where numpy's own sum goes by pairs."""
    if len(values) == 0:
        return float(start)
    values = np.array(values, np.float64)
    values[0] = start + values[0]
    return float(np.add.accumulate(values)[-1])


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces, which begin at `start` plus multiples of PIECE."""
    for low in range(start, stop, PIECE):
        yield low, min(low + PIECE, stop)

"""How many elements a density keeps: the same number for every compressor that selects."""

from __future__ import annotations

import math


def kept(density: float, n: int) -> int:
    """Return max(1, floor(density * n + 1e-9)), and 0 of an empty tensor.

    The 1e-9 is for densities that binary fractions miss by a hair: 0.29 of 100 elements is 29, although
    0.29 * 100 is 28.999999999999996 in floating point.
    """
    return min(n, max(1, math.floor(density * n + 1e-9)))

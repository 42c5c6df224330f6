"""How many elements a density keeps: the same number for every compressor that selects."""

from __future__ import annotations

import math

from hpctk.errors import SettingError


def checked(density: float) -> float:
    """Return the density as a float; SettingError unless it is above 0 and at most 1."""
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise SettingError(f"density={density!r}: need a number above 0 and at most 1, such as 0.01")
    return float(density)


def kept(density: float, n: int) -> int:
    """Return max(1, floor(density * n + 1e-9)), and 0 of an empty tensor.

    The 1e-9 is for densities that binary fractions miss by a hair: 0.29 of 100 elements is 29, although
    0.29 * 100 is 28.999999999999996 in floating point.
    """
    return min(n, max(1, math.floor(density * n + 1e-9)))

"""Sums of numbers that every version of Python and numpy rounds alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The longest run that every numpy sums pairwise throughout: 1.26 begins anew after so many numbers.
_RUN = 8192


def add_in_order(numbers: Iterable[float]) -> float:
    """Return the sum, rounded after every number: since Python 3.12 `sum` of floats comes to other bits."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def add_pairwise(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of each row, split in halves as `kernels.levels.leaves` splits it, which is numpy's own order."""
    n = rows.shape[1]
    if n <= _RUN:
        sums: NDArray[Any] = rows.sum(1)
        return sums
    half = n // 2 - n // 2 % 8
    joined: NDArray[Any] = add_pairwise(rows[:, :half]) + add_pairwise(rows[:, half:])
    return joined

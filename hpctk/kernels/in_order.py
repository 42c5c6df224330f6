"""A sum of numbers that every version of Python rounds alike."""

from __future__ import annotations

from collections.abc import Iterable


def add_in_order(numbers: Iterable[float]) -> float:
    """Return the sum, rounded after every number: since Python 3.12 `sum` of floats comes to other bits."""
    total = 0.0
    for number in numbers:
        total += number
    return total

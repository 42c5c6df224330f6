"""Passes over a whole model that update methods make in every step: each one a single pass.

A model that does not fit the caches is as slow as the memory, so what counts is how often it is gone through, not
how much is computed on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled
from hpctk.kernels.in_order import add_in_order
from hpctk.kernels.threads import share, spans

Array = NDArray[Any]

#: Elements that are summed in one go: the order of a sum does not depend on how threads share it.
BLOCK = 1 << 16


def move_ahead(point: Array, move: Array | None, held: Array, *, threads: int | None = None) -> None:
    """Move a point, unless there is no move, and step ahead of it by what is held, in place.

        point <- point - move
        held <- point - held

    Arrays of float32 or float64: flat, contiguous, of one length and dtype; none overlaps another.
    """
    if not len(point) == len(held) == len(point if move is None else move):
        raise ValueError(f"arrays of {len(point)}, {len(point if move is None else move)} and {len(held)} elements")
    parts = spans(len(point), threads)
    share(_move_ahead, [(point[a:b], None if move is None else move[a:b], held[a:b]) for a, b in parts])


def take_back(before: Array, after: Array, out: Array, *, threads: int | None = None) -> None:
    """Write before - after into `out`, then before into after, in place. Arrays as for `move_ahead`."""
    if not len(before) == len(after) == len(out):
        raise ValueError(f"arrays of {len(before)}, {len(after)} and {len(out)} elements")
    share(_take_back, [(before[a:b], after[a:b], out[a:b]) for a, b in spans(len(before), threads)])


def squared_distance(a: Array, b: Array | None, *, threads: int | None = None) -> float:
    """Return ||a - b||^2, of a alone where b is None. Not in place.

    Differences are formed in the arrays' dtype, squared and summed in float64.
    """
    if b is not None and len(a) != len(b):
        raise ValueError(f"arrays of {len(a)} and {len(b)} elements")
    parts = spans(len(a), threads)
    return add_in_order(share(_squared_distance, [(a[lo:hi], None if b is None else b[lo:hi]) for lo, hi in parts]))


def sum_of_magnitudes(a: Array, *, threads: int | None = None) -> float:
    """Return ||a||_1, summed in float64. Not in place; the same bits for any number of threads."""
    sums = np.zeros(-(-len(a) // BLOCK))
    share(_block_sums, [(a, sums, lo // BLOCK, -(-hi // BLOCK)) for lo, hi in spans(len(a), threads, align=BLOCK)])
    return float(sums.sum())


@compiled
def _block_sums(a: Array, sums: Array, first: int, last: int) -> None:
    for block in range(first, last):
        total = 0.0
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(a))):
            total += abs(np.float64(a[i]))
        sums[block] = total


@compiled
def _move_ahead(point: Array, move: Array | None, held: Array) -> None:
    for i in range(len(point)):
        if move is not None:
            point[i] -= move[i]
        held[i] = point[i] - held[i]


@compiled
def _take_back(before: Array, after: Array, out: Array) -> None:
    for i in range(len(before)):
        value = before[i]
        out[i] = value - after[i]
        after[i] = value


@compiled
def _squared_distance(a: Array, b: Array | None) -> float:
    total = 0.0
    for i in range(len(a)):
        difference = np.float64(a[i] if b is None else a[i] - b[i])
        total += difference * difference
    return total

"""`kernels.lean` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.lean import BLOCK, LANES
from hpctk.kernels.plain.ordered import add_in_order, pieces
from hpctk.kernels.plain.packing import bits_of, set_bits

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


def _move_at(x: Array, p: Array, start: int, sent: Array, indices: Array, values: Array) -> None:
    p[sent - start] = x[sent - start]
    np.subtract.at(x, indices - start, values)
    np.subtract.at(p, indices - start, values)


def _pack_bits(x: Array, p: Array | None, start: int, first: int, last: int, packed: Bytes) -> float:
    apart = x[first:last] if p is None else x[first:last] - p[first:last]
    set_bits(packed, start + first + np.flatnonzero(apart < 0))
    return add_in_order(np.abs(apart))


def _pack_block(x: Array, p: Array | None, packed: Bytes, block: int) -> float:
    """Write the signs of one block and return the sum of its magnitudes: LANES sums, after what fills no vector."""
    start, stop = block * BLOCK, min((block + 1) * BLOCK, len(x))
    whole = stop - (stop - start) % LANES
    apart = x[start:whole] if p is None else x[start:whole] - p[start:whole]
    packed[start // 8 : whole // 8] = np.packbits(apart < 0, bitorder="little")
    total = _pack_bits(x, p, 0, whole, stop, packed)
    vectors = np.abs(apart).astype(np.float64).reshape(-1, LANES)
    return add_in_order(np.add.accumulate(vectors)[-1], total) if len(vectors) else total


def _pack_blocks(x: Array, p: Array, packed: Bytes, sums: Array, first: int, last: int) -> None:
    for block in range(first, last):
        sums[block] = _pack_block(x, p, packed, block)


def _add_and_pack(target: Array, rows: Array, scales: Array, packed: Bytes, sums: Array, first: int, last: int) -> None:
    for block in range(first, last):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, len(target))
        for row, scale in zip(rows, scales, strict=True):
            target[start:stop] += _signed(row, start, stop, scale)
        sums[block] = _pack_block(target, None, packed, block)


def _signed(row: Bytes, start: int, stop: int, scale: Any) -> Array:
    signed: Array = np.where(bits_of(row, start, stop), -scale, scale)
    return signed


def _move_blocks(x: Array, p: Array, first: int, last: int, own: Bytes, scale: Any, rows: Array, scales: Array) -> None:
    _move_bits(x, p, 0, first, last, own, scale, rows, scales)


def _move_bits(
    x: Array, p: Array, start: int, first: int, last: int, own: Bytes, scale: Any, rows: Array, scales: Array
) -> None:
    for lo, hi in pieces(first, last):
        moved = np.zeros(hi - lo, x.dtype)
        for row, one in zip(rows, scales, strict=True):
            moved += _signed(row, start + lo, start + hi, one)
        p[lo:hi] += _signed(own, start + lo, start + hi, scale)
        x[lo:hi] -= moved
        p[lo:hi] -= moved

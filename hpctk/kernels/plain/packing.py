"""`kernels.packing` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


def bits_of(data: Bytes, start: int, stop: int) -> NDArray[np.uint8]:
    """Return bits start to stop of packed bits, as 0 and 1."""
    first = start >> 3
    bits = np.unpackbits(data[first : (stop + 7) >> 3], bitorder="little")
    return bits[start - 8 * first : stop - 8 * first]


def set_bits(data: Bytes, places: Array) -> None:
    """Set bits by their numbers, in place."""
    np.bitwise_or.at(data, places >> 3, (1 << (places & 7)).astype(np.uint8))


def _write_signs(data: Bytes, table: Array, values: Array) -> None:
    values[:] = table[data].reshape(-1)[: len(values)]


def _add_signs(data: Bytes, table: Array, out: Array) -> None:
    out += table[data].reshape(-1)[: len(out)]


def _pack(codes: Array, bits: int, words: Array) -> bool:
    # 64 codes fill `bits` words: a table whose rows do, column by column.
    table = np.zeros((-(-len(codes) // 64), 64), np.uint64)
    table.reshape(-1)[: len(codes)] = codes
    rows = np.zeros((len(table), bits), np.uint64)
    for column, word, bit in _columns(bits):
        rows[:, word] |= table[:, column] << np.uint64(bit)
        if bit + bits > 64:
            rows[:, word + 1] |= table[:, column] >> np.uint64(64 - bit)
    words[:] = rows.reshape(-1)
    return bool(np.bitwise_or.reduce(table, axis=None) >> np.uint64(bits))


def _unpack(words: Array, bits: int, codes: Array) -> None:
    rows = words.reshape(-(-len(codes) // 64), bits)
    table = np.zeros((len(rows), 64), np.uint64)
    for column, word, bit in _columns(bits):
        table[:, column] = rows[:, word] >> np.uint64(bit)
        if bit + bits > 64:
            table[:, column] |= rows[:, word + 1] << np.uint64(64 - bit)
    codes[:] = (table & np.uint64((1 << bits) - 1)).reshape(-1)[: len(codes)]


def _columns(bits: int) -> list[tuple[int, int, int]]:
    """Return for each of 64 codes its number, and the word and the bit of it that it begins at."""
    return [(column, column * bits // 64, column * bits % 64) for column in range(64)] if bits else []


def _split(indices: Array, n: int, low_bits: int, low: Array, high: Bytes) -> int:
    wide = indices.astype(np.int64)
    wrong = (wide >= n) | (np.diff(wide, prepend=-1) <= 0)
    if wrong.any():
        return int(wrong.argmax())
    low[:] = wide & ((1 << low_bits) - 1)
    flags = np.zeros(8 * len(high), np.uint8)
    flags[(wide >> low_bits) + np.arange(len(wide))] = 1
    high[:] = np.packbits(flags, bitorder="little")
    return -1


def _join(low: Array, high: Bytes, n: int, low_bits: int, indices: Array) -> bool:
    k = len(indices) - 1
    ones = np.flatnonzero(np.unpackbits(high, bitorder="little"))
    if len(ones) != k:
        return False
    found = indices[:k]
    found[:] = ((ones - np.arange(k)) << low_bits) | low[:k].astype(np.int64)
    return bool((found[1:] > found[:-1]).all()) and (k == 0 or bool(found[-1] < n))

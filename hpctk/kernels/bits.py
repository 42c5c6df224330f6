"""Numbers in few bits: signs in one, codes in any number, little endian, the rest of the last byte zero.

Bit i of byte j belongs to element 8j + i where elements have one bit; codes of b bits lie one after
the other in the same order, so that 8 codes fill b bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctk.kernels.compiled import compiled
from hpctk.kernels.threads import share, spans

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

#: Signs are compared in pieces that stay in the cache, not as one array of n bytes.
PIECE = 1 << 16


def packed_length(n: int, bits: int) -> int:
    """Return how many bytes n codes of `bits` bits fill."""
    return (n * bits + 7) // 8


def check_packed(data: Bytes | torch.Tensor, bits: int, n: int) -> None:
    """Raise ValueError unless `data` is as long as n codes of `bits` bits, with zeros after the last."""
    expected = packed_length(n, bits)
    if n < 0 or len(data) != expected:
        raise ValueError(f"{n} codes of {bits} bits fill {expected} bytes, not {len(data)}")
    used = n * bits % 8
    if used and int(data[-1]) >> used:
        raise ValueError(f"the bits after the last of {n} codes of {bits} bits are not zero")


def pack_signs(values: Array, *, threads: int | None = None) -> Bytes:
    """Return one bit per element: 1 where it is below zero, so that 0.0, -0.0 and NaN count as plus."""
    packed = np.empty(packed_length(len(values), 1), np.uint8)

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, PIECE):
            last = min(first + PIECE, stop)
            packed[first // 8 : (last + 7) // 8] = np.packbits(values[first:last] < 0, bitorder="little")

    share(work, spans(len(values), threads, align=8))
    return packed


def unpack_signs(data: Bytes, n: int, scale: float, dtype: DTypeLike, *, threads: int | None = None) -> Array:
    """Return n values, -scale where the bit is 1 and +scale where it is 0, as a new array."""
    check_packed(data, 1, n)
    values = np.empty(n, dtype)
    table = _signed_bytes(scale, values.dtype)
    parts = spans(n, threads, align=8)
    share(_write_signs, [(data[start // 8 : (stop + 7) // 8], table, values[start:stop]) for start, stop in parts])
    return values


def add_signs(data: Bytes, n: int, scale: float, out: Array, *, threads: int | None = None) -> None:
    """Add what `unpack_signs` would return to `out`, in place."""
    check_packed(data, 1, n)
    if len(out) != n:
        raise ValueError(f"{n} signs cannot be added to {len(out)} elements")
    table = _signed_bytes(scale, out.dtype)
    parts = spans(n, threads, align=8)
    share(_add_signs, [(data[start // 8 : (stop + 7) // 8], table, out[start:stop]) for start, stop in parts])


def pack(codes: Array, bits: int, *, threads: int | None = None) -> Bytes:
    """Return unsigned codes, each below 2**bits, written in `bits` bits each, 0 to 63."""
    # 64 codes fill `bits` whole words: parts that start at multiples of 64 share no word.
    words = np.empty(-(-len(codes) // 64) * bits, np.dtype("<u8"))
    calls = [
        (codes[start:stop], bits, words[start // 64 * bits : -(-stop // 64) * bits])
        for start, stop in spans(len(codes), threads, align=64)
    ]
    if any(share(_pack, calls)):
        raise ValueError(f"a code does not fit into {bits} bits: the largest is {codes.max()}")
    return words.view(np.uint8)[: packed_length(len(codes), bits)]


def unpack(data: Bytes, bits: int, out: Array, *, threads: int | None = None) -> None:
    """Write the codes that `pack` wrote into `out`, as many as it has elements."""
    n = len(out)
    check_packed(data, bits, n)
    # A copy, because the bytes of a packet may start at an odd address and end in half a word.
    words = np.zeros(-(-n // 64) * bits, np.dtype("<u8"))
    words.view(np.uint8)[: len(data)] = data
    calls = [
        (words[start // 64 * bits : -(-stop // 64) * bits], bits, out[start:stop])
        for start, stop in spans(n, threads, align=64)
    ]
    share(_unpack, calls)


def _signed_bytes(scale: float, dtype: np.dtype[Any]) -> Array:
    """Return for each of the 256 bytes the eight values that its bits stand for."""
    ones = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    signed = np.array([scale, -scale], dtype)
    return signed[ones]


@compiled
def _write_signs(data: Bytes, table: Array, values: Array) -> None:
    whole = len(values) // 8
    for j in range(whole):
        row = table[data[j]]
        for i in range(8):
            values[8 * j + i] = row[i]
    for i in range(8 * whole, len(values)):
        values[i] = table[data[whole], i - 8 * whole]


@compiled
def _add_signs(data: Bytes, table: Array, out: Array) -> None:
    whole = len(out) // 8
    for j in range(whole):
        row = table[data[j]]
        for i in range(8):
            out[8 * j + i] += row[i]
    for i in range(8 * whole, len(out)):
        out[i] += table[data[whole], i - 8 * whole]


@compiled
def _pack(codes: Array, bits: int, words: Array) -> bool:
    """Fill all words; return whether a code was too large."""
    word, filled, position = np.uint64(0), 0, 0
    seen = np.uint64(0)
    for i in range(len(codes)):
        code = np.uint64(codes[i])
        seen |= code
        word |= code << np.uint64(filled)
        filled += bits
        if filled >= 64:
            words[position] = word
            position += 1
            filled -= 64
            # What is left of a code that straddles; shifting by all of its bits leaves nothing.
            word = code >> np.uint64(bits - filled)
    for rest in range(position, len(words)):
        words[rest] = word
        word = np.uint64(0)
    return bool(seen >> np.uint64(bits))


@compiled
def _unpack(words: Array, bits: int, codes: Array) -> None:
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    word, left, position = np.uint64(0), 0, 0
    for i in range(len(codes)):
        code = word
        if left < bits:
            word = words[position]
            position += 1
            code |= word << np.uint64(left)
            word >>= np.uint64(bits - left)
            left += 64
        else:
            word >>= np.uint64(bits)
        left -= bits
        codes[i] = code & mask

"""Numbers in few bits: signs in one, codes in any number, little endian, the rest of the last byte zero.

Bit i of byte j belongs to element 8j + i where elements have one bit; codes of b bits lie one after
the other in the same order, so that 8 codes fill b bytes.

Ascending indices are written by the code of Elias (1974) and Fano (1971): of k indices below n, each index's low
l = floor(log2(n / k)) bits as they are. The rest, index >> l, never falls from one index to the next; it is written as
a vector of bits in which the i-th index sets bit (index >> l) + i. Together k*l + k + ((n - 1) >> l) bits, each of the
two parts rounded up to bytes: about log2(n / k) + 2.5 bits per index, 8.6 at one per cent, and a pure function of k and
n, so that every rank knows what it will receive.
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
    parts = [(0, len(codes))] if threads == 1 else spans(len(codes), threads, align=64)
    calls = [(codes[lo:hi], bits, words[lo // 64 * bits : -(-hi // 64) * bits]) for lo, hi in parts]
    if _pack(*calls[0]) if len(calls) == 1 else any(share(_pack, calls)):
        raise ValueError(f"a code does not fit into {bits} bits: the largest is {codes.max()}")
    return words.view(np.uint8)[: packed_length(len(codes), bits)]


def unpack(data: Bytes, bits: int, out: Array, *, threads: int | None = None) -> None:
    """Write the codes that `pack` wrote into `out`, as many as it has elements."""
    n = len(out)
    check_packed(data, bits, n)
    # A copy, because the bytes of a packet may start at an odd address and end in half a word.
    words = np.zeros(-(-n // 64) * bits, np.dtype("<u8"))
    words.view(np.uint8)[: len(data)] = data
    if threads == 1:
        _unpack(words, bits, out)
        return
    parts = spans(n, threads, align=64)
    share(_unpack, [(words[lo // 64 * bits : -(-hi // 64) * bits], bits, out[lo:hi]) for lo, hi in parts])


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


def index_dtype(n: int) -> np.dtype[Any]:
    """Return the dtype of indices below n: int32, or int64 where n > 2**31."""
    return np.dtype(np.int32 if n <= 2**31 else np.int64)


def packed_bytes(k: int, n: int) -> int:
    """Return how many bytes `pack_indices` writes for k indices below n."""
    low_bits, high_bits = _layout(k, n)
    return packed_length(k, low_bits) + packed_length(high_bits, 1)


def pack_indices(indices: Array, n: int) -> Bytes:
    """Return indices below n, ascending and without duplicates, in `packed_bytes(len(indices), n)` bytes."""
    k = len(indices)
    low_bits, high_bits = _layout(k, n)
    low = np.empty(k, np.uint64)
    high = np.zeros(packed_length(high_bits, 1), np.uint8)
    wrong = _split(indices, n, low_bits, low, high)
    if wrong >= 0:
        raise ValueError(
            f"indices must ascend, without duplicates, below {n}: number {wrong} is {indices[wrong]}"
            + (f" after {indices[wrong - 1]}" if wrong else "")
        )
    return np.concatenate([pack(low, low_bits, threads=1), high])


def unpack_indices(data: Bytes, k: int, n: int) -> Array:
    """Return the k indices below n that `pack_indices` wrote; ValueError where it cannot have written this."""
    low_bits, high_bits = _layout(k, n)
    expected = packed_bytes(k, n)
    if len(data) != expected:
        raise ValueError(f"{k} indices below {n} fill {expected} bytes, not {len(data)}")
    # One place more, for what is written after the last index is known.
    indices = np.empty(k + 1, index_dtype(n))
    low = np.zeros(k + 1, np.uint64)
    edge = packed_length(k, low_bits)
    unpack(data[:edge], low_bits, low[:k], threads=1)
    check_packed(data[edge:], 1, high_bits)
    if not _join(low, data[edge:], n, low_bits, indices):
        raise ValueError(f"these bytes are not {k} ascending indices below {n}")
    return indices[:k]


def _layout(k: int, n: int) -> tuple[int, int]:
    """Return the number of low bits per index, and of bits in the vector of the high parts."""
    if not 0 <= k <= n or n > 2**62:
        raise ValueError(f"there are no {k} different indices below {n}")
    if k == 0:
        return 0, 0
    low_bits = (n // k).bit_length() - 1
    return low_bits, k + ((n - 1) >> low_bits)


@compiled
def _split(indices: Array, n: int, low_bits: int, low: Array, high: Bytes) -> int:
    """Split each index; return the position of the first that is out of order or bounds, -1 if none is."""
    before = np.int64(-1)
    mask = (1 << low_bits) - 1
    for i in range(len(indices)):
        index = np.int64(indices[i])
        if index <= before or index >= n:
            return i
        before = index
        low[i] = index & mask
        bit = (index >> low_bits) + i
        high[bit >> 3] |= np.uint8(1 << (bit & 7))
    return -1


@compiled
def _join(low: Array, high: Bytes, n: int, low_bits: int, indices: Array) -> bool:
    """Put the indices together; return whether there are as many as expected, ascending, below n."""
    k = len(indices) - 1
    ones = 0
    for bit in range(8 * len(high)):
        # Where the ones are is what no processor predicts: write at every bit, go on after a one.
        i = min(ones, k)
        indices[i] = ((bit - i) << low_bits) | np.int64(low[i])
        ones += (high[bit >> 3] >> (bit & 7)) & 1
    ascending = True
    for i in range(1, k):
        ascending &= indices[i - 1] < indices[i]
    return ones == k and ascending and (k == 0 or indices[k - 1] < n)

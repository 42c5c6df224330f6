"""Ascending indices in few bits: the code of Elias (1974) and Fano (1971).

Of k indices below n, each index's low l = floor(log2(n / k)) bits are written as they are. The rest,
index >> l, never falls from one index to the next; it is written as a vector of bits in which the
i-th index sets bit (index >> l) + i. Together k*l + k + ((n - 1) >> l) bits, each of the two parts
rounded up to bytes: about log2(n / k) + 2.5 bits per index, 8.6 at one per cent, and a pure function
of k and n, so that every rank knows what it will receive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.bits import Bytes, check_packed, pack, packed_length, unpack
from hpctk.kernels.compiled import compiled

Array = NDArray[Any]


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

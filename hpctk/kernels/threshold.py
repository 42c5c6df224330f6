"""The exact threshold that the k largest magnitudes reach, found in the whole array by histograms.

A histogram of the magnitudes' high bits tells in which bin the k-th largest lies; a finer one of that
bin alone tells the next bits, and so on to the last. It costs a pass over the array each time, and no
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels import magnitude
from hpctk.kernels.indices import index_dtype
from hpctk.kernels.threads import share, spans

Array = NDArray[Any]

#: Bits that one histogram tells: its counters stay in the fastest cache.
BINS_BITS = 12


def unsigned(source: Array) -> np.dtype[Any]:
    """Return the unsigned dtype as wide as the array's; ValueError where there are no magnitudes to read."""
    if source.ndim != 1 or not source.flags.c_contiguous:
        raise ValueError("only flat, contiguous arrays")
    if source.dtype.kind not in "uf" or source.dtype.itemsize not in (2, 4, 8):
        raise ValueError(f"cannot select among {source.dtype}: give an unsigned view of floats")
    return np.dtype(f"u{source.dtype.itemsize}")


def threshold_of(
    source: Array, k: int, threads: int | None, low: int = 0, high: int | None = None
) -> tuple[int, int]:
    """Return the magnitude of the k-th largest, and how many equal to it (or fewer) belong to the k.

    All magnitudes lie between `low` and `high`.
    """
    scalar = unsigned(source).type
    width = (2 ** (8 * source.itemsize - 1) - 1 if high is None else high) - low
    shift = max(0, width.bit_length() - BINS_BITS)
    bins = (width >> shift) + 1
    while True:
        parts = spans(len(source), threads)
        counts = np.zeros((len(parts), bins), np.int64)
        calls = [
            (source[a:b], scalar(low), np.uint64(shift), row)
            for (a, b), row in zip(parts, counts, strict=True)
        ]
        share(magnitude.histogram, calls)
        from_top = np.cumsum(counts.sum(axis=0)[::-1])
        place = int(np.searchsorted(from_top, k))
        k -= int(from_top[place - 1]) if place else 0
        low += (bins - 1 - place) << shift
        inside = int(from_top[place] - (from_top[place - 1] if place else 0))
        if shift == 0 or inside == k:
            return low, k
        finer = max(0, shift - BINS_BITS)
        bins, shift = 1 << (shift - finer), finer


def counts_at(source: Array, threshold: int, threads: int | None) -> list[tuple[int, int]]:
    """Return for each thread's part how many magnitudes are above the threshold, and how many equal it."""
    limit = unsigned(source).type(threshold)
    return share(magnitude.count, [(source[a:b], limit) for a, b in spans(len(source), threads)])


def reaching(source: Array, threshold: int, ties: int, k: int, threads: int | None) -> Array:
    """Return the indices of all k elements above the threshold, or among the first `ties` equal to it."""
    limit = unsigned(source).type(threshold)
    parts = spans(len(source), threads)
    counts = counts_at(source, threshold, threads)
    indices = np.empty(k, index_dtype(len(source)))
    calls = []
    written = 0
    for (a, b), (above, equal) in zip(parts, counts, strict=True):
        here = min(ties, equal)
        calls.append((source[a:b], limit, here, a, indices[written : written + above + here]))
        written += above + here
        ties -= here
    share(magnitude.write_indices, calls)
    return indices

"""The k elements of largest magnitude, exactly; among equals the lowest index first.

A sample gives a threshold that a little more than k elements reach; one pass collects those, and the
exact choice is made among them. Where the sample was wrong, or k is large, a histogram of the magnitudes'
high bits tells in which bin the k-th largest lies, a finer one of that bin the next bits, and so on to
the last: a pass over the tensor each time, and no memory but the result.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels import magnitude
from hpctk.kernels.magnitude import INF_BITS
from hpctk.kernels.packing import index_dtype
from hpctk.kernels.threads import share, spans

Array = NDArray[Any]

#: Shorter tensors, and those of which more than this part is wanted, are searched without a sample.
WORTH_A_SAMPLE = 1 << 16
LARGEST_PART = 1 / 8
SAMPLE = 1 << 17
#: The guess was wrong when more than one in so many elements reach it; their list would cost too much memory.
MOST_CANDIDATES = 6
#: Bits that one histogram finds: its counters stay in the fastest cache.
BINS_BITS = 12
#: The magnitudes at which float32 and float64 stop being finite, by numpy's letters for these.
INFINITY = {"f": np.uint32(INF_BITS["float32"]), "d": np.uint64(INF_BITS["float64"])}


class NotFinite(ValueError):  # noqa: N818 - the name says what the value is
    """A value is inf or NaN, which has no place in a list of the largest; `index` is that of the first."""

    def __init__(self, index: int) -> None:
        super().__init__(f"element {index} is not finite")
        self.index = index


def top_k(bits: Array, k: int, *, threads: int | None = None) -> Array:
    """Return the ascending indices of the k largest magnitudes, all where k >= len(bits). Not in place.

    `bits` is an unsigned view of float16, bfloat16, float32 or float64.
    """
    return _select(bits, None, k, threads, clear=False)[0]


def feed_top_k(residual: Array, gradient: Array | None, k: int, *, threads: int | None = None) -> tuple[Array, Array]:
    """Add the gradient to the residual, take the k largest magnitudes out of it, in place, and return them.

    The residual, of float32 or float64, becomes residual + gradient (itself where that is None), with +0.0 where a
    value was taken out. Returned are indices, ascending, and values. Raise NotFinite if a sum is inf or NaN; the
    residual is then as it was.
    """
    if residual.dtype.char not in INFINITY:
        raise ValueError(f"residuals are float32 or float64, not {residual.dtype}")
    if gradient is not None and (gradient.shape != residual.shape or gradient.dtype != residual.dtype):
        raise ValueError(
            f"a gradient of {gradient.shape} {gradient.dtype} does not fit "
            f"a residual of {residual.shape} {residual.dtype}"
        )
    bad = first_not_finite(residual, gradient, threads=threads)
    if bad >= 0:
        raise NotFinite(bad)
    return _select(residual, gradient, k, threads, clear=True)


def first_not_finite(source: Array, gradient: Array | None, *, threads: int | None = None) -> int:
    """Return the index of the first element of source + gradient that is NaN or infinite, -1 where none is.

    Both of float32 or float64; of the source alone where the gradient is None.
    """
    inf = _unsigned(source).type(INF_BITS[source.dtype.name])
    parts = spans(len(source), threads)
    calls = [(source[a:b], None if gradient is None else gradient[a:b], inf) for a, b in parts]
    found = share(magnitude.first_not_finite, calls)
    return next((a + index for (a, _), index in zip(parts, found, strict=True) if index >= 0), -1)


def _select(source: Array, gradient: Array | None, k: int, threads: int | None, *, clear: bool) -> tuple[Array, Array]:
    """Return the indices and values of the k largest; writes a gradient's sums, and zeros with `clear`."""
    if k < 0:
        raise ValueError(f"k={k}: at least 0")
    k = min(k, len(source))
    guess, expected = _guess(source, gradient, k)
    exact = (0, k) if k == len(source) else None
    if guess:
        candidates = _collect(source, gradient, guess, expected, threads, clear=clear)
        if candidates is not None and len(candidates[0]) >= k:
            return _among(*candidates, guess, k, threads, source if clear else None)
        exact = _threshold_from_guess(source, guess, k, candidates, threads)
        if candidates is not None and clear:
            source[candidates[0]] = candidates[1]
    elif gradient is not None:
        parts = spans(len(source), threads)
        share(np.add, [(source[a:b], gradient[a:b], source[a:b]) for a, b in parts])
    indices = _reaching(source, *(exact or _threshold_of(source, k, threads)), k, threads)
    values = source[indices]
    if clear:
        source[indices] = 0
    return indices, values


def _guess(source: Array, gradient: Array | None, k: int) -> tuple[int, int]:
    """Return a magnitude that hardly fewer than k elements reach, and about how many do; 0, 0 for none."""
    n = len(source)
    if n < WORTH_A_SAMPLE or k == 0:
        return 0, 0
    sample = np.empty(min(SAMPLE, n // 16), source.dtype)
    inside = len(sample) * k / n
    # Four standard deviations on the safe side.
    rank = int(inside + 4 * sqrt(inside) + 4)
    expected = rank * n // len(sample)
    if expected > LARGEST_PART * n:
        return 0, 0
    magnitude.sample(source, gradient, sample)
    return max(1, _threshold_of(sample, rank, 1)[0]), expected


def _collect(
    source: Array, gradient: Array | None, guess: int, expected: int, threads: int | None, *, clear: bool
) -> tuple[Array, Array] | None:
    """Add the gradient and return all elements that reach the guess; None if they are far too many."""
    n = len(source)
    threshold = _unsigned(source).type(guess)
    total = 0

    def work(start: int, stop: int) -> tuple[list[tuple[Array, Array]], bool]:
        nonlocal total
        room = expected * (stop - start) // n * 9 // 8 + 8 * magnitude.BLOCK
        pieces = []
        while start < stop and total <= n // MOST_CANDIDATES:
            indices, values = np.empty(room, index_dtype(n)), np.empty(room, source.dtype)
            found, start = magnitude.add_and_collect(source, gradient, clear, threshold, start, stop, indices, values)
            pieces.append((indices[:found], values[:found]))
            total += found
        if gradient is not None:
            np.add(source[start:stop], gradient[start:stop], out=source[start:stop])
        return pieces, start == stop

    parts = share(work, spans(n, threads))
    indices = np.concatenate([indices for pieces, _ in parts for indices, _ in pieces])
    values = np.concatenate([values for pieces, _ in parts for _, values in pieces])
    if all(complete for _, complete in parts):
        return indices, values
    if clear:
        source[indices] = values
    return None


def _among(
    indices: Array, values: Array, low: int, k: int, threads: int | None, rest: Array | None
) -> tuple[Array, Array]:
    """Return the k largest of the candidates, all of them at least `low`; the others go back into `rest`."""
    high = int(magnitude.largest(values))
    threshold, ties = _threshold_of(values, k, threads, low, high)
    kept = np.empty(k, indices.dtype), np.empty(k, values.dtype)
    magnitude.keep_largest(indices, values, _unsigned(values).type(threshold), ties, *kept, rest)
    return kept


def _threshold_from_guess(
    source: Array, guess: int, k: int, candidates: tuple[Array, Array] | None, threads: int | None
) -> tuple[int, int] | None:
    """Return what `threshold_of` would where so many elements are equal that the guess told it, else None."""
    if candidates is not None:
        # A guess of 1, the lowest there is, lets all but zeros pass: what is still missing are zeros.
        return (0, k - len(candidates[0])) if guess == 1 else None
    counts = _counts_at(source, guess, threads)
    above = sum(above for above, _ in counts)
    ties = k - above
    return (guess, ties) if 0 < ties <= sum(equal for _, equal in counts) else None


def _unsigned(source: Array) -> np.dtype[Any]:
    """Return the unsigned dtype as wide as the array's; ValueError where there are no magnitudes to read."""
    if source.ndim != 1 or not source.flags.c_contiguous:
        raise ValueError("only flat, contiguous arrays")
    if source.dtype.kind not in "uf" or source.dtype.itemsize not in (2, 4, 8):
        raise ValueError(f"cannot select among {source.dtype}: give an unsigned view of floats")
    return np.dtype(f"u{source.dtype.itemsize}")


def _threshold_of(source: Array, k: int, threads: int | None, low: int = 0, high: int | None = None) -> tuple[int, int]:
    """Return the magnitude of the k-th largest, and how many equal to it (or fewer) belong to the k.

    All magnitudes lie between `low` and `high`.
    """
    scalar = _unsigned(source).type
    width = (2 ** (8 * source.itemsize - 1) - 1 if high is None else high) - low
    shift = max(0, width.bit_length() - BINS_BITS)
    bins = (width >> shift) + 1
    while True:
        parts = spans(len(source), threads)
        counts = np.zeros((len(parts), bins), np.int64)
        calls = [(source[a:b], scalar(low), np.uint64(shift), row) for (a, b), row in zip(parts, counts, strict=True)]
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


def _counts_at(source: Array, threshold: int, threads: int | None) -> list[tuple[int, int]]:
    """Return for each thread's part how many magnitudes are above the threshold, and how many equal it."""
    limit = _unsigned(source).type(threshold)
    return share(magnitude.count, [(source[a:b], limit) for a, b in spans(len(source), threads)])


def _reaching(source: Array, threshold: int, ties: int, k: int, threads: int | None) -> Array:
    """Return the indices of all k elements above the threshold, or among the first `ties` equal to it."""
    limit = _unsigned(source).type(threshold)
    parts = spans(len(source), threads)
    counts = _counts_at(source, threshold, threads)
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

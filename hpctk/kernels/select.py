"""The k elements of largest magnitude, exactly; among equals the lowest index first.

A sample gives a threshold that a little more than k elements reach; one pass collects those, and the
exact choice is made among them. Where the sample was wrong, or k is large, a histogram of the magnitudes'
high bits tells in which bin the k-th largest lies, a finer one of that bin the next bits, and so on to
the last: a pass over the tensor each time, and no memory but the result.
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels import chunks, magnitude
from hpctk.kernels.magnitude import INF_BITS
from hpctk.kernels.packing import index_dtype
from hpctk.kernels.threads import share, spans

Array = NDArray[Any]

#: Shorter tensors, and those of which more than this part is wanted, are searched without a sample.
WORTH_A_SAMPLE = 1 << 16
LARGEST_PART = 1 / 8
SAMPLE = 1 << 14
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
    return _select(_Values(bits, None, bits.dtype.type(0)), k, threads)[0]


def pick_top_k(
    source: Array, other: Array | None, k: int, *, minus: bool = False, threads: int | None = None
) -> tuple[Array, Array]:
    """Return indices, ascending, and values of the k largest magnitudes of source + other. Changes nothing.

    Of source - other with `minus`, of the source alone where the other is None; arrays of float32 or float64. One pass
    over both, and no other memory than the result: neither sums nor differences are written down. Raise NotFinite if
    one of them is inf or NaN.
    """
    if source.dtype.char not in INFINITY:
        raise ValueError(f"sums are of float32 or float64, not {source.dtype}")
    if other is not None and (other.shape != source.shape or other.dtype != source.dtype):
        raise ValueError(f"an array of {other.shape} {other.dtype} does not fit one of {source.shape} {source.dtype}")
    summed = _Values(source, other, source.dtype.type(-1 if minus else 1))
    indices, values = _select(summed, k, threads)
    # What is not finite is larger than all that is: it was found, if there is any.
    if magnitude.largest(values) >= INFINITY[source.dtype.char] if len(values) else len(source) > 0:
        bad = first_not_finite(source, other, minus=minus, threads=threads)
        if bad >= 0:
            raise NotFinite(bad)
    return indices, values


def feed_top_k(residual: Array, gradient: Array | None, k: int, *, threads: int | None = None) -> tuple[Array, Array]:
    """Add the gradient to the residual, take the k largest magnitudes out of it, in place, and return them.

    The residual, of float32 or float64, becomes residual + gradient (itself where that is None), with +0.0 where a
    value was taken out. Returned are indices, ascending, and values. Raise NotFinite if a sum is inf or NaN; the
    residual is then as it was. Two passes: one that looks (`pick_top_k`), one that writes (`add_and_clear`).
    """
    found, values = pick_top_k(residual, gradient, k, threads=threads)
    add_and_clear(residual, gradient, found, threads=threads)
    return found, values


def pick_chunks(
    source: Array, other: Array | None, k: int, chunk: int, *, threads: int | None = None
) -> tuple[Array, Array]:
    """Return indices, ascending, and values of the largest magnitudes of every chunk of source + other.

    k of a whole chunk; of the last one, of m elements, max(1, floor(k * m / chunk)). See `pick_top_k`.
    """
    n, infinity = len(source), INFINITY[source.dtype.char]
    indices = np.empty(kept_of_chunks(n, k, chunk), index_dtype(n))
    values = np.empty(len(indices), source.dtype)
    summed = _Values(source, other, source.dtype.type(1))
    calls = []
    for a, b in spans(n, threads, align=chunk):
        lo, hi = kept_of_chunks(a, k, chunk), kept_of_chunks(b, k, chunk)
        room = np.empty(chunks.room_for(min(chunk, n)), _unsigned(source))
        calls.append((*summed.part(a, b), infinity, (k, chunk), a, room, indices[lo:hi], values[lo:hi]))
    for call, bad in zip(calls, share(chunks.pick, calls), strict=True):
        if bad >= 0:
            raise NotFinite(call[5] + bad)
    return indices, values


def kept_of_chunks(n: int, k: int, chunk: int) -> int:
    """Return how many of n elements `pick_chunks` takes."""
    whole, rest = divmod(n, chunk)
    return whole * k + (max(1, k * rest // chunk) if rest else 0)


def add_and_clear(
    residual: Array, gradient: Array | None, cleared: Array, left: Array | None = None, *, threads: int | None = None
) -> None:
    """Add the gradient to the residual, in place, and write `left`, or +0.0, at the cleared indices, which ascend."""
    parts = spans(len(residual), threads)
    cuts = np.searchsorted(cleared, [a for a, _ in parts] + [len(residual)])
    calls = [
        (
            residual[a:b],
            None if gradient is None else gradient[a:b],
            cleared[lo:hi],
            None if left is None else left[lo:hi],
            a,
        )
        for (a, b), (lo, hi) in zip(parts, pairwise(cuts), strict=True)
    ]
    share(magnitude.add_and_clear, calls)


def first_not_finite(source: Array, other: Array | None, *, minus: bool = False, threads: int | None = None) -> int:
    """Return the index of the first element of source + other that is NaN or infinite, -1 where none is.

    Both of float32 or float64; of source - other with `minus`, of the source alone where the other is None.
    """
    inf = _unsigned(source).type(INF_BITS[source.dtype.name])
    parts = spans(len(source), threads)
    summed = _Values(source, other, source.dtype.type(-1 if minus else 1))
    found = share(magnitude.first_not_finite, [(*summed.part(a, b), inf) for a, b in parts])
    return next((a + index for (a, _), index in zip(parts, found, strict=True) if index >= 0), -1)


class _Values(NamedTuple):
    """What is selected from: source + weight * other, or the source alone."""

    source: Array
    other: Array | None
    weight: Any

    @property
    def n(self) -> int:
        return len(self.source)

    def part(self, start: int, stop: int) -> tuple[Array, Array | None, Any]:
        """Return the same of some elements, as kernels take it."""
        return self.source[start:stop], None if self.other is None else self.other[start:stop], self.weight

    def at(self, indices: Array) -> Array:
        """Return the values at indices, as a new array."""
        if self.other is None:
            return self.source[indices]
        # Overflow is the caller's to find, as in the kernels.
        with np.errstate(over="ignore", invalid="ignore"):
            values: Array = self.source[indices] + self.weight * self.other[indices]
        return values


def _select(values: _Values, k: int, threads: int | None) -> tuple[Array, Array]:
    """Return the indices and values of the k largest. Changes nothing."""
    if k < 0:
        raise ValueError(f"k={k}: at least 0")
    k = min(k, values.n)
    guess, expected = _guess(values, k)
    exact = (0, k) if k == values.n else None
    if guess:
        candidates = _collect(values, guess, expected, threads)
        if candidates is not None and len(candidates[0]) >= k:
            return _among(*candidates, guess, k, threads)
        exact = _threshold_from_guess(values, guess, k, candidates, threads)
    indices = _reaching(values, *(exact or _threshold_of(values, k, threads)), k, threads)
    return indices, values.at(indices)


def _guess(values: _Values, k: int) -> tuple[int, int]:
    """Return a magnitude that hardly fewer than k elements reach, and about how many do; 0, 0 for none."""
    n = values.n
    if n < WORTH_A_SAMPLE or k == 0:
        return 0, 0
    sample = np.empty(min(SAMPLE, n // 16), values.source.dtype)
    inside = len(sample) * k / n
    # Four standard deviations on the safe side.
    rank = int(inside + 4 * sqrt(inside) + 4)
    expected = rank * n // len(sample)
    if expected > LARGEST_PART * n:
        return 0, 0
    magnitude.sample(*values, sample)
    return max(1, _threshold_of(_Values(sample, None, values.weight), rank, 1)[0]), expected


def _collect(values: _Values, guess: int, expected: int, threads: int | None) -> tuple[Array, Array] | None:
    """Return all elements that reach the guess; None if they are far too many."""
    n, dtype = values.n, values.source.dtype
    threshold = _unsigned(values.source).type(guess)
    total = 0

    def work(start: int, stop: int) -> tuple[list[tuple[Array, Array]], bool]:
        nonlocal total
        room = expected * (stop - start) // n * 9 // 8 + 8 * magnitude.BLOCK
        pieces = []
        while start < stop and total <= n // MOST_CANDIDATES:
            indices, taken = np.empty(room, index_dtype(n)), np.empty(room, dtype)
            found, start = magnitude.collect(*values, threshold, start, stop, indices, taken)
            pieces.append((indices[:found], taken[:found]))
            total += found
        return pieces, start == stop

    parts = share(work, spans(n, threads))
    if not all(complete for _, complete in parts):
        return None
    pieces = [piece for pieces, _ in parts for piece in pieces]
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([indices for indices, _ in pieces]), np.concatenate([taken for _, taken in pieces])


def _among(indices: Array, taken: Array, low: int, k: int, threads: int | None) -> tuple[Array, Array]:
    """Return the k largest of the candidates, all of them at least `low`."""
    high = int(magnitude.largest(taken))
    threshold, ties = _threshold_of(_Values(taken, None, taken.dtype.type(0)), k, threads, low, high)
    kept = np.empty(k, indices.dtype), np.empty(k, taken.dtype)
    magnitude.keep_largest(indices, taken, _unsigned(taken).type(threshold), ties, *kept)
    return kept


def _threshold_from_guess(
    values: _Values, guess: int, k: int, candidates: tuple[Array, Array] | None, threads: int | None
) -> tuple[int, int] | None:
    """Return what `threshold_of` would where so many elements are equal that the guess told it, else None."""
    if candidates is not None:
        # A guess of 1, the lowest there is, lets all but zeros pass: what is still missing are zeros.
        return (0, k - len(candidates[0])) if guess == 1 else None
    counts = _counts_at(values, guess, threads)
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


def _threshold_of(
    values: _Values, k: int, threads: int | None, low: int = 0, high: int | None = None
) -> tuple[int, int]:
    """Return the magnitude of the k-th largest, and how many equal to it (or fewer) belong to the k.

    All magnitudes lie between `low` and `high`.
    """
    scalar = _unsigned(values.source).type
    width = (2 ** (8 * values.source.itemsize - 1) - 1 if high is None else high) - low
    shift = max(0, width.bit_length() - BINS_BITS)
    bins = (width >> shift) + 1
    while True:
        parts = spans(values.n, threads)
        counts = np.zeros((len(parts), bins), np.int64)
        calls = [
            (*values.part(a, b), scalar(low), np.uint64(shift), row) for (a, b), row in zip(parts, counts, strict=True)
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


def _counts_at(values: _Values, threshold: int, threads: int | None) -> list[tuple[int, int]]:
    """Return for each thread's part how many magnitudes are above the threshold, and how many equal it."""
    limit = _unsigned(values.source).type(threshold)
    return share(magnitude.count, [(*values.part(a, b), limit) for a, b in spans(values.n, threads)])


def _reaching(values: _Values, threshold: int, ties: int, k: int, threads: int | None) -> Array:
    """Return the indices of all k elements above the threshold, or among the first `ties` equal to it."""
    limit = _unsigned(values.source).type(threshold)
    parts = spans(values.n, threads)
    counts = _counts_at(values, threshold, threads)
    indices = np.empty(k, index_dtype(values.n))
    calls = []
    written = 0
    for (a, b), (above, equal) in zip(parts, counts, strict=True):
        here = min(ties, equal)
        calls.append((*values.part(a, b), limit, here, a, indices[written : written + above + here]))
        written += above + here
        ties -= here
    share(magnitude.write_indices, calls)
    return indices

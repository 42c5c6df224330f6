"""Compiled loops over magnitudes: the bits of a float without its sign.

For finite floats of every width the order of these bits, read as an unsigned integer, is the order of
the magnitudes; inf and NaN lie above all of them. So one loop serves float16, bfloat16, float32 and
float64, none is misled by denormals flushed to zero, and the compiler vectorises a largest integer
where it may not vectorise a largest float.

`source` is an array of float32 or float64, or the unsigned view of any float. Where there is a
`gradient`, what counts is the sum of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled

Array = NDArray[Any]

#: Magnitudes at which a value stops being finite.
INF_BITS = {"float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}
#: Elements that are added and looked at in one go; the loops below skip a block without a candidate.
BLOCK = 32
PART = 8

if TYPE_CHECKING:

    def magnitude(value: Any) -> Any: ...

else:

    @intrinsic
    def magnitude(typing, value):
        """Return the bits of a float, or of its unsigned view, without the sign."""
        unsigned = {types.float32: types.uint32, types.float64: types.uint64}.get(value, value)

        def build(context, builder, signature, arguments):
            bits = builder.bitcast(arguments[0], context.get_value_type(signature.return_type))
            return builder.and_(bits, bits.type(2 ** (unsigned.bitwidth - 1) - 1))

        return unsigned(value), build


@compiled
def first_not_finite(source: Array, gradient: Array | None, inf: Any) -> int:
    """Return the index of the first value that is inf or NaN, -1 if there is none."""
    piece = 1024
    for start in range(0, len(source), piece):
        part = source[start : start + piece]
        top = magnitude(part[0])
        if gradient is None:
            for i in range(len(part)):
                top = max(top, magnitude(part[i]))
        else:
            more = gradient[start : start + piece]
            for i in range(len(part)):
                top = max(top, magnitude(part[i] + more[i]))
        if top >= inf:
            for i in range(len(part)):
                value = part[i] if gradient is None else part[i] + gradient[start + i]
                if magnitude(value) >= inf:
                    return start + i
    return -1


@compiled
def sample(source: Array, gradient: Array | None, chosen: Array) -> None:
    """Fill `chosen` with values from all over the source, one from each of as many equal parts."""
    stride = np.uint64(len(source) // len(chosen))
    golden = np.uint64(2654435769)
    for i in range(len(chosen)):
        # Where in its part: by a sequence without a period: a regular tensor must not bias the sample.
        jitter = (((np.uint64(i) * golden) & np.uint64(0xFFFFFFFF)) * stride) >> np.uint64(32)
        position = np.uint64(i) * stride + jitter
        if gradient is None:
            chosen[i] = source[position]
        else:
            chosen[i] = source[position] + gradient[position]


@compiled
def histogram(source: Array, low: Any, shift: Any, counts: Array) -> None:
    """Count magnitudes in bins of 2**shift from `low` on, in place; those outside all bins are left out."""
    bins = np.uint64(len(counts))
    for i in range(len(source)):
        # Below `low` the difference wraps around and is larger than any bin.
        place = (np.uint64(magnitude(source[i])) - np.uint64(low)) >> np.uint64(shift)
        if place < bins:
            counts[place] += 1


@compiled
def largest(source: Array) -> Any:
    """Return the largest magnitude in an array that is not empty."""
    top = magnitude(source[0])
    for i in range(len(source)):
        top = max(top, magnitude(source[i]))
    return top


@compiled
def count(source: Array, threshold: Any) -> tuple[int, int]:
    """Return how many magnitudes are above the threshold, and how many equal it."""
    above, equal = 0, 0
    for i in range(len(source)):
        above += magnitude(source[i]) > threshold
        equal += magnitude(source[i]) == threshold
    return above, equal


@compiled
def write_indices(source: Array, threshold: Any, ties: int, first: int, indices: Array) -> None:
    """Fill `indices`, from `first` on, of magnitudes above the threshold and the first `ties` equal to it."""
    found = 0
    for i in range(len(source)):
        if found == len(indices):
            break
        here = magnitude(source[i])
        tie = here == threshold and ties > 0
        # Written in any case and kept if it counts: cheaper than a branch that is mispredicted.
        indices[found] = first + i
        found += here > threshold or tie
        ties -= tie


@compiled
def add_and_collect(
    source: Array,
    gradient: Array | None,
    clear: bool,
    threshold: Any,
    start: int,
    stop: int,
    indices: Array,
    values: Array,
) -> tuple[int, int]:
    """Add the gradient, and collect what reaches the threshold; stop early where the lists are full.

    Writes into `source` the sums, and where `clear` is set 0 at all collected indices. Returns how
    many were collected and the index to go on from.
    """
    found = 0
    for base in range(start, stop, BLOCK):
        if found + BLOCK > len(indices):
            return found, base
        if base + BLOCK > stop:
            break
        part = source[base : base + BLOCK]
        top = magnitude(part[0])
        if gradient is None:
            # Not range(BLOCK): unrolled before it is vectorised, this loop takes twice as long.
            for i in range(len(part)):
                top = max(top, magnitude(part[i]))
        else:
            more = gradient[base : base + BLOCK]
            top = magnitude(part[0] + more[0])
            for i in range(BLOCK):
                value = part[i] + more[i]
                part[i] = value
                top = max(top, magnitude(value))
        if top >= threshold:
            for edge in range(0, BLOCK, PART):
                top = magnitude(part[edge])
                for i in range(edge, edge + PART):
                    top = max(top, magnitude(part[i]))
                if top >= threshold:
                    for i in range(edge, edge + PART):
                        value = part[i]
                        hit = magnitude(value) >= threshold
                        indices[found] = base + i
                        values[found] = value
                        found += hit
                        if clear:
                            part[i] = 0 if hit else value
    for i in range(stop - (stop - start) % BLOCK, stop):
        if gradient is not None:
            source[i] += gradient[i]
        if magnitude(source[i]) >= threshold:
            indices[found] = i
            values[found] = source[i]
            found += 1
            if clear:
                source[i] = 0
    return found, stop


@compiled
def feed_small(source: Array, gradient: Array, inf: Any, indices: Array, values: Array) -> int:
    """Add the gradient and take the largest magnitudes out, as many as there is room for, all in one call.

    In place; for arrays that stay in the cache. Return -1, or the index of the first sum that is inf or NaN: then
    nothing was written. Indices ascend; of equal magnitudes the lowest indices are taken.
    """
    n, k = len(source), len(indices)
    low = magnitude(source[0] + gradient[0])
    top = low
    for i in range(n):
        here = magnitude(source[i] + gradient[i])
        top = max(top, here)
        low = min(low, here)
    if top >= inf:
        for i in range(n):
            if magnitude(source[i] + gradient[i]) >= inf:
                return i
    for i in range(n):
        source[i] += gradient[i]
    # The magnitude of the k-th largest lies in [low, low + 2**width): a histogram tells its next bits.
    wanted, first, width = k, np.uint64(low), 0
    while (np.uint64(top) - first) >> np.uint64(width):
        width += 1
    counts = np.empty(256, np.int64)
    while width > 0:
        finer = max(0, width - 8)
        bins = 1 << (width - finer)
        counts[:] = 0
        for i in range(n):
            place = (np.uint64(magnitude(source[i])) - first) >> np.uint64(finer)
            if place < np.uint64(bins):
                counts[place] += 1
        chosen = bins - 1
        while counts[chosen] < wanted:
            wanted -= counts[chosen]
            chosen -= 1
        first += np.uint64(chosen) << np.uint64(finer)
        width = finer
        if counts[chosen] == wanted:
            break
    # Now `wanted` of those in [first, first + 2**width) belong to the k; where that is one magnitude, the first ones.
    found = 0
    for i in range(n):
        if found == k:
            break
        here = np.uint64(magnitude(source[i]))
        if here >= first:
            if (here - first) >> np.uint64(width) == 0:
                if wanted == 0:
                    continue
                wanted -= 1
            indices[found] = i
            values[found] = source[i]
            source[i] = 0
            found += 1
    return -1


@compiled
def keep_largest(
    indices: Array,
    values: Array,
    threshold: Any,
    ties: int,
    kept_indices: Array,
    kept_values: Array,
    rest: Array | None,
) -> None:
    """Write the candidates above the threshold and the first `ties` equal to it into the kept lists.

    The others go back into `rest` where they came from, unless it is None.
    """
    found = 0
    for i in range(len(indices)):
        here = magnitude(values[i])
        if here > threshold or (here == threshold and ties > 0):
            ties -= here == threshold
            kept_indices[found] = indices[i]
            kept_values[found] = values[i]
            found += 1
        elif rest is not None:
            rest[indices[i]] = values[i]

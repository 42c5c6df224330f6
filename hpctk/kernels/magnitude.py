"""Compiled loops over magnitudes: the bits of a float without its sign.

For finite floats of every width the order of these bits, read as an unsigned integer, is the order of
the magnitudes; inf and NaN lie above all of them. So one loop serves float16, bfloat16, float32 and
float64, none is misled by denormals flushed to zero, and the compiler vectorises a largest integer
where it may not vectorise a largest float.

`source` is an array of float32 or float64, or the unsigned view of any float. Where there is an `other`, what
counts is source + weight * other, with a weight of 1 or -1: a residual and a gradient, or two models. It is formed
anew wherever it is looked at: adding is cheaper than writing down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled, intrinsic, ir, types

Array = NDArray[Any]

#: Magnitudes at which a value stops being finite.
INF_BITS = {"float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}
#: Elements that are looked at in one go, as one vector: one bit of a mask for each.
BLOCK = 32

if TYPE_CHECKING:

    def magnitude(value: Any) -> Any: ...
    def reaching(source: Any, other: Any, weight: Any, threshold: Any, base: int) -> Any: ...
    def lowest(mask: Any) -> int: ...

else:

    @intrinsic
    def magnitude(typing, value):
        """Return the bits of a float, or of its unsigned view, without the sign."""
        unsigned = {types.float32: types.uint32, types.float64: types.uint64}.get(value, value)

        def build(context, builder, signature, arguments):
            bits = builder.bitcast(arguments[0], context.get_value_type(signature.return_type))
            return builder.and_(bits, bits.type(2 ** (unsigned.bitwidth - 1) - 1))

        return unsigned(value), build

    @intrinsic
    def reaching(typing, source, other, weight, threshold, base):
        """Return a mask of BLOCK bits, from `base` on: bit i is set where that magnitude reaches the threshold.

        Written in vectors: left to itself the compiler makes no mask of comparisons, and goes bit by bit.
        """
        width = source.dtype.bitwidth

        def build(context, builder, signature, arguments):
            lanes = ir.VectorType(context.get_data_type(source.dtype), BLOCK)
            bits = ir.VectorType(ir.IntType(width), BLOCK)

            def loaded(kind, array):
                start = builder.gep(context.make_array(kind)(context, builder, array).data, [arguments[4]])
                return builder.load(builder.bitcast(start, lanes.as_pointer()), align=width // 8)

            def everywhere(vector, scalar):
                nothing, number = ir.Constant(vector, ir.Undefined), ir.IntType(32)
                one = builder.insert_element(nothing, scalar, number(0))
                return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(number, BLOCK), [0] * BLOCK))

            values = loaded(source, arguments[0])
            if other is not types.none:
                weighted = builder.fmul(everywhere(lanes, arguments[2]), loaded(other, arguments[1]))
                values = builder.fadd(values, weighted)
            unsigned = builder.and_(builder.bitcast(values, bits), ir.Constant(bits, [2 ** (width - 1) - 1] * BLOCK))
            hits = builder.icmp_unsigned(">=", unsigned, everywhere(bits, arguments[3]))
            return builder.bitcast(hits, ir.IntType(BLOCK))

        return types.uint32(source, other, weight, threshold, types.intp), build

    @intrinsic
    def lowest(typing, mask):
        """Return the number of the lowest bit that is set in a mask that is not zero."""

        def build(context, builder, signature, arguments):
            return builder.zext(builder.cttz(arguments[0], ir.IntType(1)(1)), ir.IntType(64))

        return types.int64(types.uint32), build


@compiled
def first_not_finite(source: Array, other: Array | None, weight: Any, inf: Any) -> int:
    """Return the index of the first value that is inf or NaN, -1 if there is none."""
    piece = 1024
    for start in range(0, len(source), piece):
        part = source[start : start + piece]
        top = magnitude(part[0])
        if other is None:
            for i in range(len(part)):
                top = max(top, magnitude(part[i]))
        else:
            more = other[start : start + piece]
            for i in range(len(part)):
                top = max(top, magnitude(part[i] + weight * more[i]))
        if top >= inf:
            for i in range(len(part)):
                value = part[i] if other is None else part[i] + weight * other[start + i]
                if magnitude(value) >= inf:
                    return start + i
    return -1


@compiled
def sample(source: Array, other: Array | None, weight: Any, chosen: Array) -> None:
    """Fill `chosen` with values from all over the source, one from each of as many equal parts."""
    stride = np.uint64(len(source) // len(chosen))
    golden = np.uint64(2654435769)
    for i in range(len(chosen)):
        # Where in its part: by a sequence without a period: a regular tensor must not bias the sample.
        jitter = (((np.uint64(i) * golden) & np.uint64(0xFFFFFFFF)) * stride) >> np.uint64(32)
        position = np.uint64(i) * stride + jitter
        if other is None:
            chosen[i] = source[position]
        else:
            chosen[i] = source[position] + weight * other[position]


@compiled
def histogram(source: Array, other: Array | None, weight: Any, low: Any, shift: Any, counts: Array) -> None:
    """Count magnitudes in bins of 2**shift from `low` on, in place; those outside all bins are left out."""
    bins = np.uint64(len(counts))
    for i in range(len(source)):
        value = source[i] if other is None else source[i] + weight * other[i]
        # Below `low` the difference wraps around and is larger than any bin.
        place = (np.uint64(magnitude(value)) - np.uint64(low)) >> np.uint64(shift)
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
def count(source: Array, other: Array | None, weight: Any, threshold: Any) -> tuple[int, int]:
    """Return how many magnitudes are above the threshold, and how many equal it."""
    above, equal = 0, 0
    for i in range(len(source)):
        here = magnitude(source[i] if other is None else source[i] + weight * other[i])
        above += here > threshold
        equal += here == threshold
    return above, equal


@compiled
def write_indices(
    source: Array, other: Array | None, weight: Any, threshold: Any, ties: int, first: int, indices: Array
) -> None:
    """Fill `indices`, from `first` on, of magnitudes above the threshold and the first `ties` equal to it."""
    found = 0
    for i in range(len(source)):
        if found == len(indices):
            break
        here = magnitude(source[i] if other is None else source[i] + weight * other[i])
        tie = here == threshold and ties > 0
        # Written in any case and kept if it counts: cheaper than a branch that is mispredicted.
        indices[found] = first + i
        found += here > threshold or tie
        ties -= tie


@compiled
def collect(
    source: Array,
    other: Array | None,
    weight: Any,
    threshold: Any,
    start: int,
    stop: int,
    indices: Array,
    values: Array,
) -> tuple[int, int]:
    """Collect what reaches the threshold; stop early where the lists are full. Changes nothing else.

    Returns how many were collected and the index to go on from.
    """
    found = 0
    whole = stop - (stop - start) % BLOCK
    for base in range(start, whole, BLOCK):
        if found + BLOCK > len(indices):
            return found, base
        mask = reaching(source, other, weight, threshold, base)
        while mask:
            i = base + lowest(mask)
            indices[found] = i
            values[found] = source[i] if other is None else source[i] + weight * other[i]
            found += 1
            mask &= mask - np.uint32(1)
    if found + BLOCK > len(indices):
        return found, whole
    for i in range(whole, stop):
        value = source[i] if other is None else source[i] + weight * other[i]
        if magnitude(value) >= threshold:
            indices[found] = i
            values[found] = value
            found += 1
    return found, stop


@compiled
def pick_small(source: Array, other: Array, weight: Any, inf: Any, indices: Array, values: Array) -> int:
    """Find the largest magnitudes, as many as there is room for, all in one call, for arrays that stay in the cache.

    Return -1, or the index of the first value that is inf or NaN: then nothing was found. Indices ascend; of equal
    magnitudes the lowest indices are taken.
    """
    n, k = len(source), len(indices)
    low = magnitude(source[0] + weight * other[0])
    top = low
    for i in range(n):
        here = magnitude(source[i] + weight * other[i])
        top = max(top, here)
        low = min(low, here)
    if top >= inf:
        for i in range(n):
            if magnitude(source[i] + weight * other[i]) >= inf:
                return i
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
            place = (np.uint64(magnitude(source[i] + weight * other[i])) - first) >> np.uint64(finer)
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
        value = source[i] + weight * other[i]
        here = np.uint64(magnitude(value))
        if here >= first:
            if (here - first) >> np.uint64(width) == 0:
                if wanted == 0:
                    continue
                wanted -= 1
            indices[found] = i
            values[found] = value
            found += 1
    return -1


@compiled
def feed_small(source: Array, gradient: Array, inf: Any, indices: Array, values: Array) -> int:
    """Add the gradient and take the largest magnitudes out, as `pick_small` finds them, all in one call.

    In place. Return -1, or the index of the first sum that is inf or NaN: then nothing was written.
    """
    bad = pick_small(source, gradient, source.dtype.type(1), inf, indices, values)
    if bad < 0:
        add_and_clear(source, gradient, indices, None, 0)
    return bad


@compiled
def add_and_clear(source: Array, gradient: Array | None, cleared: Array, left: Array | None, first: int) -> None:
    """Add the gradient, in place, and write `left`, or 0, at the cleared indices.

    These ascend and count from `first` on.
    """
    piece, j = 4096, 0
    for start in range(0, len(source), piece):
        part = source[start : start + piece]
        if gradient is not None:
            more = gradient[start : start + piece]
            for i in range(len(part)):
                part[i] += more[i]
        # While it is in the cache.
        end = first + start + len(part)
        while j < len(cleared) and cleared[j] < end:
            part[cleared[j] - first - start] = 0 if left is None else left[j]
            j += 1


@compiled
def keep_largest(
    indices: Array, values: Array, threshold: Any, ties: int, kept_indices: Array, kept_values: Array
) -> None:
    """Write the candidates above the threshold and the first `ties` equal to it into the kept lists."""
    found = 0
    for i in range(len(indices)):
        if found == len(kept_indices):
            break
        here = magnitude(values[i])
        tie = here == threshold and ties > 0
        kept_indices[found] = indices[i]
        kept_values[found] = values[i]
        found += here > threshold or tie
        ties -= tie

"""The largest magnitudes of every chunk of an array, in one pass over it.

See magnitude.py for what a magnitude is. Those of a chunk are written down once, into memory that stays in the cache,
and with them the largest of every block. As many elements as blocks reach the k-th largest of these, so at least k
do, and few more in most tensors: the choice is made among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled, intrinsic, ir, types

Array = NDArray[Any]

#: Elements that are compared in one go, as one vector: one bit of a mask for each.
BLOCK = 32
#: Most blocks have no more that reach a threshold.
FEW = 4

if TYPE_CHECKING:

    def _magnitude(value: Any) -> Any: ...
    def _reaching(bits: Any, threshold: Any, base: int) -> Any: ...
    def _lowest(mask: Any) -> int: ...
    def _ones(mask: Any) -> int: ...

else:
    # Once more, not those of magnitude.py: a kernel calls nothing of another file (compiled.py).
    @intrinsic
    def _magnitude(typing, value):
        """Return the bits of a float without the sign."""
        unsigned = {types.float32: types.uint32, types.float64: types.uint64}[value]

        def build(context, builder, signature, arguments):
            bits = builder.bitcast(arguments[0], context.get_value_type(signature.return_type))
            return builder.and_(bits, bits.type(2 ** (unsigned.bitwidth - 1) - 1))

        return unsigned(value), build

    @intrinsic
    def _reaching(typing, bits, threshold, base):
        """Return a mask of BLOCK bits, from `base` on: bit i is set where that number reaches the threshold."""
        width = bits.dtype.bitwidth

        def build(context, builder, signature, arguments):
            vector, number = ir.VectorType(ir.IntType(width), BLOCK), ir.IntType(32)
            start = builder.gep(context.make_array(bits)(context, builder, arguments[0]).data, [arguments[2]])
            loaded = builder.load(builder.bitcast(start, vector.as_pointer()), align=width // 8)
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[1], number(0))
            everywhere = ir.Constant(ir.VectorType(number, BLOCK), [0] * BLOCK)
            limit = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), everywhere)
            return builder.bitcast(builder.icmp_unsigned(">=", loaded, limit), ir.IntType(BLOCK))

        return types.uint32(bits, threshold, types.intp), build

    @intrinsic
    def _lowest(typing, mask):
        """Return the number of the lowest bit that is set in a mask, BLOCK where none is."""

        def build(context, builder, signature, arguments):
            return builder.zext(builder.cttz(arguments[0], ir.IntType(1)(0)), ir.IntType(64))

        return types.int64(types.uint32), build

    @intrinsic
    def _ones(typing, mask):
        """Return how many bits are set in a mask."""

        def build(context, builder, signature, arguments):
            return builder.zext(builder.ctpop(arguments[0]), ir.IntType(64))

        return types.int64(types.uint32), build


def room_for(chunk: int) -> tuple[int, int]:
    """Return the shape of the memory that `pick` works in, of unsigned integers as wide as the floats."""
    return 4, (-(-chunk // BLOCK) + 1) * BLOCK


@compiled
def pick(
    source: Array,
    other: Array | None,
    weight: Any,
    inf: Any,
    sizes: tuple[int, int],
    first: int,
    room: Array,
    indices: Array,
    values: Array,
) -> int:
    """Find the largest magnitudes of every chunk: k of a whole one, in proportion of the last; `sizes` = (k, chunk).

    Of source + weight * other, or the source alone. Return -1, or the index of the first value that is inf or NaN.
    Indices ascend, and count from `first` on; of equal magnitudes the lowest indices are taken.
    """
    k, chunk = sizes
    bits, tops, candidates, places = room[0], room[1], room[2], room[3]
    found, guess = 0, room.dtype.type(0)
    for start in range(0, len(source), chunk):
        stop = min(start + chunk, len(source))
        wanted = k if stop - start == chunk else max(1, k * (stop - start) // chunk)
        groups = min(2 * wanted, stop - start)
        _write_bits(source[start:stop], None if other is None else other[start:stop], weight, bits)
        _write_tops(bits, stop - start, tops, groups)
        low, high = _bounds(tops, groups)
        if high >= inf:
            for i in range(stop - start):
                if bits[i] >= inf:
                    return start + i
        if not wanted <= _count(tops, groups, guess) <= wanted + wanted // 2:
            # Else that of the chunk before serves; a few more than are wanted, so that this one serves the next.
            guess = _reached(tops, groups, min(groups, wanted + wanted // 4), low, high)
        count = 0
        for base in range(0, stop - start, BLOCK):
            mask = _reaching(bits, guess, base)
            more = count + _ones(mask)
            # How many there are is what no processor predicts: room for a few is filled in any case.
            for i in range(FEW):
                places[count + i] = base + _lowest(mask)
                mask &= mask - np.uint32(1)
            count += FEW
            while mask:
                places[count] = base + _lowest(mask)
                count += 1
                mask &= mask - np.uint32(1)
            count = more
        for j in range(count):
            candidates[j] = bits[places[j]]
        _fill_block(candidates, count)
        threshold = _reached(candidates, count, wanted, guess, high)
        ties = wanted
        for i in range(count):
            ties -= candidates[i] > threshold
        end = found + wanted
        for j in range(count):
            if found == end:
                break
            tie = candidates[j] == threshold and ties > 0
            place = start + np.int64(places[j])
            indices[found] = first + place
            values[found] = source[place] if other is None else source[place] + weight * other[place]
            found += candidates[j] > threshold or tie
            ties -= tie
    return -1


@compiled
def _write_bits(source: Array, other: Array | None, weight: Any, bits: Array) -> None:
    """Write all magnitudes, in whole blocks."""
    if other is None:
        for i in range(len(source)):
            bits[i] = _magnitude(source[i])
    else:
        for i in range(len(source)):
            bits[i] = _magnitude(source[i] + weight * other[i])
    _fill_block(bits, len(source))


@compiled
def _write_tops(bits: Array, n: int, tops: Array, groups: int) -> None:
    """Write the largest of every group of some of n magnitudes; a group's lie `groups` elements apart."""
    for j in range(groups):
        tops[j] = bits[j]
    for start in range(groups, n, groups):
        row = bits[start : min(start + groups, n)]
        for j in range(len(row)):
            tops[j] = max(tops[j], row[j])
    _fill_block(tops, groups)


@compiled
def _fill_block(bits: Array, n: int) -> None:
    """Write zeros after n magnitudes, up to a whole block: they come last, so none is taken for one of the largest."""
    for i in range(n, (n + BLOCK - 1) // BLOCK * BLOCK):
        bits[i] = 0


@compiled
def _bounds(bits: Array, n: int) -> tuple[Any, Any]:
    """Return the smallest and the largest of n magnitudes."""
    low, high = bits[0], bits[0]
    for i in range(n):
        low = min(low, bits[i])
        high = max(high, bits[i])
    return low, high


@compiled
def _count(bits: Array, n: int, threshold: Any) -> int:
    """Return how many of n magnitudes, and of the zeros after them, reach a threshold."""
    count = 0
    for base in range(0, n, BLOCK):
        count += _ones(_reaching(bits, threshold, base))
    return count


@compiled
def _reached(bits: Array, n: int, k: int, low: Any, high: Any) -> Any:
    """Return a magnitude that just k of n reach, or the k-th largest itself where others equal that.

    All lie between `low` and `high`.
    """
    unknown = 0
    while np.uint64(low ^ high) >> np.uint64(unknown):
        unknown += 1
    reached = np.uint64(low) >> np.uint64(unknown) << np.uint64(unknown)
    for bit in range(unknown - 1, -1, -1):
        trial = reached | (np.uint64(1) << np.uint64(bit))
        count = _count(bits, n, bits.dtype.type(trial))
        if count >= k:
            reached = trial
            if count == k:
                break
    return bits.dtype.type(reached)

"""Many small arrays in one compiled call: they are given by their addresses, for a Python call each would cost more.

An array is one row of host memory, of float32 or float64; `addresses` are where they begin (0 for one that is not
there), `edges` the bounds of their elements where all are laid one after the other. Whoever calls holds the arrays, has
made sure that each is as long as the edges say, and that none is shared by two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import carray, compiled, intrinsic, types

Array = NDArray[Any]

if TYPE_CHECKING:

    def _pointer(address: Any) -> Any: ...

    def _magnitude(value: Any) -> Any: ...

else:

    @intrinsic
    def _pointer(typing, address):
        """Return an address as a pointer."""

        def build(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.voidptr(address), build

    # Once more, not that of magnitude.py: a kernel calls nothing of another file (compiled.py).
    @intrinsic
    def _magnitude(typing, value):
        """Return the bits of a float without the sign."""
        unsigned = {types.float32: types.uint32, types.float64: types.uint64}[value]

        def build(context, builder, signature, arguments):
            bits = builder.bitcast(arguments[0], context.get_value_type(signature.return_type))
            return builder.and_(bits, bits.type(2 ** (unsigned.bitwidth - 1) - 1))

        return unsigned(value), build


@compiled
def gather(addresses: Array, edges: Array, flat: Array) -> None:
    """Copy all arrays into a flat one, in place; zeros for those that are not there."""
    for s in range(len(addresses)):
        lo, n = edges[s], edges[s + 1] - edges[s]
        if addresses[s] == 0:
            flat[lo : lo + n] = 0
            continue
        row = carray(_pointer(addresses[s]), n, flat.dtype)
        for i in range(n):
            flat[lo + i] = row[i]


@compiled
def scatter(flat: Array, addresses: Array, edges: Array) -> None:
    """Copy the parts of a flat array into the arrays, in place."""
    for s in range(len(addresses)):
        lo, n = edges[s], edges[s + 1] - edges[s]
        row = carray(_pointer(addresses[s]), n, flat.dtype)
        for i in range(n):
            row[i] = flat[lo + i]


@compiled
def largest(addresses: Array, edges: Array, inf: Any, like: Array) -> tuple[int, Any]:
    """Return the first array with an inf or a NaN, -1 where none has one, and the bits of the largest magnitude.

    `like` is any array of the arrays' dtype; the magnitude is that of the arrays up to the bad one.
    """
    top = _magnitude(like.dtype.type(0))
    for s in range(len(addresses)):
        n = edges[s + 1] - edges[s]
        row = carray(_pointer(addresses[s]), n, like.dtype)
        for i in range(n):
            top = max(top, _magnitude(row[i]))
        if top >= inf:
            return s, top
    return -1, top


@compiled
def first_bad_sum(residuals: Array, gradients: Array, edges: Array, inf: Any, like: Array) -> tuple[int, int]:
    """Return which array, and which element of it, is the first that is not finite, of the sums; (-1, -1) for none.

    A residual that is not there counts as zeros.
    """
    for s in range(len(gradients)):
        n = edges[s + 1] - edges[s]
        row = carray(_pointer(gradients[s]), n, like.dtype)
        top = _magnitude(like.dtype.type(0))
        if residuals[s] == 0:
            for i in range(n):
                top = max(top, _magnitude(row[i]))
            if top >= inf:
                for i in range(n):
                    if _magnitude(row[i]) >= inf:
                        return s, i
            continue
        kept = carray(_pointer(residuals[s]), n, like.dtype)
        for i in range(n):
            top = max(top, _magnitude(kept[i] + row[i]))
        if top >= inf:
            for i in range(n):
                if _magnitude(kept[i] + row[i]) >= inf:
                    return s, i
    return -1, -1


@compiled
def take_largest(
    residuals: Array,
    gradients: Array,
    edges: Array,
    which: Array,
    counts: Array,
    places: Array,
    indices: Array,
    values: Array,
) -> None:
    """Add gradients to residuals, and take the largest magnitudes of each sum out of it, in place.

    Of array s = which[j], counts[s] elements are written at places[s] on, with their indices counted over all arrays:
    ascending, of equal magnitudes the lowest. The residual becomes the sum, with 0 where an element was taken. Without
    a residual the gradient itself is looked at, and nothing changes. All sums are finite.
    """
    longest = 0
    for j in range(len(which)):
        longest = max(longest, edges[which[j] + 1] - edges[which[j]])
    room = np.empty(longest, values.dtype)
    bins = np.empty(256, np.int64)
    for j in range(len(which)):
        s = which[j]
        start, n, k, at = edges[s], edges[s + 1] - edges[s], counts[s], places[s]
        if n == 0:
            continue
        row = carray(_pointer(gradients[s]), n, values.dtype)
        sums, fed = room[:n], residuals[s] != 0
        if fed:
            kept = carray(_pointer(residuals[s]), n, values.dtype)
            for i in range(n):
                sums[i] = kept[i] + row[i]
        else:
            sums[:] = row
        if k == n:
            for i in range(n):
                indices[at + i] = start + i
                values[at + i] = sums[i]
            if fed:
                kept[:] = 0
            continue
        _choose(sums, k, at, indices, bins)
        for i in range(at, at + k):
            place = indices[i]
            values[i] = sums[place]
            sums[place] = 0
            indices[i] = start + place
        if fed:
            kept[:] = sums


@compiled
def _choose(sums: Array, k: int, at: int, indices: Array, bins: Array) -> None:
    """Write the indices of the k largest magnitudes at `at` on: ascending, the lowest of equal ones. 0 < k < n."""
    n = len(sums)
    low = _magnitude(sums[0])
    top = low
    for i in range(n):
        here = _magnitude(sums[i])
        top = max(top, here)
        low = min(low, here)
    # The magnitude of the k-th largest lies in [first, first + 2**width): a histogram tells its next bits.
    wanted, first, width = k, np.uint64(low), 0
    while (np.uint64(top) - first) >> np.uint64(width):
        width += 1
    while width > 0:
        finer = max(0, width - 8)
        number = 1 << (width - finer)
        bins[:] = 0
        for i in range(n):
            place = (np.uint64(_magnitude(sums[i])) - first) >> np.uint64(finer)
            if place < np.uint64(number):
                bins[place] += 1
        chosen = number - 1
        while bins[chosen] < wanted:
            wanted -= bins[chosen]
            chosen -= 1
        first += np.uint64(chosen) << np.uint64(finer)
        width = finer
        if bins[chosen] == wanted:
            break
    # Now `wanted` of those in [first, first + 2**width) belong to the k; where that is one magnitude, the first ones.
    found = at
    for i in range(n):
        if found == at + k:
            break
        here = np.uint64(_magnitude(sums[i]))
        if here >= first:
            if (here - first) >> np.uint64(width) == 0:
                if wanted == 0:
                    continue
                wanted -= 1
            indices[found] = i
            found += 1


@compiled
def write_sparse(addresses: Array, edges: Array, indices: Array, values: Array, clear: bool) -> None:
    """Write the elements of a sparse vector into arrays, in place; zeros into all others where `clear` is set.

    Arrays that are not there are passed over. Indices ascend.
    """
    at = 0
    for s in range(len(addresses)):
        lo, hi = edges[s], edges[s + 1]
        if addresses[s] == 0:
            while at < len(indices) and indices[at] < hi:
                at += 1
            continue
        row = carray(_pointer(addresses[s]), hi - lo, values.dtype)
        if clear:
            row[:] = 0
        while at < len(indices) and indices[at] < hi:
            row[indices[at] - lo] = values[at]
            at += 1

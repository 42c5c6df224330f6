"""Products of a matrix with one of two to four columns, in float32: one pass over the matrix, at the speed of memory.

BLAS is made for other shapes; on some processors it takes five to fifteen times as long for these. Every sum is formed
one product after the other, each rounded, then added and rounded: the same bits on every processor, for any number of
threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled, intrinsic, ir, types
from hpctk.kernels.threads import WORTH_A_THREAD, share

Array = NDArray[Any]

#: Columns that fill a vector; fewer are filled up with zeros.
COLUMNS = 4
#: Rows whose sums are formed side by side: additions of one sum wait for each other.
ROWS = 8
#: Columns of the matrix that are gone through together: with their sums they stay in the fastest cache.
TILE = 1024


def times(matrix: Array, thin: Array, *, threads: int) -> Array:
    """Return matrix @ thin, of a row-major matrix of float32 and one of two to four columns. Not in place."""
    m, n = matrix.shape
    filled = _filled(thin)
    product = np.empty((m, COLUMNS), np.float32)
    cuts = _cuts(m, n, threads)
    share(_times, [(matrix[lo:hi].reshape(-1), n, filled, product[lo:hi].reshape(-1)) for lo, hi in cuts])
    return np.ascontiguousarray(product[:, : thin.shape[1]])


def transposed_times(matrix: Array, thin: Array, *, threads: int) -> Array:
    """Return matrix.T @ thin, of matrices as for `times`. Not in place."""
    m, n = matrix.shape
    filled = np.ascontiguousarray(thin)
    sums = np.zeros((thin.shape[1], n), np.float32)
    share(_add_transposed, [(matrix, filled, sums, lo, hi) for lo, hi in _cuts(n, m, threads)])
    return np.ascontiguousarray(sums.T)


def _filled(thin: Array) -> Array:
    filled = np.zeros((len(thin), COLUMNS), np.float32)
    filled[:, : thin.shape[1]] = thin
    return filled.reshape(-1)


def _cuts(n: int, other: int, threads: int) -> list[tuple[int, int]]:
    """Return the bounds of equal parts of n rows or columns, one for each thread that is worth waking."""
    parts = max(1, min(threads, n * other // WORTH_A_THREAD, n))
    return [(n * part // parts, n * (part + 1) // parts) for part in range(parts)]


if TYPE_CHECKING:

    def _rows(matrix: Any, columns: Any, thin: Any, first: Any, product: Any) -> None: ...
    def _row(matrix: Any, columns: Any, thin: Any, first: Any, product: Any) -> None: ...

else:

    def _adding(count):
        """Return the code for the products of `count` rows, in vectors of COLUMNS, each sum in a register."""

        def build(context, builder, signature, arguments):
            matrix, columns, thin, first, product = arguments
            arrays = (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2, 4))
            matrix, thin, product = arrays
            vector, number, index = ir.VectorType(ir.FloatType(), COLUMNS), ir.IntType(32), ir.IntType(64)
            nothing, everywhere = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(number, COLUMNS), None)

            def at(array, place):
                return builder.bitcast(builder.gep(array, [place]), vector.as_pointer())

            before = builder.block
            loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
            rows = [builder.mul(builder.add(first, index(r)), columns) for r in range(count)]
            builder.branch(loop)
            builder.position_at_end(loop)
            j, *sums = builder.phi(index), *(builder.phi(vector) for _ in range(count))
            weights = builder.load(at(thin, builder.mul(j, index(COLUMNS))), align=4)
            added = []
            for start, total in zip(rows, sums, strict=True):
                value = builder.load(builder.gep(matrix, [builder.add(start, j)]))
                values = builder.shuffle_vector(builder.insert_element(nothing, value, number(0)), nothing, everywhere)
                added.append(builder.fadd(total, builder.fmul(values, weights)))
            following = builder.add(j, index(1))
            for phi, begun, went_on in zip(
                (j, *sums), (index(0), *[ir.Constant(vector, None)] * count), (following, *added), strict=True
            ):
                phi.add_incoming(begun, before)
                phi.add_incoming(went_on, loop)
            builder.cbranch(builder.icmp_signed("<", following, columns), loop, after)
            builder.position_at_end(after)
            for r, total in enumerate(added):
                place = builder.mul(builder.add(first, index(r)), index(COLUMNS))
                builder.store(total, at(product, place), align=4)
            return context.get_dummy_value()

        return build

    @intrinsic
    def _rows(typing, matrix, columns, thin, first, product):
        """Write the products of ROWS rows of at least one column, from the row `first` on."""
        return types.void(matrix, types.int64, thin, types.int64, product), _adding(ROWS)

    @intrinsic
    def _row(typing, matrix, columns, thin, first, product):
        """Write the product of one row."""
        return types.void(matrix, types.int64, thin, types.int64, product), _adding(1)


@compiled
def _times(matrix: Array, columns: int, thin: Array, product: Array) -> None:
    rows = len(product) // COLUMNS
    whole = rows - rows % ROWS
    for first in range(0, whole, ROWS):
        _rows(matrix, columns, thin, first, product)
    for first in range(whole, rows):
        _row(matrix, columns, thin, first, product)


@compiled
def _add_transposed(matrix: Array, thin: Array, sums: Array, start: int, stop: int) -> None:
    whole = len(matrix) - len(matrix) % 4
    for lo in range(start, stop, TILE):
        hi = min(lo + TILE, stop)
        for i in range(0, whole, 4):
            a, b, c, d = matrix[i, lo:hi], matrix[i + 1, lo:hi], matrix[i + 2, lo:hi], matrix[i + 3, lo:hi]
            for column in range(len(sums)):
                total = sums[column, lo:hi]
                p, q, r, s = thin[i, column], thin[i + 1, column], thin[i + 2, column], thin[i + 3, column]
                for j in range(len(total)):
                    total[j] = total[j] + a[j] * p + b[j] * q + c[j] * r + d[j] * s
        for i in range(whole, len(matrix)):
            for column in range(len(sums)):
                for j in range(lo, hi):
                    sums[column, j] += matrix[i, j] * thin[i, column]

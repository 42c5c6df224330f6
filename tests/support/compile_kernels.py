"""Compile the kernels that the tests use, once: `python tests/support/compile_kernels.py`.

Several jobs of the tests at a time would compile the same ones otherwise, for a minute.
"""

from __future__ import annotations

import numpy as np

from hpctk.kernels import cells, halves, lean, levels, many, merge, packing, select, signs, thin, updates


def warm() -> None:
    """Run every kernel of the host on a few elements."""
    matrix = np.ones((9, 9), np.float32)
    thin.times(matrix, matrix[:, :2], threads=1)
    thin.transposed_times(matrix, matrix[:, :2], threads=1)
    for dtype in (np.float32, np.float64):
        values = np.linspace(-1, 1, 64).astype(dtype)
        found, taken = select.feed_top_k(values.copy(), values, 8)
        select.top_k(values.view(f"u{values.itemsize}"), 8)
        for other in (None, values):
            where, kept = select.pick_chunks(values, other, 2, 32)
            select.add_and_clear(values.copy(), values, where, kept)
        for rule in ("sigma", "signed"):
            cells.cut(kept, 2, rule)
        packed = packing.pack_indices(found, 64)
        packing.unpack_indices(packed, len(found), 64)
        merge.merge(found, taken, found, taken)
        merge.not_in(found, found)
        merge.scatter(values, found, taken)
        merge.scatter_add(values, found, taken)
        merge.take(values, found)
        signs_of = packing.pack_signs(values)
        packing.unpack_signs(signs_of, 64, 1.0, np.dtype(dtype))
        packing.add_signs(signs_of, 64, 1.0, values)
        signs.sum_of_magnitudes(values, values)
        signs.take_signs(values.copy(), values, 1.0, signs_of)
        for wire in ("float16", "bfloat16"):
            halves.read(halves.write(values, wire, 1.0), wire, values.copy())
            halves.feed(values.copy(), values, wire, 1.0)
        for gradient in (None, values):
            data = levels.write(values.copy(), gradient, 4, 64, 64, 1.0, *(np.zeros(k, np.uint64) for k in (2, 4)))
        levels.read(data[: values.itemsize].copy().view(dtype), data[values.itemsize :], 4, 64, values.copy())
        edges, where = np.array([0, 64]), np.array([values.ctypes.data])
        many.gather(where, edges, values.copy())
        many.largest(where, edges, select.INFINITY[values.dtype.char], values)
        many.first_bad_sum(where, where, edges, select.INFINITY[values.dtype.char], values)
        indices, kept, first = np.empty(8, found.dtype), np.empty(8, dtype), np.zeros(1, np.int64)
        many.take_largest(first, where, edges, first, np.array([8]), first, indices, kept)
        many.write_sparse(where, edges, indices, kept, True)
        many.scatter(values.copy(), where, edges)
        updates.sum_of_magnitudes(values)
        updates.squared_distance(values, None)
        updates.squared_distance(values, values)
        updates.move_ahead(values, values.copy(), values.copy())
        updates.take_back(values, values.copy(), values.copy())
        lean.pack_signs(values, values.copy(), 0, signs_of)
        lean.move_by_signs(values, values.copy(), 0, signs_of, 1.0, signs_of[None], [1.0])
        lean.add_and_pack(values, signs_of[None], [1.0], signs_of.copy())
        lean.move_at(values, values.copy(), 0, found, found, taken)


if __name__ == "__main__":
    warm()

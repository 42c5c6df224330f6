"""Compile the kernels that training uses, once: `python -m hpctk.kernels.warm`.

The first rank that needs a kernel compiles it, for seconds, and leaves it in the cache. Where many ranks start at
once on few cores they would all do so; one process does it beforehand instead.
"""

from __future__ import annotations

import numpy as np

from hpctk.kernels import lean, merge, packing, select, updates


def warm() -> None:
    """Run every kernel of the host on a few elements."""
    for dtype in (np.float32, np.float64):
        values = np.linspace(-1, 1, 64).astype(dtype)
        found, taken = select.feed_top_k(values.copy(), values, 8)
        select.top_k(values.view(f"u{values.itemsize}"), 8)
        packed = packing.pack_indices(found, 64)
        packing.unpack_indices(packed, len(found), 64)
        merge.merge(found, taken, found, taken)
        merge.not_in(found, found)
        merge.scatter(values, found, taken)
        merge.scatter_add(values, found, taken)
        merge.take(values, found)
        signs = packing.pack_signs(values)
        packing.unpack_signs(signs, 64, 1.0, np.dtype(dtype))
        packing.add_signs(signs, 64, 1.0, values)
        updates.sum_of_magnitudes(values)
        updates.squared_distance(values, None)
        updates.squared_distance(values, values)
        updates.move_ahead(values, values.copy(), values.copy())
        updates.take_back(values, values.copy(), values.copy())
        lean.pack_signs(values, values.copy(), 0, signs)
        lean.move_by_signs(values, values.copy(), 0, signs, 1.0, signs[None], [1.0])
        lean.add_and_pack(values, signs[None], [1.0], signs.copy())
        lean.move_at(values, values.copy(), 0, found, found, taken)


if __name__ == "__main__":
    warm()

"""Compile the kernels that the quickstart's methods use, once: `python -m hpctk.kernels.warm`.

The first rank that needs a kernel compiles it, for a second or so, and leaves it in the cache. Where many ranks start
at once on few cores they would all do so; one process does it beforehand instead. Other kernels, and those for other
types, are left to the ranks that need them.
"""

from __future__ import annotations

import numpy as np

from hpctk.kernels import consensus, lean, magnitude, many, merge, packing, select, updates


def warm() -> None:
    """Run the kernels of plain averaging, of AdaCons and of the top-k methods on a few elements of float32."""
    values = np.linspace(-1, 1, 64).astype(np.float32)
    found, taken = np.empty(8, packing.index_dtype(64)), np.empty(8, np.float32)
    magnitude.pick_small(values, values, np.float32(1), select.INFINITY["f"], found, taken)
    select.add_and_clear(values.copy(), values, found)
    packing.unpack_indices(packing.pack_indices(found, 64), len(found), 64)
    merge.merge(found, taken, found, taken)
    merge.scatter_add(values, found, taken)
    lean.move_at(values, values.copy(), 0, found, found, taken)
    edges, where = np.array([0, 64]), np.array([values.ctypes.data])
    many.gather(where, edges, values.copy())
    many.scatter(values.copy(), where, edges)
    many.largest(where, edges, select.INFINITY["f"], values)
    first = np.zeros(1, np.int64)
    many.take_largest(first, where, edges, first, np.array([8]), first, found, taken)
    consensus.add_products(values.reshape(2, 32), 0, 32, np.zeros(2), np.zeros(2), values.copy(), 1)
    consensus.weighted_sum(values.reshape(2, 32), 0, 32, np.ones(2, np.float32), values.copy(), 1)
    updates.squared_distance(values, None)
    updates.squared_distance(values, values)
    updates.take_back(values, values.copy(), values.copy())


if __name__ == "__main__":
    warm()

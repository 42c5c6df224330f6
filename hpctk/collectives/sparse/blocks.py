"""Sparse vectors as the blocks of a plan: lists of indices and values, merged as they come in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hpctk.compressors.core import sparse
from hpctk.kernels.merge import merge
from hpctk.kernels.packing import index_dtype

Pairs = tuple[Any, Any]


class SparseBlocks:
    """Ranges of indices of one sparse vector; block b holds those from edges[b] up to edges[b + 1].

    `indices`, ascending, and `values`, of float32 or float64, are this rank's elements.
    """

    def __init__(self, edges: Sequence[int], indices: Any, values: Any) -> None:
        self._edges = list(edges)
        self._dtype = values.dtype.name
        cuts = np.searchsorted(indices, edges)
        # Counted from the range's start: small numbers need few bits.
        self._lists: list[Pairs | None] = [
            ((indices[lo:hi] - indices.dtype.type(start)).astype(index_dtype(stop - start)), values[lo:hi])
            for (lo, hi), (start, stop) in zip(pairwise(cuts), pairwise(edges), strict=True)
        ]
        self._bytes: list[Any] = [None] * len(self._lists)

    def outgoing(self, block: int) -> Any:
        """Return the block's wire form."""
        if self._bytes[block] is None:
            data = sparse.write(*self.pairs(block), self._length(block))
            self._bytes[block] = data
            # What was sent is what the sender goes on with: a list sent as a dense one is dense from now on.
            self._lists[block] = None
        return self._bytes[block]

    def combine(self, block: int, data: Any) -> None:
        """Add another rank's block to one's own."""
        indices, values = sparse.read(data, self._length(block), self._dtype)
        self.put(block, *merge(*self.pairs(block), indices, values))

    def store(self, block: int, data: Any) -> None:
        """Take over another rank's block; it is read when it is asked for."""
        self._bytes[block], self._lists[block] = data, None

    def put(self, block: int, indices: Any, values: Any) -> None:
        """Replace a block; indices are counted from its start."""
        self._bytes[block], self._lists[block] = None, (indices, values)

    def pairs(self, block: int) -> Pairs:
        """Return a block's indices, counted from its start, and values."""
        known = self._lists[block]
        if known is None:
            known = self._lists[block] = sparse.read(self._bytes[block], self._length(block), self._dtype)
        return known

    def result(self) -> Pairs:
        """Return the whole vector: ascending indices and their values."""
        # By way of the wire form: who got a list that was sent as a dense one has its zeros listed too.
        for block, known in enumerate(self._lists):
            if known is not None and sparse.turns_dense(len(known[0]), self._length(block), known[1].itemsize):
                self.outgoing(block)
        lists = [self.pairs(block) for block in range(len(self._lists))]
        indices = np.empty(sum(len(found) for found, _ in lists), index_dtype(self._edges[-1]))
        values = np.empty(len(indices), self._dtype)
        at = 0
        for start, (found, its_values) in zip(self._edges, lists, strict=False):
            indices[at : at + len(found)] = found
            indices[at : at + len(found)] += indices.dtype.type(start)
            values[at : at + len(found)] = its_values
            at += len(found)
        return indices, values

    def _length(self, block: int) -> int:
        return self._edges[block + 1] - self._edges[block]

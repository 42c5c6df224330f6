"""Torch tensors as rows of memory, many at a time: what `many.py` works on.

What is asked of every tensor is asked in bulk: with a hundred thousand of them each Python call counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hpctk.kernels import many
from hpctk.kernels.magnitude import INF_BITS

#: Longer tensors are worth a call of their own, and several threads.
SMALL = 1 << 14
#: By dtype: numpy's, and the magnitude at which it stops being finite.
_KINDS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (np.dtype(np.float32), np.uint32(INF_BITS["float32"])),
    torch.float64: (np.dtype(np.float64), np.uint64(INF_BITS["float64"])),
}


def are_rows(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all are rows of host memory, of one dtype, float32 or float64. True for none."""
    kinds = {(x.dtype, x.layout, x.is_cpu, x.is_contiguous(), x.is_neg()) for x in tensors}
    if not kinds:
        return True
    if len(kinds) > 1:
        return False
    dtype, layout, on_host, contiguous, negated = kinds.pop()
    return dtype in _KINDS and layout is torch.strided and on_host and contiguous and not negated


def sizes_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return how many elements each has, as an array."""
    return np.fromiter((x.numel() for x in tensors), np.int64, len(tensors))


def edges_of(sizes: Any) -> Any:
    """Return the bounds of arrays of these sizes that are laid one after the other."""
    edges = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=edges[1:])
    return edges


def addresses_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return where each begins. The tensors must live as long as that is used."""
    return np.fromiter((x.data_ptr() for x in tensors), np.int64, len(tensors))


def gather(tensors: Sequence[torch.Tensor], edges: Any, flat: Any) -> None:
    """Copy rows into a flat array, in place."""
    many.gather(addresses_of(tensors), edges, flat)


def scatter(flat: Any, tensors: Sequence[torch.Tensor], edges: Any) -> None:
    """Copy the parts of a flat array into rows, in place."""
    many.scatter(flat, addresses_of(tensors), edges)


def largest(tensors: Sequence[torch.Tensor], sizes: Any) -> tuple[int | None, float]:
    """Return the number of the first row with an inf or a NaN, None where none has, and the largest magnitude.

    The magnitude is that of all rows where none is bad.
    """
    kind, inf = _KINDS[tensors[0].dtype]
    bad, bits = many.largest(addresses_of(tensors), edges_of(sizes), inf, np.empty(0, kind))
    top = float(np.array([bits], f"u{kind.itemsize}").view(kind)[0])
    return (None if bad < 0 else bad), top


def first_bad_sum(
    residuals: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor], sizes: Any
) -> tuple[int, int] | None:
    """Return which row, and which element of it, is the first whose sum with its residual is inf or NaN."""
    kind, inf = _KINDS[tensors[0].dtype]
    kept = np.fromiter((0 if x is None else x.data_ptr() for x in residuals), np.int64, len(residuals))
    row, element = many.first_bad_sum(kept, addresses_of(tensors), edges_of(sizes), inf, np.empty(0, kind))
    return None if row < 0 else (row, element)

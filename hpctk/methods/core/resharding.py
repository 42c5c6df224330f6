"""What an earlier run with another number of ranks left behind, and what of it is conserved.

A residual is part of what the method applies: of a mean over ranks, or of a sum. Every rank of the new run gets the
same share, so that the mean, or the sum, over the ranks is what it was, to one rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch

K = TypeVar("K", bound=Hashable)


class SavedRanks(Protocol):
    """The local states that the ranks of an earlier run saved.

    Attributes
    ----------
    size : int
        How many ranks there were.
    """

    size: int

    def each(self, *path: str) -> Iterator[Any]:
        """Yield what every rank had under a key, in rank order; one at a time, they may be large."""

    def first(self, *path: str) -> Any:
        """Return what rank 0 had under a key; all of its state where none is given."""


def reshard(rows: Iterable[Mapping[K, torch.Tensor]], size: int) -> dict[K, torch.Tensor]:
    """Return the sum of the ranks' tensors over `size`; one that a rank lacks counts as zeros.

    `size` is the number of ranks that have saved, where the mean is to be kept; it is the number that go on where the
    sum is.
    """
    totals: dict[K, torch.Tensor] = {}
    dtypes: dict[K, torch.dtype] = {}
    for tensors in rows:
        for name, tensor in tensors.items():
            dtypes.setdefault(name, tensor.dtype)
            if name in totals:
                totals[name] += tensor
            else:
                totals[name] = tensor.to(torch.float64, copy=True)
    return {name: (total / size).to(dtypes[name]) for name, total in totals.items()}

"""What an earlier run with another number of ranks left behind, and what of it is conserved.

A residual is part of what the method applies: of a mean over ranks, or of a sum. Every rank of the new run gets the
same share, so that the mean, or the sum, over the ranks is what it was, to one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

Tensors = dict[str, torch.Tensor]


class Earlier(Protocol):
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


def mean_tensors(earlier: Earlier, *path: str) -> Tensors:
    """Return the mean over the earlier ranks of tensors by name; one that a rank lacks counts as zeros."""
    return _shares(earlier, path, earlier.size)


def share_tensors(earlier: Earlier, size: int, *path: str) -> Tensors:
    """Return an equal share for each of `size` ranks of the sum over the earlier ranks of tensors by name."""
    return _shares(earlier, path, size)


def _shares(earlier: Earlier, path: tuple[str, ...], divisor: int) -> Tensors:
    totals: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    for tensors in earlier.each(*path):
        for name, tensor in tensors.items():
            dtypes.setdefault(name, tensor.dtype)
            if name in totals:
                totals[name] += tensor
            else:
                totals[name] = tensor.double()
    return {name: (total / divisor).to(dtypes[name]) for name, total in totals.items()}

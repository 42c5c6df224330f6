"""What update methods work with: tensors of the whole model in one piece of memory, their differences and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from hpctk.comm import buffers
from hpctk.kernels import updates


class FlatBuffer:
    """Tensors of the parameters' shapes, one after the other in one piece of memory; zeros at first.

    Kept from step to step: in a large model, new memory costs more than the arithmetic on it.

    Attributes
    ----------
    flat : torch.Tensor
        All elements.
    parts : list of torch.Tensor
        Views of `flat`, one for each parameter; contiguous.
    edges : list of int
        Where each begins, and the end of the last.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.edges = edges = [0, *accumulate(tensor.numel() for tensor in like)]
        self.flat = like[0].new_zeros(edges[-1]) if like else torch.zeros(0)
        self.parts = [
            self.flat[lo:hi].view(tensor.shape) for (lo, hi), tensor in zip(pairwise(edges), like, strict=True)
        ]


def difference(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], out: FlatBuffer) -> None:
    """Write before - after into a row, in one pass and without new memory."""
    for a, b, part in zip(before, after, out.parts, strict=True):
        torch.sub(a, b, out=part)


def take_back(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], out: FlatBuffer) -> None:
    """Write before - after into a row, and before into after, in one pass: a step is undone, and known."""
    for a, b, part in zip(before, after, out.parts, strict=True):
        if b.is_cpu and a.is_contiguous() and b.is_contiguous():
            updates.take_back(*(tensor.view(-1).numpy() for tensor in (a, b, part)))
        else:
            torch.sub(a, b, out=part)
            b.copy_(a)


def squared_distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return ||a - b||^2, summed in float64; None stands for zeros. Not in place."""
    if a is None:
        a, b = b, None
    if a is None:
        return 0.0
    if buffers.on_device(a) or (b is not None and b.stride() != a.stride()):
        return float((a if b is None else a - b).double().square().sum())
    rows = [_in_memory_order(one) for one in (a, b) if one is not None]
    return updates.squared_distance(rows[0], rows[1] if b is not None else None)


def _in_memory_order(tensor: torch.Tensor) -> Any:
    """Return a host tensor's elements as they lie in memory: a view, unless there are gaps between them."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).numpy()

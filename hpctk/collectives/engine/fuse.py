"""Several tensors as one message, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctk.comm import buffers
from hpctk.errors import TensorError


def describe(tensors: Sequence[Any]) -> list[tuple[str, object]]:
    """Return what all ranks must agree on before the tensors travel as one."""
    items: list[tuple[str, object]] = [("number of tensors", len(tensors))]
    for position, tensor in enumerate(tensors):
        items += [(f"{key} of tensor {position}", value) for key, value in buffers.describe(tensor)]
    return items


def fuse(tensors: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return torch tensors of one float dtype as one flat copy, with the bounds between them."""
    import torch

    kinds = {str(getattr(tensor, "dtype", type(tensor).__name__)) for tensor in tensors}
    if kinds - {"torch.float32", "torch.float64"} or len(kinds) != 1:
        raise TensorError(f"need torch tensors of one dtype, float32 or float64, not {', '.join(sorted(kinds))}")
    flat = torch.cat([buffers.flatten(tensor) for tensor in tensors])
    edges = [0]
    for tensor in tensors:
        edges.append(edges[-1] + tensor.numel())
    return flat, edges


def unfuse(flat: Any, edges: Sequence[int], like: Sequence[Any]) -> list[Any]:
    """Return the parts of a flat tensor in the shapes of the tensors it was fused from; views of it."""
    return [flat[lo:hi].view(tensor.shape) for lo, hi, tensor in zip(edges[:-1], edges[1:], like, strict=True)]

"""2-norms of gradients, accumulated in float64: a float32 sum of squares overflows at a norm of 1.8e19."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpctk.comm import buffers
from hpctk.kernels.updates import squared_distance


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the 2-norm of each tensor."""
    return [_norm(tensor.detach()) for tensor in tensors]


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all tensors as one vector."""
    return math.hypot(*norms(tensors))


def _norm(tensor: torch.Tensor) -> float:
    if buffers.on_device(tensor) or tensor.dtype not in (torch.float32, torch.float64):
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    # One pass: torch would write a float64 copy of the tensor first.
    return math.sqrt(squared_distance(tensor.reshape(-1).numpy(), None))

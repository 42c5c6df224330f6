"""2-norms of gradients, accumulated in float64: a float32 sum of squares overflows at a norm of 1.8e19."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the 2-norm of each tensor."""
    if not tensors:
        return []
    return [float(norm) for norm in torch._foreach_norm(list(tensors), 2, dtype=torch.float64)]


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all tensors as one vector."""
    return math.hypot(*norms(tensors))

"""The arithmetic of low-rank factors: an orthonormal basis, and where the next power iteration starts."""

from __future__ import annotations

import math

import torch

from hpctk.compressors.core import finite


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis that spans at least the columns; of any kind where those are zero."""
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis


def fits(matrix: torch.Tensor, basis: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether basis * q^T, and what it leaves of the matrix, are finite numbers of a dtype."""
    # A projection lengthens no column, so no element grows by more than the root of their number.
    peak = max(abs(extreme.item()) for extreme in torch.aminmax(matrix))
    if peak * (1 + math.sqrt(len(matrix))) <= torch.finfo(dtype).max:
        return True
    part = basis @ q.T
    return finite.all_finite(part.to(dtype)) and finite.all_finite((matrix - part).to(dtype))


def next_start(q: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return Q for the next step: its columns scaled to a largest magnitude of 1.

    A column of zeros, as a gradient of zeros makes it, would never find a direction again: the one
    before stays.
    """
    peaks = q.abs().amax(0)
    return torch.where(peaks > 0, q / torch.where(peaks > 0, peaks, 1), before)

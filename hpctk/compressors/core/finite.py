"""Which element of a tensor is NaN or infinite, asked before anything is sent or changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

#: Elements looked at together: few enough for a core's cache; a device wants them in bulk.
HOST_BLOCK, DEVICE_BLOCK = 1 << 16, 1 << 24


def first_bad(flat: torch.Tensor) -> int | None:
    """Return the index of the first element that is not finite, None where all are.

    Not in place; no copy of the tensor is made.
    """
    if all_finite(flat):
        return None
    return next(lo + _offset(flat[lo:hi]) for lo, hi in blocks(flat) if not all_finite(flat[lo:hi]))


def first_bad_sum(flat: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the index of the first element of `flat + other` that is not finite, None where all are.

    Not in place; the sum is formed block by block and not kept.
    """
    if _for_kernels(flat):
        index = _first_not_finite(flat.numpy(), other.numpy())
        return None if index < 0 else index
    scratch = flat.new_empty(min(flat.numel(), _block(flat)))
    for lo, hi in blocks(flat):
        total = torch.add(flat[lo:hi], other[lo:hi], out=scratch[: hi - lo])
        if not all_finite(total):
            return lo + _offset(total)
    return None


def all_finite(flat: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, in one pass without temporaries."""
    if not flat.numel():
        return True
    if _for_kernels(flat):
        return _first_not_finite(flat.detach().view(-1).numpy(), None) < 0
    # The extremes of a tensor with a NaN are NaN.
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(flat))


def _for_kernels(flat: torch.Tensor) -> bool:
    return flat.is_cpu and flat.dtype in (torch.float32, torch.float64) and flat.is_contiguous() and not flat.is_neg()


def _first_not_finite(a: Any, b: Any) -> int:
    from hpctk.kernels import magnitude, select

    if len(a) < select.WORTH_A_SAMPLE:
        # Without looking for threads, which take longer than this.
        return magnitude.first_not_finite(a, b, a.dtype.type(1), select.INFINITY[a.dtype.char])
    return select.first_not_finite(a, b)


def blocks(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) that cover a flat tensor in blocks."""
    step = _block(flat)
    for lo in range(0, flat.numel(), step):
        yield lo, min(lo + step, flat.numel())


def _block(flat: torch.Tensor) -> int:
    return HOST_BLOCK if flat.device.type == "cpu" else DEVICE_BLOCK


def _offset(block: torch.Tensor) -> int:
    return int((~block.isfinite()).nonzero()[0])

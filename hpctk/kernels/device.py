"""The kernels as torch operations, for flat tensors that live on a GPU: the same results bit for bit.

Each function is named after the compiled one that does this on the host, and takes and returns
tensors of its arguments' device. None of them copies a tensor to the host; the checks read single
numbers, which waits for the device.
"""

from __future__ import annotations

import torch

from hpctk.kernels.merge import same_length
from hpctk.kernels.packing import check_packed

_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def top_k(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ascending indices of the k largest magnitudes, lowest index first among equals."""
    n = values.numel()
    if k < 0:
        raise ValueError(f"k={k}: at least 0")
    dtype = torch.int32 if n <= 2**31 else torch.int64
    if k >= n or k == 0:
        return torch.arange(min(k, n), dtype=dtype, device=values.device)
    magnitude = _magnitude(values)
    # torch.topk's indices break ties as they come; its smallest value is exact.
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    above = magnitude > threshold
    ties = torch.nonzero(magnitude == threshold).flatten()
    above[ties[: k - int(above.sum())]] = True
    return torch.nonzero(above).flatten().to(dtype)


def pick_chunks(values: torch.Tensor, k: int, chunk: int) -> torch.Tensor:
    """Return the ascending indices of the largest magnitudes of every chunk: k of a whole one, in proportion else."""
    n = values.numel()
    whole = n // chunk * chunk
    found = [torch.nonzero(_largest_of_rows(_magnitude(values[:whole].view(-1, chunk)), k).view(-1)).view(-1)]
    if whole < n:
        found.append(top_k(values[whole:], max(1, k * (n - whole) // chunk)) + whole)
    return torch.cat(found).to(torch.int32 if n <= 2**31 else torch.int64)


def _largest_of_rows(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    threshold = torch.topk(magnitude, k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, ties = magnitude > threshold, magnitude == threshold
    return above | (ties & (ties.cumsum(1) <= k - above.sum(1, keepdim=True)))


def scatter_add(dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Add values at indices, in place. Out of bounds: nothing is written."""
    same_length(indices, values)
    outside = torch.nonzero((indices < 0) | (indices >= len(dense)))
    if len(outside):
        raise IndexError(f"index {int(indices[outside[0]])} is outside an array of length {len(dense)}")
    dense.index_add_(0, indices, values)


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Return one bit per element, 8 to a byte: 1 where it is below zero."""
    bits = torch.nn.functional.pad((values < 0).to(torch.uint8), (0, -len(values) % 8)).view(-1, 8)
    return (bits << _shifts(values)).sum(1, dtype=torch.uint8)


def unpack_signs(data: torch.Tensor, n: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return n values, -scale where the bit is 1 and +scale where it is 0, as a new tensor."""
    check_packed(data, 1, n)
    signed = torch.tensor([scale, -scale], dtype=dtype, device=data.device)
    bits = data[:, None] >> _shifts(data) & 1
    return signed[bits.flatten()[:n].to(torch.int32)]


def add_signs(data: torch.Tensor, n: int, scale: float, out: torch.Tensor) -> None:
    """Add what `unpack_signs` would return to `out`, in place."""
    if out.numel() != n:
        raise ValueError(f"{n} signs cannot be added to {out.numel()} elements")
    out += unpack_signs(data, n, scale, out.dtype)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    signed = _SIGNED[values.element_size()]
    return values.view(signed) & torch.iinfo(signed).max

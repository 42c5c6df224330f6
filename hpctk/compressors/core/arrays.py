"""Flat tensors as the compiled kernels see them: numpy arrays over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

#: The tensors that can be compressed.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32 for half precision, else the tensor's own."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_array(flat: torch.Tensor) -> Any:
    """Return a flat host tensor as an array over its memory; bfloat16, which numpy lacks, as its bits."""
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.uint16).numpy()
    return flat.numpy()


def new_flat(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new flat tensor on the host, not filled.

    From numpy, which asks the system for large pages: filling memory for the first time takes half as long.
    """
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.empty(n, np.uint16)).view(dtype)
    return torch.from_numpy(np.empty(n, dtype_name(dtype)))


def unsigned(values: Any) -> Any:
    """Return an array's bits as unsigned integers over the same memory."""
    return values.view(f"u{values.itemsize}")

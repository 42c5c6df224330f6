"""Memory for gradients that leave in buckets, kept from step to step: new pages take longer than filling them does."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch


class BucketMemory:
    """What lies in it stays until the same is asked for again: in the next step, when the bucket is long home."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, torch.Tensor] = {}
        self._bytes: dict[Hashable, Any] = {}

    def joined(self, key: Hashable, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return tensors of one dtype laid one after the other, flat."""
        rows = [tensor.detach().reshape(-1) for tensor in tensors]
        n, like, kept = sum(map(len, rows)), rows[0], self._tensors.get(key)
        if kept is None or len(kept) != n or kept.dtype != like.dtype or kept.device != like.device:
            kept = self._tensors[key] = like.new_empty(n)
        return torch.cat(rows, out=kept)

    def room(self, key: Hashable, nbytes: int) -> Any:
        """Return a uint8 array of any content."""
        kept = self._bytes.get(key)
        if kept is None or len(kept) != nbytes:
            kept = self._bytes[key] = np.empty(nbytes, np.uint8)
        return kept

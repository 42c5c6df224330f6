"""What a compressor makes of a tensor: the bytes that travel, and what the receiver knows without them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Packet:
    """A compressed tensor.

    Attributes
    ----------
    data : torch.Tensor
        Exactly what goes on the wire: 1-D, contiguous; bytes (uint8) where values are packed, else values.
    shape, dtype
        Of the decoded tensor. They do not travel: all ranks know them from the handshake.
    stamp : int
        Which draw of a generator the packet belongs to, 0 where nothing is drawn. Does not travel:
        ranks that draw the same count the same.
    """

    data: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: int = 0

    @property
    def n(self) -> int:
        """Number of elements of the decoded tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.data.numel() * self.data.element_size()

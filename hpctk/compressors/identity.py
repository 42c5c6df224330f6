"""No compression: the values as they are.

What travels: n values in the tensor's dtype. Nothing is left for the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctk.compressors.core.compressor import Compressor, Shape, expect_length
from hpctk.compressors.core.packet import Packet
from hpctk.settings import documented


@documented
@dataclass(eq=False, repr=False)
class Identity(Compressor):
    """Send the values as they are."""

    combines = "summed"
    shrinks = True
    lossless = True

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        # A copy: whoever sums packets in place must not sum into the gradient.
        return flat.clone()

    def _decode(self, packet: Packet) -> torch.Tensor:
        expect_length(packet, packet.n, packet.dtype, "a tensor")
        return packet.data.clone()

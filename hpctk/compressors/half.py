"""Half precision on the wire; sums are formed in float32 by those who sum.

float16 as in Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv 1710.03740; bfloat16
as in Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", arXiv 1905.12322.

    C(z) = round to nearest even(min(max(z, -limit), limit))

What travels: n values of 16 bits. The limit is the largest number of the wire's dtype: a finite value
beyond it would become infinite, so it is sent as the limit and the rest stays in the residual, if one
is kept. Below 3e-8 float16 rounds to zero; that, too, stays in the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, finite
from hpctk.compressors.core.compressor import Compressor, Shape, checked_pair, expect_length, is_plain, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.settings import documented, setting

WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

#: The largest number that float16 and bfloat16 both have: float16's range, bfloat16's 8 significant bits.
COMMON_LIMIT = 65280.0


@documented
@dataclass(eq=False, repr=False)
class Half(Compressor):
    """Send 16 bits per element."""

    combines = "summed"
    shrinks = True

    dtype: str = setting(
        "float16",
        "float16: 11 significant bits, saturates at 65504; bfloat16: 8 bits, the range of float32",
        choices=tuple(WIRES),
    )

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, compress the sum, leave in residual what the packet does not carry.

        See `Compressor.feed`. On the host: one pass that looks for what is not finite, one that does the rest.
        """
        if not (is_plain(tensor) and is_plain(residual)):
            return super().feed(tensor, residual, name)
        from hpctk.kernels import halves

        flat, memory = checked_pair(tensor, residual, name)
        refuse(finite.first_bad_sum(memory, flat), flat.numel(), name)
        data = halves.feed(memory.numpy(), flat.numpy(), self.dtype, self._limit(flat.dtype))
        return Packet(torch.from_numpy(data).view(WIRES[self.dtype]), tuple(tensor.shape), tensor.dtype)

    def _limit(self, dtype: torch.dtype) -> float:
        return COMMON_LIMIT if dtype.itemsize == 2 else torch.finfo(WIRES[self.dtype]).max

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        wire, limit = WIRES[self.dtype], self._limit(flat.dtype)
        if wire == flat.dtype:
            return flat.clone()
        if is_plain(flat):
            from hpctk.kernels import halves

            return torch.from_numpy(halves.write(flat.numpy(), self.dtype, limit)).view(wire)
        return flat.clamp(-limit, limit).to(wire)

    def _decode(self, packet: Packet) -> torch.Tensor:
        expect_length(packet, packet.n, WIRES[self.dtype], "half precision")
        if buffers.on_device(packet.data) or packet.dtype.itemsize == 2:
            return packet.data.to(packet.dtype, copy=True)
        from hpctk.kernels import halves

        out = arrays.new_flat(packet.n, packet.dtype)
        halves.read(packet.data.view(torch.uint16).numpy(), self.dtype, out.numpy())
        return out

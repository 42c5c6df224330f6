"""Sign: one bit per element, and one magnitude for all of them.

Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019, arXiv 1901.09847; before them Seide et al., "1-bit stochastic gradient descent",
Interspeech 2014.

    C(z) = sign(z) * ||z||_1 / d;    sign(0) = +1

What travels: the scale ||z||_1 / d (in the tensor's dtype; float32 for half precision), then d bits,
packed, 1 for minus. The 1-norm is summed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, finite
from hpctk.compressors.core.compressor import Compressor, Shape, checked_pair, expect_length, is_plain
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError
from hpctk.kernels.in_order import add_in_order
from hpctk.settings import documented


@documented
@dataclass(eq=False, repr=False)
class Sign(Compressor):
    """Send the signs and the mean magnitude."""

    combines = "signs"
    shrinks = True

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, compress the sum, leave in residual what the packet does not carry.

        See `Compressor.feed`. On the host: one pass for the norm, which is not finite where an element is not, and
        one that writes the signs and leaves the rest.
        """
        if not (is_plain(tensor) and is_plain(residual) and tensor.numel()):
            return super().feed(tensor, residual, name)
        from hpctk.kernels import signs

        flat, memory = checked_pair(tensor, residual, name)
        total, given = memory.numpy(), flat.numpy()
        norm = signs.sum_of_magnitudes(total, given)
        if not math.isfinite(norm):
            return super().feed(tensor, residual, name)
        data, scale = _new_data(flat, norm / len(given))
        signs.take_signs(total, given, scale, data[flat.element_size() :].numpy())
        return Packet(data, tuple(tensor.shape), tensor.dtype)

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        return write(flat, mean_magnitude(flat))

    def _decode(self, packet: Packet) -> torch.Tensor:
        scale, signs = read(packet)
        if scale and not buffers.on_device(signs) and packet.dtype.itemsize > 2:
            from hpctk.kernels import packing

            return torch.from_numpy(
                packing.unpack_signs(signs.numpy(), packet.n, scale, arrays.dtype_name(packet.dtype))
            )
        out = torch.zeros(packet.n, dtype=packet.dtype, device=packet.data.device)
        add(signs, scale, out)
        return out

    def _withdraw(self, memory: torch.Tensor, packet: Packet) -> None:
        scale, signs = read(packet)
        add(signs, -scale, memory)


def one_norm(flat: torch.Tensor) -> float:
    """Return ||z||_1 of a flat tensor, summed in float64 block by block. Not in place."""
    if not buffers.on_device(flat) and flat.dtype in (torch.float32, torch.float64):
        from hpctk.kernels.updates import sum_of_magnitudes

        # Not by many small torch operations: on busy cores each would wait for all its threads.
        return sum_of_magnitudes(flat.numpy())
    return add_in_order(flat[lo:hi].abs().sum(dtype=torch.float64).item() for lo, hi in finite.blocks(flat))


def mean_magnitude(flat: torch.Tensor) -> float:
    """Return ||z||_1 / d of a flat tensor, 0 of an empty one. Not in place."""
    n = flat.numel()
    if not n:
        return 0.0
    norm = one_norm(flat)
    if math.isfinite(norm):
        return norm / n
    # A mean is no larger than the largest: divide before summing.
    mean = add_in_order((flat[lo:hi].abs() / n).sum().item() for lo, hi in finite.blocks(flat))
    return min(mean, torch.finfo(flat.dtype).max)


def write(flat: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the data of a packet: the scale, and the signs of a flat tensor. Not in place."""
    from hpctk.kernels import packing

    if buffers.on_device(flat):
        from hpctk.kernels import device

        return torch.cat([_head(flat, scale).to(flat.device), device.pack_signs(flat)])

    data, _ = _new_data(flat, scale)
    signs = data[len(data) - packing.packed_length(flat.numel(), 1) :].numpy()
    if flat.element_size() > 2:
        signs[:] = packing.pack_signs(flat.numpy())
    else:
        for lo, hi in finite.blocks(flat):
            signs[lo // 8 : (hi + 7) // 8] = packing.pack_signs(flat[lo:hi].float().numpy())
    return data


def _head(flat: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.tensor([scale], dtype=arrays.working_dtype(flat.dtype)).view(torch.uint8)


def _new_data(flat: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return the data of a packet with the scale written and the signs not yet, and the scale as it was written."""
    head = _head(flat, scale)
    data = torch.empty(len(head) + (flat.numel() + 7) // 8, dtype=torch.uint8)
    data[: len(head)] = head
    return data, head.view(arrays.working_dtype(flat.dtype)).item()


def read(packet: Packet) -> tuple[float, torch.Tensor]:
    """Return the scale and the packed signs, a view, of a packet; HpctkError for wrong data."""
    wide = arrays.working_dtype(packet.dtype)
    length = wide.itemsize + (packet.n + 7) // 8
    expect_length(packet, length, torch.uint8, "one bit each")
    # A copy: bytes that come from a larger buffer may start at any address.
    scale = packet.data[: wide.itemsize].clone().view(wide).item()
    if not 0 <= scale <= torch.finfo(packet.dtype).max:
        raise HpctkError(f"a sign packet with the scale {scale}: it must be finite and not negative")
    signs = packet.data[wide.itemsize :]
    used = packet.n % 8
    if used and int(signs[-1]) >> used:
        raise HpctkError(f"a sign packet with bits set after the last of {packet.n}")
    return scale, signs


def add(signs: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Add +scale or -scale, by the packed signs, to a flat tensor in place."""
    from hpctk.kernels import packing

    n = out.numel()
    if buffers.on_device(out):
        from hpctk.kernels import device

        device.add_signs(signs, n, scale, out)
        return

    packed = signs.numpy()
    if out.element_size() > 2:
        packing.add_signs(packed, n, scale, out.numpy())
        return
    for lo, hi in finite.blocks(out):
        values = packing.unpack_signs(packed[lo // 8 : (hi + 7) // 8], hi - lo, scale, "float32")
        out[lo:hi] += torch.from_numpy(values).to(out.dtype)

"""Chunked top-k: the largest elements of every chunk of a tensor, on a few bits each.

Sarfi, Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706.
A tensor lies in chunks of consecutive elements, the last one shorter; a chunk of m elements keeps
max(1, floor(k * m / chunk)) of largest magnitude, of equal ones the lowest indices. Over all n kept values v:

    sigma    mu = mean v;  s^2 = sum (v - mu)^2 / (n - 1);  w = 6 s / 2^bits, 1 where that is 0
             code = clip(rint((v - mu) / w + 2^bits / 2), 0, 2^bits - 1)
    signed   by sign, then bits - 1 times every cell is cut at its mean magnitude
    C(z)_i = the mean of the v that have the code of z_i, in the tensor's dtype;  0 where nothing was kept

What travels: 2^bits means, then the indices, then `bits` bits for each; without `bits` the values, then the indices.
Indices in the shorter of two forms, both of a length that n alone decides: ceil(log2 chunk) bits each, within their
chunk, or Elias-Fano over the whole tensor. At the defaults 80 bytes for 4096 float32, and the means.

Outliers widen the cells of "sigma" until the middle one holds both signs and stands for about nothing. What that loses
stays in the residual; "signed" loses less. A tensor of 64 elements keeps 1: spare small ones by `min_elements`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays
from hpctk.compressors.core.compressor import Compressor, Shape, checked_pair, expect_length, is_plain, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError, SettingError
from hpctk.settings import documented, setting


@documented
@dataclass(eq=False, repr=False)
class ChunkTopK(Compressor):
    """Send the elements of largest magnitude of every chunk, on a few bits each."""

    combines = "lists"
    #: Values whose cell stands for 0 are kept back whole, as may happen with "sigma".
    contracts = False

    k: int = setting(64, "elements of a chunk that are sent", at_least=1)
    chunk: int = setting(4096, "consecutive elements of which the largest are sent", at_least=1)
    bits: int | None = setting(2, "of each value that is sent; its own without", at_least=1, at_most=8)
    codebook: str = setting("sigma", "how values are cut into cells", choices=("sigma", "signed"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.chunk:
            raise SettingError(f"k={self.k}: need at most chunk={self.chunk}")

    def kept(self, n: int) -> int:
        """Return how many of n elements are sent."""
        from hpctk.kernels.select import kept_of_chunks

        return kept_of_chunks(n, self.k, self.chunk)

    def wire_bytes(self, n: int, itemsize: int) -> int:
        """Return how many bytes a packet of n elements takes."""
        head, indices, codes = self._sizes(n, itemsize)
        return head + indices + codes

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, compress the sum, leave in residual what the packet does not carry.

        See `Compressor.feed`. On the host: one pass that looks, and one that writes.
        """
        if not (is_plain(tensor) and is_plain(residual)):
            return super().feed(tensor, residual, name)
        from hpctk.kernels import select

        flat, memory = checked_pair(tensor, residual, name)
        given, kept = flat.numpy(), memory.numpy()
        try:
            indices, values = select.pick_chunks(kept, given, self.k, self.chunk)
        except select.NotFinite as error:
            refuse(error.index, len(given), name)
            raise
        data, left = self._written(indices, torch.from_numpy(values), len(given))
        select.add_and_clear(kept, given, indices, left)
        return Packet(data, tuple(tensor.shape), tensor.dtype)

    def pairs(self, packet: Packet) -> tuple[Any, torch.Tensor]:
        """Return indices, ascending, and values of the elements that a packet carries, on the host."""
        from hpctk.kernels import packing

        n, dtype = packet.n, packet.dtype
        head, middle, _ = self._sizes(n, dtype.itemsize)
        expect_length(packet, self.wire_bytes(n, dtype.itemsize), torch.uint8, repr(self))
        data, count = packet.data.cpu().numpy(), self.kept(n)
        # A copy: bytes that come from a larger buffer may start at any address.
        values = torch.empty(head // dtype.itemsize, dtype=dtype)
        arrays.as_array(values).view(np.uint8)[:] = data[:head]
        if not values.isfinite().all():
            raise HpctkError(f"a packet of {self!r} with a value that is not finite")
        try:
            indices = self._read_indices(data[head : head + middle], count, n)
            if self.bits is not None:
                codes = np.empty(count, np.uint8)
                packing.unpack(data[head + middle :], self.bits, codes)
                values = values[torch.from_numpy(codes).int()]
        except ValueError as error:
            raise HpctkError(f"a packet of {self!r} with wrong codes: {error}") from None
        return indices, values

    def places(self, packet: Packet) -> Any:
        """Return the indices of the elements that a packet carries."""
        return self.pairs(packet)[0]

    def add_to(self, flat: torch.Tensor, packet: Packet) -> None:
        """Add what a packet stands for to a flat tensor, in place: at the elements that were sent."""
        self._add(flat, packet, 1)

    def _add(self, flat: torch.Tensor, packet: Packet, weight: int) -> None:
        indices, values = self.pairs(packet)
        flat[torch.from_numpy(indices).to(flat.device)] += weight * values.to(flat.device)

    def _withdraw(self, memory: torch.Tensor, packet: Packet) -> None:
        self._add(memory, packet, -1)

    def _decode(self, packet: Packet) -> torch.Tensor:
        out = torch.zeros(packet.n, dtype=packet.dtype, device=packet.data.device)
        self._add(out, packet, 1)
        return out

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        from hpctk.kernels import device, select

        if buffers.on_device(flat):
            chosen = device.pick_chunks(flat, self.k, self.chunk)
            indices, values = chosen.cpu().numpy(), flat[chosen].cpu()
        else:
            # Half precision has the same order in float32.
            indices, _ = select.pick_chunks(_wide(flat), None, self.k, self.chunk)
            values = flat[torch.from_numpy(indices)]
        return self._written(indices, values, flat.numel())[0].to(flat.device)

    def _written(self, indices: Any, values: torch.Tensor, n: int) -> tuple[torch.Tensor, Any]:
        """Return the data of a packet of n elements, and what it lacks of the values, None where that is nothing.

        In numpy, not in torch: the threads of torch and those of the kernels would wait for each other.
        """
        from hpctk.kernels import cells, packing

        head, middle, _ = self._sizes(n, values.element_size())
        data = np.empty(self.wire_bytes(n, values.element_size()), np.uint8)
        book, left = values, None
        if self.bits is not None:
            wide = _wide(values)
            codes, means = cells.cut(wide, self.bits, self.codebook)
            book = torch.from_numpy(means).to(values.dtype)
            with np.errstate(over="ignore"):
                left = wide - _wide(book).take(codes)
            if len(left) and not max(left.max(), -left.min()) <= torch.finfo(values.dtype).max:
                # What is left would overflow: all of it stays where it is.
                book, left = torch.zeros_like(book), wide
            data[head + middle :] = packing.pack(codes, self.bits)
        data[:head] = arrays.as_array(book).view(np.uint8)
        width, within = self._index_form(n)
        packed = packing.pack(indices % self.chunk, width) if within else packing.pack_indices(indices, n)
        data[head : head + middle] = packed
        return torch.from_numpy(data), left

    def _read_indices(self, data: Any, count: int, n: int) -> Any:
        from hpctk.kernels import packing

        width, within = self._index_form(n)
        if not within:
            return packing.unpack_indices(data, count, n)
        indices = np.empty(count, np.int64)
        packing.unpack(data, width, indices)
        indices += np.arange(count) // self.k * self.chunk
        if count and (indices[-1] >= n or (indices[1:] <= indices[:-1]).any()):
            raise ValueError(f"these bytes are not {count} ascending indices below {n}")
        return indices

    def _index_form(self, n: int) -> tuple[int, bool]:
        """Return the bits of an index within its chunk, and whether indices are written so."""
        from hpctk.kernels import packing

        count, width = self.kept(n), max(0, min(self.chunk, n) - 1).bit_length()
        return width, packing.packed_length(count, width) < packing.packed_bytes(count, n)

    def _sizes(self, n: int, itemsize: int) -> tuple[int, int, int]:
        """Return how many bytes the means, or the values, take, then the indices, then the codes."""
        from hpctk.kernels import packing

        count, (width, within) = self.kept(n), self._index_form(n)
        indices = packing.packed_length(count, width) if within else packing.packed_bytes(count, n)
        if self.bits is None:
            return count * itemsize, indices, 0
        return itemsize << self.bits, indices, packing.packed_length(count, self.bits)


def _wide(flat: torch.Tensor) -> Any:
    return flat.to(arrays.working_dtype(flat.dtype)).numpy()

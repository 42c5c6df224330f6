"""QSGD: every element rounded at random to one of a few levels of its bucket's norm.

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization
and Encoding", NeurIPS 2017, arXiv 1610.02132. In a bucket of consecutive elements, with s levels:

    Q(z_i) = ||z||_2 * sign(z_i) * l_i / s
    l_i = floor(a_i) or floor(a_i) + 1, the latter with probability a_i - floor(a_i);  a_i = s |z_i| / ||z||_2

so that the mean of Q(z) is z. What travels: one norm per bucket (float32; float64 for float64 tensors),
then one sign bit and bits - 1 level bits for each element, packed; s = 2**(bits-1) - 1.

With error feedback mind the variance: it is bounded by min(bucket/s^2, sqrt(bucket)/s) * ||z||^2, and
beyond 1 residuals may grow instead of staying small. Take more bits or smaller buckets there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, draws
from hpctk.compressors.core.compressor import Compressor, Shape, State, checked_pair, expect_length, is_plain, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError
from hpctk.kernels.in_order import add_pairwise
from hpctk.settings import documented, setting

#: Elements quantised together, at least one bucket: few enough for a core's cache. Each such block draws anew.
BLOCK = 1 << 16


@documented
@dataclass(eq=False, repr=False)
class QSGD(Compressor):
    """Send a norm per bucket and a few bits per element, rounded at random.

    Ranks draw independently once `set_rank` has told them apart. Tensors on a device are quantised on the
    host, where the random numbers are.
    """

    combines = "gathered"
    contracts = False

    bits: int = setting(4, "per element, with its sign", at_least=2, at_most=8)
    bucket: int = setting(512, "elements that share a norm", at_least=1)
    seed: int = setting(0, "of the rounding", at_least=0, at_most=draws.MAX_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._levels = 2 ** (self.bits - 1) - 1
        self._draws = draws.Counters()

    def state_dict(self) -> State:
        """Return how often each parameter was compressed."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor | int]]) -> None:
        """Go on from the given numbers of draws."""
        self._draws.load_state_dict(state)

    def _stamp(self, name: str) -> int:
        return self._draws.next_stamp(name)

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, compress the sum, leave in residual what the packet does not carry.

        See `Compressor.feed`. On the host: one pass for the norms, which finds what is not finite, one that does the
        rest.
        """
        if not (is_plain(tensor) and is_plain(residual)):
            return super().feed(tensor, residual, name)
        stamp = self._stamp(name)
        flat, memory = checked_pair(tensor, residual, name)
        return Packet(self._quantised(memory, flat, name, stamp), tuple(tensor.shape), tensor.dtype, stamp)

    def compress(self, tensor: torch.Tensor, name: str = "") -> Packet:
        """Return the tensor as a packet; see `Compressor.compress`. On the host in two passes, as `feed`."""
        if not is_plain(tensor):
            return super().compress(tensor, name)
        stamp = self._stamp(name)
        flat = tensor.detach().view(-1)
        return Packet(self._quantised(flat, None, name, stamp), tuple(tensor.shape), tensor.dtype, stamp)

    def _quantised(self, flat: torch.Tensor, gradient: torch.Tensor | None, name: str, stamp: int) -> torch.Tensor:
        """Return the data for a flat host tensor of float32 or float64, or its sum with the gradient, by a kernel.

        With a gradient the tensor becomes what the data do not carry of the sum, in place.
        """
        from hpctk.kernels import levels
        from hpctk.kernels.select import NotFinite

        key, counter = draws.key_and_counter(self.seed, stamp, self._seat)
        limit, given = torch.finfo(flat.dtype).max, None if gradient is None else gradient.numpy()
        sizes = self.bits, self.bucket, self._block_buckets() * self.bucket
        try:
            return torch.from_numpy(levels.write(flat.numpy(), given, *sizes, limit, key, counter))
        except NotFinite as error:
            refuse(error.index, flat.numel(), name)
            raise

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        from hpctk.kernels import packing

        if is_plain(flat):
            return self._quantised(flat, None, name, stamp)
        host = flat.cpu()
        n = host.numel()
        wide = arrays.working_dtype(flat.dtype)
        norms = np.empty(self._buckets(n), str(wide).removeprefix("torch."))
        codes = np.empty(n, np.uint8)
        stream = draws.stream(self.seed, stamp, self._seat)
        for lo, hi, first, last in self._blocks(n):
            values = np.zeros((last - first, self.bucket), norms.dtype)
            values.reshape(-1)[: hi - lo] = host[lo:hi].to(wide).numpy()
            norms[first:last] = _norms(values, torch.finfo(flat.dtype).max)
            chance = draws.uniform(stream, values.size, norms.dtype).reshape(values.shape)
            codes[lo:hi] = self._quantise(values, norms[first:last], chance).reshape(-1)[: hi - lo]
        data = np.concatenate([norms.view(np.uint8), packing.pack(codes, self.bits)])
        return torch.from_numpy(data).to(flat.device)

    def _quantise(self, values: Any, norms: Any, chance: Any) -> Any:
        """Return the codes of whole buckets: the level, and the highest bit for minus."""
        magnitudes = np.abs(values)
        magnitudes /= np.where(norms > 0, norms, 1)[:, None]
        magnitudes *= self._levels
        levels = np.floor(magnitudes)
        magnitudes -= levels
        # Compared, not added and cut off: a level that is exact stays exact.
        levels += chance < magnitudes
        codes = levels.astype(np.uint8)
        # Zero has one code: a minus without a level would be a second one.
        codes[(values < 0) & (codes > 0)] |= 1 << (self.bits - 1)
        return codes

    def _decode(self, packet: Packet) -> torch.Tensor:
        if not buffers.on_device(packet.data) and packet.dtype.itemsize > 2:
            return self._read_values(packet)
        out = torch.empty(packet.n, dtype=packet.dtype, device=packet.data.device)
        for lo, hi, values in self._values(packet):
            out[lo:hi] = values
        return out

    def _withdraw(self, memory: torch.Tensor, packet: Packet) -> None:
        for lo, hi, values in self._values(packet):
            memory[lo:hi] -= values.to(memory.device)

    def _values(self, packet: Packet) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (start, stop) and the decoded values between, on the host, block by block."""
        norms, codes = self._read(packet)
        levels = np.arange(self._levels + 1, dtype=norms.dtype) / norms.dtype.type(self._levels)
        table = np.concatenate([levels, -levels])
        for lo, hi, first, last in self._blocks(packet.n):
            values = table[codes[lo:hi]]
            values *= np.repeat(norms[first:last], self.bucket)[: hi - lo]
            yield lo, hi, torch.from_numpy(values).to(packet.dtype)

    def _read_values(self, packet: Packet) -> torch.Tensor:
        """Return the decoded values of float32 or float64, by a kernel."""
        from hpctk.kernels import levels

        norms, packed = self._read_norms(packet)
        out = arrays.new_flat(packet.n, packet.dtype)
        with _wrong_codes():
            levels.read(norms, packed, self.bits, self.bucket, out.numpy())
        return out

    def _read(self, packet: Packet) -> tuple[Any, Any]:
        """Return norms and codes, checked."""
        from hpctk.kernels import packing

        norms, packed = self._read_norms(packet)
        codes = np.empty(packet.n, np.uint8)
        with _wrong_codes():
            packing.unpack(packed, self.bits, codes)
            if (codes == 1 << (self.bits - 1)).any():
                raise ValueError("the code of minus zero, which is never written")
        return norms, codes

    def _read_norms(self, packet: Packet) -> tuple[Any, Any]:
        """Return norms, checked, and packed codes."""
        from hpctk.kernels import packing

        wide = arrays.working_dtype(packet.dtype)
        head = self._buckets(packet.n) * wide.itemsize
        length = head + packing.packed_length(packet.n, self.bits)
        expect_length(packet, length, torch.uint8, f"QSGD with {self.bits} bits")
        data = packet.data.cpu().numpy()
        # A copy: bytes that come from a larger buffer may start at any address.
        norms = data[:head].copy().view(str(wide).removeprefix("torch."))
        if not ((norms >= 0) & (norms <= torch.finfo(packet.dtype).max)).all():
            raise HpctkError("a QSGD packet with a norm that is negative or not finite")
        return norms, data[head:]

    def _buckets(self, n: int) -> int:
        return -(-n // self.bucket)

    def _block_buckets(self) -> int:
        return max(1, BLOCK // self.bucket)

    def _blocks(self, n: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first element, end, first bucket, end) of blocks of whole buckets; the last may be short."""
        buckets = self._block_buckets()
        for first in range(0, self._buckets(n), buckets):
            last = min(first + buckets, self._buckets(n))
            yield first * self.bucket, min(last * self.bucket, n), first, last


@contextmanager
def _wrong_codes() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise HpctkError(f"a QSGD packet with wrong codes: {error}") from None


def _norms(values: Any, limit: float) -> Any:
    """Return the 2-norm of each row, at most `limit`.

    Rows are scaled by their largest magnitude first, so that no square overflows or vanishes. Any
    number that is no smaller than the largest magnitude serves in place of the norm; the limit is
    the largest number of the tensor's dtype, which keeps every decoded value finite.
    """
    peaks = np.abs(values).max(1).astype(np.float64)
    scaled = values / np.where(peaks > 0, peaks, 1)[:, None]
    with np.errstate(over="ignore"):
        return np.minimum(peaks * np.sqrt(add_pairwise(np.square(scaled))), limit)

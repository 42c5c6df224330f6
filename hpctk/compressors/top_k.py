"""Top-k: the elements of largest magnitude, with their indices.

Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv 1704.05021;
with the memory of what was not sent: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS
2018, arXiv 1809.07599; Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv 1712.01887.

    C(z)_i = z_i for the k largest |z_i|, else 0;    of equal magnitudes the lowest indices

What travels: k = max(1, floor(density * n + 1e-9)) values in the tensor's dtype and their indices, as
`sparse` writes them. The same k values are taken out of the residual, so nothing is lost or rounded. They
arrive in bursts all the same, whose size an Adam after them divides away: there compress updates (SAEF), not gradients
(Mean); docs/methods.md, "Mean with TopK under Adam".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, finite
from hpctk.compressors.core import density as densities
from hpctk.compressors.core.compressor import Compressor, Shape, checked_flat, checked_pair, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError
from hpctk.settings import documented, required, setting


@documented
@dataclass(eq=False, repr=False)
class TopK(Compressor):
    """Send the elements of largest magnitude."""

    combines = "gathered"

    density: float = field(metadata=required("part of the elements that is sent", above=0, at_most=1))
    keep: bool = setting(
        False, "whether a sparse all-reduce brings back only the k largest of the sum, to bound its volume"
    )

    def k(self, n: int) -> int:
        """Return how many of n elements are sent."""
        return densities.kept(self.density, n)

    def select(
        self, tensor: torch.Tensor, residual: torch.Tensor | None = None, name: str = ""
    ) -> tuple[Any, Any]:
        """Return indices, ascending, and values of the k elements of largest magnitude.

        Without a residual nothing is changed. With one, the tensor is added to it in place, and what is
        returned is taken out of the sum.

        Returns
        -------
        indices, values : numpy arrays
            bfloat16 values as their bits; torch tensors for tensors on a device.
        """
        if residual is None:
            flat = checked_flat(tensor, name)
            refuse(finite.first_bad(flat), flat.numel(), name)
            return self._take(flat)
        flat, memory = checked_pair(tensor, residual, name)
        chosen = self._take_fed(memory, flat, name)
        buffers.write_back(residual, memory)
        return chosen

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, take the k largest magnitudes out of it and return them.

        See `Compressor.feed`. Adding, checking, selecting and taking out are one operation where a
        compiled kernel does it.
        """
        chosen = self.select(tensor, residual, name)
        data = _write(*chosen, tensor.numel(), tensor.dtype, tensor.device)
        return Packet(data, tuple(tensor.shape), tensor.dtype)

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        return _write(*self._take(flat), flat.numel(), flat.dtype, flat.device)

    def _decode(self, packet: Packet) -> torch.Tensor:
        from hpctk.compressors.core import sparse
        from hpctk.kernels import merge

        if packet.data.dtype != torch.uint8:
            raise HpctkError(
                f"a sparse packet of {arrays.dtype_name(packet.data.dtype)}: it must be of bytes"
            )
        indices, values = sparse.read(packet.data.cpu().numpy(), packet.n, arrays.dtype_name(packet.dtype))
        out = torch.zeros(packet.n, dtype=packet.dtype)
        merge.scatter(_bits(out), indices, _unsigned(values))
        return out.to(packet.data.device)

    def _take(self, flat: torch.Tensor) -> tuple[Any, Any]:
        if buffers.on_device(flat):
            from hpctk.kernels import device

            chosen = device.top_k(flat, self.k(flat.numel()))
            return chosen, flat[chosen]
        from hpctk.kernels import select

        indices = select.top_k(_bits(flat), self.k(flat.numel()))
        return indices, arrays.as_array(flat)[indices]

    def _take_fed(self, memory: torch.Tensor, flat: torch.Tensor, name: str) -> tuple[Any, Any]:
        """Add flat to memory in place, and take the k largest out of it."""
        from hpctk.kernels import device, select

        k = self.k(flat.numel())
        try:
            if buffers.on_device(flat):
                return device.feed_top_k(memory, flat, k)
            if flat.element_size() > 2:
                return select.feed_top_k(memory.numpy(), flat.numpy(), k)
        except select.NotFinite as error:
            refuse(error.index, flat.numel(), name)
        refuse(finite.first_bad_sum(memory, flat), flat.numel(), name)
        memory += flat
        indices, values = self._take(memory)
        memory[torch.from_numpy(indices)] = 0
        return indices, values


def _write(indices: Any, values: Any, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from hpctk.compressors.core import sparse

    if isinstance(values, torch.Tensor):
        indices, values = indices.cpu().numpy(), arrays.as_array(values.cpu())
    return torch.from_numpy(sparse.write(indices, values, n)).to(device)


def _bits(flat: torch.Tensor) -> Any:
    """Return a flat host tensor as unsigned integers over its memory."""
    return _unsigned(arrays.as_array(flat))


def _unsigned(values: Any) -> Any:
    return values.view(f"u{values.itemsize}")

"""Compressors that send some elements as they are, with their indices; what is not sent stays in the residual.

What travels: the values of the chosen elements in the tensor's dtype and their indices, as `sparse` writes them.
The same values are taken out of the residual, so nothing is lost or rounded.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, finite
from hpctk.compressors.core.compressor import Compressor, Shape, checked_flat, checked_pair, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError


class SparseCompressor(Compressor):
    """Send chosen elements. A subclass says which, in `_choose`."""

    combines = "pairs"

    #: Whether a sparse all-reduce brings back only the k largest of the sum; needs a `k`.
    keep: bool = False

    def k(self, n: int) -> int | None:
        """Return how many of n elements every rank sends; None where that depends on their values."""
        return None

    @abstractmethod
    def _choose(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the indices of the elements to send, ascending, on the device of a flat, finite tensor."""

    def select(self, tensor: torch.Tensor, residual: torch.Tensor | None = None, name: str = "") -> tuple[Any, Any]:
        """Return indices, ascending, and values of the elements to send.

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
        """Add tensor to residual in place, take the chosen elements out of it and return them.

        See `Compressor.feed`.
        """
        chosen = self.select(tensor, residual, name)
        data = _write(*chosen, tensor.numel(), tensor.device)
        return Packet(data, tuple(tensor.shape), tensor.dtype)

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        return _write(*self._take(flat), flat.numel(), flat.device)

    def _decode(self, packet: Packet) -> torch.Tensor:
        from hpctk.compressors.core import sparse
        from hpctk.kernels import merge

        if packet.data.dtype != torch.uint8:
            raise HpctkError(f"a sparse packet of {arrays.dtype_name(packet.data.dtype)}: it must be of bytes")
        indices, values = sparse.read(packet.data.cpu().numpy(), packet.n, arrays.dtype_name(packet.dtype))
        out = torch.zeros(packet.n, dtype=packet.dtype)
        merge.scatter(arrays.unsigned(arrays.as_array(out)), indices, arrays.unsigned(values))
        return out.to(packet.data.device)

    def _take(self, flat: torch.Tensor) -> tuple[Any, Any]:
        chosen = self._choose(flat)
        if buffers.on_device(flat):
            return chosen, flat[chosen]
        indices = chosen.numpy()
        return indices, arrays.as_array(flat)[indices]

    def _take_fed(self, memory: torch.Tensor, flat: torch.Tensor, name: str) -> tuple[Any, Any]:
        """Add flat to memory in place, and take the chosen elements out of it."""
        refuse(finite.first_bad_sum(memory, flat), flat.numel(), name)
        memory += flat
        indices, values = self._take(memory)
        memory[torch.as_tensor(indices)] = 0
        return indices, values


def _write(indices: Any, values: Any, n: int, device: torch.device) -> torch.Tensor:
    from hpctk.compressors.core import sparse

    if isinstance(values, torch.Tensor):
        indices, values = indices.cpu().numpy(), arrays.as_array(values.cpu())
    return torch.from_numpy(sparse.write(indices, values, n)).to(device)

"""Top-k: the elements of largest magnitude, with their indices.

Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv 1704.05021;
with the memory of what was not sent: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS
2018, arXiv 1809.07599; Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv 1712.01887.

    C(z)_i = z_i for the k largest |z_i|, else 0;    of equal magnitudes the lowest indices

What travels: k = max(1, floor(density * n + 1e-9)) values and their indices. What stays in the residual arrives in
bursts later, whose size an Adam after them divides away: there compress updates (SAEF), not gradients (Mean);
docs/methods.md, "Mean with TopK under Adam".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays
from hpctk.compressors.core.compressor import checked_pair, is_plain, kept_elements, refuse
from hpctk.compressors.core.sparse import SparseCompressor
from hpctk.settings import documented, required, setting


@documented
@dataclass(eq=False, repr=False)
class TopK(SparseCompressor):
    """Send the elements of largest magnitude."""

    takes_largest = True

    density: float = field(metadata=required("part of the elements that is sent", above=0, at_most=1))
    keep: bool = setting(
        False, "whether a sparse all-reduce brings back only the k largest of the sum, to bound its volume"
    )

    def k(self, n: int) -> int:
        """Return how many of n elements are sent."""
        return kept_elements(self.density, n)

    def _choose(self, flat: torch.Tensor) -> torch.Tensor:
        from hpctk.kernels import device, select

        k = self.k(flat.numel())
        if buffers.on_device(flat):
            return device.top_k(flat, k)
        return torch.from_numpy(select.top_k(arrays.unsigned(arrays.as_array(flat)), k))

    def pick(
        self, tensor: torch.Tensor, other: torch.Tensor, name: str = "", *, minus: bool = False
    ) -> tuple[Any, Any]:
        """Return indices and values of the k largest of tensor + other, without writing that down where a kernel can.

        See `SparseCompressor.pick`.
        """
        from hpctk.kernels import magnitude, select

        if not (is_plain(tensor) and is_plain(other)):
            return super().pick(tensor, other, name, minus=minus)
        flat, more = checked_pair(tensor, other, name)
        n, source, added = flat.numel(), flat.numpy(), more.numpy()
        if n >= select.WORTH_A_SAMPLE:
            try:
                return select.pick_top_k(source, added, self.k(n), minus=minus)
            except select.NotFinite as error:
                refuse(error.index, n, name)
        indices, values = self._room(n, source.dtype)
        if n:
            weight, infinity = source.dtype.type(-1 if minus else 1), select.INFINITY[source.dtype.char]
            bad = magnitude.pick_small(source, added, weight, infinity, indices, values)
            refuse(None if bad < 0 else bad, n, name)
        return indices, values

    def take_out(self, tensor: torch.Tensor, residual: torch.Tensor, indices: Any) -> None:
        """Add tensor to residual, in place, and write 0 at indices: in one pass where a kernel can."""
        from hpctk.kernels import select

        if not (is_plain(tensor) and is_plain(residual)):
            super().take_out(tensor, residual, indices)
            return
        flat, memory = checked_pair(tensor, residual, "")
        select.add_and_clear(memory.numpy(), flat.numpy(), indices)

    def _take_fed(self, memory: torch.Tensor, flat: torch.Tensor, name: str) -> tuple[Any, Any]:
        """Add flat to memory in place, and take the k largest out of it: in two passes where a kernel can."""
        from hpctk.kernels import magnitude, select

        if not flat.is_cpu or flat.element_size() <= 2:
            return super()._take_fed(memory, flat, name)
        n, residual, given = flat.numel(), memory.numpy(), flat.numpy()
        if n >= select.WORTH_A_SAMPLE:
            try:
                return select.feed_top_k(residual, given, self.k(n))
            except select.NotFinite as error:
                refuse(error.index, n, name)
        indices, values = self._room(n, residual.dtype)
        if n:
            bad = magnitude.feed_small(residual, given, select.INFINITY[given.dtype.char], indices, values)
            refuse(None if bad < 0 else bad, n, name)
        return indices, values

    def _room(self, n: int, dtype: Any) -> tuple[Any, Any]:
        return np.empty(self.k(n), np.int32), np.empty(self.k(n), dtype)

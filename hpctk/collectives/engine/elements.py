"""What an engine does with the elements of a flat tensor: send them, take them in, combine them.

Two ways. Most dtypes are combined where they lie. Half and quarter precision are summed in float32:
a float32 copy does the adding, and a value is rounded once, when it is sent or at the end. What was
sent is what the sender goes on with, so that both ends of an exchange hold the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.comm import buffers
from hpctk.comm.buffers import Dtype


class InPlace:
    """Elements 0 .. n-1 of a flat, contiguous array or tensor, of `itemsize` bytes each, combined where they lie.

    `unit` is the dtype that is combined, empty where nothing is (all-gather, broadcast); `op` is sum, mean (over `size`
    ranks) or max.
    """

    #: Extra memory held, in bytes.
    extra_bytes = 0

    def __init__(self, flat: Any, itemsize: int, unit: str = "", op: str = "sum", size: int = 1) -> None:
        self.itemsize = itemsize
        self._divisor = size if op == "mean" else 1
        self._bytes: Any = flat.view(np.uint8) if isinstance(flat, np.ndarray) else buffers.as_bytes(flat)
        self.n = len(self._bytes) // itemsize
        self._device = not isinstance(self._bytes, np.ndarray)
        self._unit: Any = _torch_dtype(unit) if self._device and unit else unit or None
        self._values = self._bytes.view(self._unit) if unit and self.n else self._bytes
        self._per_element = len(self._values) // self.n if self.n else 1
        self._combine = _combiner(op, self._device)

    def outgoing(self, lo: int, hi: int) -> Any:
        """Return the bytes of elements lo .. hi-1 to send; they stay as they are until overwritten by `stored`."""
        if self._device:
            buffers.synchronize(self._bytes)
        return self._bytes[lo * self.itemsize : hi * self.itemsize]

    def incoming(self, lo: int, hi: int) -> Any:
        """Return the memory in which elements lo .. hi-1 are received to be stored."""
        if self._device:
            buffers.synchronize(self._bytes)
        return self._bytes[lo * self.itemsize : hi * self.itemsize]

    def stored(self, lo: int, hi: int) -> None:
        """Take over what was received in `incoming`."""

    def combine(self, lo: int, hi: int, received: Any) -> None:
        """Combine received bytes with elements lo .. hi-1."""
        own = self._values[lo * self._per_element : hi * self._per_element]
        self._combine(own, received.view(self._unit), out=own)

    def scratch(self, nbytes: int) -> Any:
        """Return memory beside the tensor's, to receive bytes in that are to be combined."""
        return self._bytes.new_empty(nbytes) if self._device else np.empty(nbytes, np.uint8)

    def finish(self) -> None:
        """Leave the result in the tensor: divide a sum into its mean."""
        if self._divisor > 1 and self.n:
            self._values /= self._divisor


class Widened(InPlace):
    """Elements of 1 or 2 bytes of a flat torch tensor, summed in float32. Holds a float32 copy."""

    def __init__(self, flat: Any, op: str = "sum", size: int = 1) -> None:
        super().__init__(flat, flat.element_size(), op=op, size=size)
        self._flat = flat
        self._wide = flat.float()
        self.extra_bytes = 4 * self.n
        self._combine = _combiner(op, True)

    def outgoing(self, lo: int, hi: int) -> Any:
        """Round the elements, go on with what was rounded, and return it."""
        self._flat[lo:hi] = self._wide[lo:hi]
        self._wide[lo:hi] = self._flat[lo:hi]
        return super().outgoing(lo, hi)

    def stored(self, lo: int, hi: int) -> None:
        """Widen what was received."""
        self._wide[lo:hi] = self._flat[lo:hi]

    def combine(self, lo: int, hi: int, received: Any) -> None:
        """Combine received bytes with elements lo .. hi-1, in float32."""
        import torch

        narrow = received if self._device else torch.from_numpy(received)
        own = self._wide[lo:hi]
        self._combine(own, narrow.view(self._flat.dtype).float(), out=own)

    def finish(self) -> None:
        """Round what has not been rounded yet, and divide a sum into its mean."""
        self._flat.copy_(self._wide)
        if self._divisor > 1:
            # Not the sum before it is rounded: ranks that were sent it would come to another mean.
            self._flat.copy_(self._flat.float() / self._divisor)


def elements(flat: Any, dtype: Dtype, op: str, size: int = 1) -> InPlace:
    """Return the elements of flat memory, to be combined with `op` over `size` ranks."""
    if not dtype.widened:
        return InPlace(flat, dtype.itemsize, dtype.unit, op, size)
    if isinstance(flat, np.ndarray):
        import torch

        flat = torch.from_numpy(flat)
    return Widened(flat, op, size)


def _combiner(op: str, by_torch: bool) -> Any:
    if not by_torch:
        return np.maximum if op == "max" else np.add
    import torch

    return torch.maximum if op == "max" else torch.add


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)

"""The wire form of a sparse vector: some elements of n, as bytes.

    8 bytes     form (lowest byte) and the number of elements k (the other seven), little endian
    k values    in their own dtype
    indices     by form: PLAIN  int32 each (int64 where n > 2^31)
                         PACKED Elias-Fano: about 2 + log2(n/k) bits each
                         DENSE  none: all n values are there, zeros too

The form is the one with the fewest bytes, so the size is a function of k and n, known to every rank.
Indices are ascending, without duplicates. n and the dtype do not travel: all ranks know them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, finite
from hpctk.compressors.core.compressor import Compressor, Shape, checked_flat, checked_pair, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError

HEADER_BYTES = 8
PLAIN, PACKED, DENSE = range(3)
NAMES = ("plain", "packed", "dense")

#: numpy's dtype for the values of each dtype; it has no bfloat16, so those travel as their bits.
VALUES = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32, "float64": np.float64}


def wire_bytes(k: int, n: int, itemsize: int) -> int:
    """Return how many bytes k elements of n take."""
    return HEADER_BYTES + _body_bytes(_form(k, n, itemsize), k, n, itemsize)


def turns_dense(k: int, n: int, itemsize: int) -> bool:
    """Return whether k elements of n are written as all n."""
    return _form(k, n, itemsize) == DENSE


def write(indices: Any, values: Any, n: int) -> Any:
    """Return the bytes of a sparse vector of length n as a new uint8 array.

    Indices ascend, without duplicates, below n: not checked here, reading checks.
    """
    from hpctk.kernels import packing

    k, itemsize = len(indices), values.itemsize
    form = _form(k, n, itemsize)
    data = np.empty(HEADER_BYTES + _body_bytes(form, k, n, itemsize), np.uint8)
    count = n if form == DENSE else k
    data[:HEADER_BYTES].view("<u8")[0] = form | count << 8
    room = data[HEADER_BYTES : HEADER_BYTES + count * itemsize].view(values.dtype)
    if form == DENSE:
        room[:] = 0
        room[indices] = values
        return data
    room[:] = values
    tail = data[HEADER_BYTES + k * itemsize :]
    if form == PACKED:
        tail[:] = packing.pack_indices(indices, n)
    else:
        # Not as a view: the place after an odd number of half precision values is not aligned.
        tail[:] = np.ascontiguousarray(indices, _index_dtype(n)).view(np.uint8)
    return data


def read(data: Any, n: int, dtype: str) -> tuple[Any, Any]:
    """Return the indices and values in the bytes that `write` made of a sparse vector of length n.

    Values are a view of `data` where they are aligned there; those of bfloat16 are their bits. Raise HpctkError for a
    wrong length, a wrong code, an index out of range or out of order.
    """
    kind = np.dtype(VALUES[dtype])
    if len(data) < HEADER_BYTES:
        raise HpctkError(f"a sparse packet of {len(data)} bytes: too short for its header")
    header = int.from_bytes(data[:HEADER_BYTES].tobytes(), "little")
    form, count = header & 0xFF, header >> 8
    if form >= len(NAMES):
        known = ", ".join(f"{code} ({name})" for code, name in enumerate(NAMES))
        raise HpctkError(f"a sparse packet with code {form}: known are {known}")
    if count > n or (form == DENSE and count != n):
        raise HpctkError(f"a sparse packet of {count} elements, written as {NAMES[form]}, for a vector of {n}")
    expected = HEADER_BYTES + _body_bytes(form, count, n, kind.itemsize)
    if len(data) != expected:
        raise HpctkError(f"a sparse packet of {len(data)} bytes: {count} elements of {n} take {expected}")
    tail = HEADER_BYTES + count * kind.itemsize
    values = data[HEADER_BYTES:tail]
    if values.ctypes.data % kind.itemsize:
        values = values.copy()
    return _read_indices(form, data[tail:], count, n), values.view(kind)


def _read_indices(form: int, tail: Any, k: int, n: int) -> Any:
    from hpctk.kernels import packing

    if form == DENSE:
        return np.arange(n, dtype=_index_dtype(n))
    if form == PACKED:
        try:
            return packing.unpack_indices(tail, k, n)
        except ValueError as error:
            raise HpctkError(f"a sparse packet with wrong indices: {error}") from None
    indices = np.frombuffer(tail.tobytes(), _index_dtype(n))
    if k and (indices[0] < 0 or indices[-1] >= n or (indices[1:] <= indices[:-1]).any()):
        raise HpctkError(f"a sparse packet with indices outside 0 to {n - 1} or out of order")
    return indices


def _form(k: int, n: int, itemsize: int) -> int:
    return min((PLAIN, PACKED, DENSE), key=lambda form: _body_bytes(form, k, n, itemsize))


def _body_bytes(form: int, k: int, n: int, itemsize: int) -> int:
    from hpctk.kernels import packing

    if form == DENSE:
        return n * itemsize
    if form == PACKED:
        return k * itemsize + packing.packed_bytes(k, n)
    return k * (itemsize + (8 if n > 2**31 else 4))


def _index_dtype(n: int) -> str:
    return "<i8" if n > 2**31 else "<i4"


class SparseCompressor(Compressor):
    """Send chosen elements. A subclass says which, in `_choose`."""

    combines = "pairs"
    shrinks = True
    #: Whether just the k largest magnitudes are sent, of equal ones the lowest indices: then those of many small
    #: tensors are chosen in one call, not by `_choose`.
    takes_largest: ClassVar[bool] = False

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
        if memory.data_ptr() != residual.data_ptr():
            buffers.write_back(residual, memory)
        return chosen

    def pick(
        self, tensor: torch.Tensor, other: torch.Tensor, name: str = "", *, minus: bool = False
    ) -> tuple[Any, Any]:
        """Return indices, ascending, and values of the elements to send of tensor + other. Changes nothing.

        Of tensor - other with `minus`: what has to be sent of one model to come to the other. Both of one shape,
        dtype and device. Raise TensorError as `compress`, about the sum.
        """
        flat, more = checked_pair(tensor, other, name)
        total = flat - more if minus else flat + more
        refuse(finite.first_bad(total), total.numel(), name)
        return self._take(total)

    def take_out(self, tensor: torch.Tensor, residual: torch.Tensor, indices: Any) -> None:
        """Add tensor to residual, in place, and write 0 at the indices that `pick` returned for both.

        `pick` and this are `select` in two halves, for those who look at all tensors before they change any.
        """
        flat, memory = checked_pair(tensor, residual, "")
        memory += flat
        memory[torch.as_tensor(indices)] = 0
        if memory.data_ptr() != residual.data_ptr():
            buffers.write_back(residual, memory)

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, take the chosen elements out of it and return them.

        See `Compressor.feed`.
        """
        chosen = self.select(tensor, residual, name)
        data = _write(*chosen, tensor.numel(), tensor.device)
        return Packet(data, tuple(tensor.shape), tensor.dtype)

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        return _write(*self._take(flat), flat.numel(), flat.device)

    def places(self, packet: Packet) -> Any:
        """Return the indices of the elements that a packet carries.

        Of one that is written as dense without all having been chosen, those that are not zero.
        """
        indices, values = self._read(packet)
        return indices if len(indices) < packet.n or self.k(packet.n) == packet.n else indices[values != 0]

    def _read(self, packet: Packet) -> tuple[Any, Any]:
        if packet.data.dtype != torch.uint8:
            raise HpctkError(f"a sparse packet of {arrays.dtype_name(packet.data.dtype)}: it must be of bytes")
        return read(packet.data.cpu().numpy(), packet.n, arrays.dtype_name(packet.dtype))

    def _decode(self, packet: Packet) -> torch.Tensor:
        from hpctk.kernels import merge

        indices, values = self._read(packet)
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

    if isinstance(values, torch.Tensor):
        indices, values = indices.cpu().numpy(), arrays.as_array(values.cpu())
    return torch.from_numpy(write(indices, values, n)).to(device)

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

from typing import Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.kernels import indices as packing

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
    if form == DENSE:
        return n * itemsize
    if form == PACKED:
        return k * itemsize + packing.packed_bytes(k, n)
    return k * (itemsize + (8 if n > 2**31 else 4))


def _index_dtype(n: int) -> str:
    return "<i8" if n > 2**31 else "<i4"

"""What the messages of a plain HDF5 object say: columns that lie in one piece, attributes that are scalars."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats.plain_hdf5 import Messages

SPACE, TYPE, EXTERNAL, LAYOUT, FILTERS, ATTRIBUTE = 0x1, 0x3, 0x7, 0x8, 0xB, 0xC
#: What `column` looks at.
COLUMN = frozenset((SPACE, TYPE, EXTERNAL, LAYOUT, FILTERS))
_LAYOUTS = {0: "compact", 2: "chunked", 3: "virtual"}
_CONTIGUOUS = 1
_UNDEFINED = 0xFFFF_FFFF_FFFF_FFFF
#: The longest text in a column, in bytes.
LONGEST_TEXT = 1024

_TYPE = Struct("<B3sI")
_INTEGER = Struct("<HH")
_FLOAT = Struct("<HHBBBBI")
_IEEE = {4: (0, 32, 23, 8, 0, 23, 127), 8: (0, 64, 52, 11, 0, 52, 1023)}
#: As much of a datatype as numbers and text need.
_TYPE_BYTES = 24
_PLACE = Struct("<QQ")
_ATTRIBUTE = Struct("<BBHHH")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a column lies in its file."""

    offset: int
    rows: int
    dtype: np.dtype[Any]


def column(messages: Messages) -> Stored:
    """Return where a dataset's values lie; HpctkError, with what goes after its name, where they lie otherwise."""
    found = dict(messages)
    if EXTERNAL in found or -EXTERNAL in found:
        raise HpctkError("lies in another file; hpctk reads only what lies in one piece")
    if FILTERS in found or -FILTERS in found:
        raise HpctkError("is compressed; hpctk reads only what lies in one piece")
    if SPACE not in found or TYPE not in found or LAYOUT not in found:
        raise HpctkError("is no column")
    data = found[LAYOUT]
    kind = data[1] if len(data) > 1 else -1
    if data[:1] not in (b"\3", b"\4") or kind != _CONTIGUOUS or len(data) < 2 + _PLACE.size:
        raise HpctkError(f"is stored {_LAYOUTS.get(kind, 'oddly')}; hpctk reads only what lies in one piece")
    offset, nbytes = _PLACE.unpack_from(data, 2)
    shape, dtype = dimensions(found[SPACE]), number_or_text(found[TYPE][:_TYPE_BYTES])
    if dtype is None:
        raise HpctkError("has a type that hpctk does not write")
    if shape is None or len(shape) != 1:
        raise HpctkError("is not one-dimensional")
    rows = shape[0]
    if rows and (offset == _UNDEFINED or nbytes != rows * dtype.itemsize):
        raise HpctkError(f"declares {rows} rows that are not there")
    return Stored(offset, rows, dtype)


def attribute(data: bytes) -> tuple[str, str | int | float | None]:
    """Return an attribute's name and value, None where it is not one number or text."""
    if len(data) < _ATTRIBUTE.size:
        return "", None
    version, flags, name_bytes, type_bytes, space_bytes = _ATTRIBUTE.unpack_from(data)
    start = _ATTRIBUTE.size + (version == 3)
    step = 8 if version == 1 else 1
    ends = []
    for nbytes in (name_bytes, type_bytes, space_bytes):
        ends.append((start, start + nbytes))
        start += -(-nbytes // step) * step
    name, kind, space = (data[first:last] for first, last in ends)
    text = name.rstrip(b"\0").decode(errors="replace")
    # From version 2 on the flags say that type or space are elsewhere.
    if version not in (1, 2, 3) or (version > 1 and flags) or dimensions(space) != ():
        return text, None
    dtype = number_or_text(kind[:_TYPE_BYTES])
    value = data[start : start + dtype.itemsize] if dtype is not None else b""
    if dtype is None or len(value) < dtype.itemsize:
        return text, None
    if dtype.kind == "S":
        return text, value.rstrip(b"\0").decode(errors="replace")
    plain: int | float = np.frombuffer(value, dtype)[0].item()
    return text, plain


def dimensions(data: bytes) -> tuple[int, ...] | None:
    """Return a dataspace's shape, None where it has none."""
    if len(data) < 4 or data[0] not in (1, 2) or (data[0] == 2 and data[3] == 2):
        return None
    start, rank = (8 if data[0] == 1 else 4), data[1]
    if len(data) < start + 8 * rank:
        return None
    return tuple(int.from_bytes(data[start + 8 * i : start + 8 * i + 8], "little") for i in range(rank))


@lru_cache(maxsize=256)
def number_or_text(data: bytes) -> np.dtype[Any] | None:
    """Return a datatype as numpy's: whole numbers, IEEE floats, text of fixed length; None for any other."""
    if len(data) < _TYPE.size:
        return None
    head, bits, nbytes = _TYPE.unpack_from(data)
    order = ">" if bits[0] & 1 else "<"
    more = data[_TYPE.size :]
    match head & 15:
        case 0 if nbytes in (1, 2, 4, 8) and len(more) >= _INTEGER.size:
            if _INTEGER.unpack_from(more) == (0, 8 * nbytes):
                return np.dtype(f"{order}{'i' if bits[0] & 8 else 'u'}{nbytes}")
        case 1 if nbytes in _IEEE and len(more) >= _FLOAT.size and not bits[0] & 0x40:
            if _FLOAT.unpack_from(more) == _IEEE[nbytes] and bits[0] & 0x30 == 0x20:
                return np.dtype(f"{order}f{nbytes}")
        case 3 if 0 < nbytes <= 0xFFFF:
            return np.dtype(f"S{nbytes}")
    return None

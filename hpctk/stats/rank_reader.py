"""One rank's statistics file, wherever it may come from, checked before it is read.

What comes out is what schema.py says, or an HpctkError that names the file and what is wrong with it. HDF5 says once
where the columns lie; rows are read straight from there, as they were written. Only what lies in the file itself, in
one piece, is read: so a file never costs more memory than it is long. A report opens a thousand files with 78 columns
each, hence h5py's low-level interface, which needs a fifth of the time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpctk import hdf5
from hpctk.errors import HpctkError
from hpctk.telemetry import schema
from hpctk.telemetry.schema import Column, Table, TableFormat

Value = str | int | float

#: The names of all tables.
ALL = tuple(schema.TABLES)
#: More ranks than there will be: a file that says so is damaged.
MOST_RANKS = 1 << 24
#: The longest text in a column, in bytes.
LONGEST_TEXT = 1024
#: Attributes without which a file cannot be told from others.
_NEEDED = ("schema", "schema_version", "state", "rank", "size")
_MISSING: dict[str, Value] = {"S": "", "<i8": -1, "<f8": float("nan")}
_KINDS: dict[str, tuple[Any, str]] = {
    "S": (str, "text"),
    "<i8": (int, "a whole number"),
    "<f8": ((int, float), "a number"),
}
#: What hpctk writes, so that it is known at once.
_NUMBERS = ((h5py.h5t.STD_I64LE, np.dtype("<i8")), (h5py.h5t.IEEE_F64LE, np.dtype("<f8")))


class Stored(NamedTuple):
    """Where a column lies in its file."""

    offset: int
    rows: int
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Contents:
    """What a file says of itself, where its columns lie, and the tables that were asked for."""

    attributes: dict[str, Value]
    environment: dict[str, str]
    progress: dict[str, Any]
    tables: dict[str, Table]
    columns: dict[str, dict[str, Stored]]
    identity: tuple[int, int, int]


def read(path: Path, tables: Sequence[str] = (), checked: Sequence[str] = ALL) -> Contents:
    """Read what a rank's file says of itself, and some of its tables; of those in `checked` see that they can be."""
    with opened(path) as (root, descriptor):
        attributes = _checked(_attributes(root))
        columns = {
            name: _columns(root, schema.TABLES[name])
            for name in dict.fromkeys(["progress", *tables, *checked])
        }
        rows = _values(descriptor, columns["progress"])
        progress = {name: _progress(name, values) for name, values in rows.items()}
        for name in columns:
            _check_rows(name, columns[name], progress, int(attributes["size"]))
        found = {name: _values(descriptor, columns[name], _filled(name, progress)) for name in tables}
        return Contents(
            attributes, _environment(root), progress, found, columns, _identity(os.fstat(descriptor))
        )


@dataclass
class RankRows:
    """The rows of a rank's file up to those that its progress said: one that has grown since is cut to what it was."""

    path: Path
    contents: Contents

    def read(
        self, tables: Sequence[str], columns: Sequence[str] | None = None, rows: slice = slice(None)
    ) -> dict[str, Table]:
        """Return tables, or some columns and rows of them; no more is read."""
        known = self.contents.columns
        if all(name in known for name in tables):
            with _named(self.path), self.path.open("rb", buffering=0) as file:
                if _identity(os.fstat(file.fileno())) == self.contents.identity:
                    return {name: self._table(file.fileno(), name, columns, rows) for name in tables}
        # Not looked for yet; or a larger file has taken its place, or a closed one, and they lie elsewhere.
        now = read(self.path, checked=[*known, *tables])
        self.contents = replace(now, progress=self.contents.progress)
        return self.read(tables, columns, rows)

    def _table(self, descriptor: int, name: str, columns: Sequence[str] | None, rows: slice) -> Table:
        stored, progress = self.contents.columns[name], self.contents.progress
        _check_rows(name, stored, progress, None)
        room, filled = next(iter(stored.values())).rows, _filled(name, progress)
        first, last, _ = rows.indices(room if filled is None else filled)
        wanted = stored if columns is None else {column: stored[column] for column in columns}
        return _values(descriptor, wanted, last, first)


def read_attributes(path: Path) -> dict[str, Value | None]:
    """Read the attributes of a file's root, None for those that are not one number or text."""
    with opened(path) as (root, _):
        return _attributes(root)


def read_one_table(path: Path, table: TableFormat) -> tuple[Table, dict[str, str]]:
    """Read all rows of a table, and the environment."""
    with opened(path) as (root, descriptor):
        return _values(descriptor, _columns(root, table)), _environment(root)


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, int]]:
    """Open a file; give its root, a `h5py.h5g.GroupID`, and a descriptor. Errors in the block name the file."""
    with _named(path):
        status = path.stat()
        # HDF5 would wait for somebody to write to a pipe.
        if not stat.S_ISREG(status.st_mode):
            raise HpctkError("is not a file")
        if not status.st_size:
            raise HpctkError("is empty")
        with h5py.File(path, "r", locking="best-effort") as file:
            yield h5py.h5g.open(file.id, b"/"), file.id.get_vfd_handle()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except HpctkError as error:
        raise HpctkError(f"{path}: {error}") from None
    except hdf5.ERRORS as error:
        told = hdf5.reason(error)
        if getattr(error, "errno", None):
            why = f"cannot be read ({told})"
        elif "file signature not found" in told:
            why = "is no HDF5 file"
        else:
            why = f"is {'cut off' if 'truncated file' in told else 'damaged'} ({told})"
        raise HpctkError(f"{path}: {why}") from None


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return what is another where a file was replaced."""
    return status.st_dev, status.st_ino, status.st_size


def _attributes(place: Any) -> dict[str, Value | None]:
    names: list[bytes] = []
    h5py.h5a.iterate(place, names.append)
    return {name.decode(errors="replace"): _value(h5py.h5a.open(place, name)) for name in names}


def _value(attribute: Any) -> Value | None:
    """Return an attribute's value, None where it is not one number or text of fixed length."""
    kind = attribute.get_type()
    dtype = _dtype(kind)
    if dtype is None or attribute.get_storage_size() != dtype.itemsize:
        return None
    value = np.empty(1, dtype)
    attribute.read(value, kind)
    plain: Value | bytes = value[0].item()
    return plain.decode(errors="replace") if isinstance(plain, bytes) else plain


def _dtype(kind: Any) -> np.dtype[Any] | None:
    """Return the type of numbers or of text of fixed length (`h5py.h5t.TypeID`) as numpy's, None for any other."""
    for known, dtype in _NUMBERS:
        if kind.equal(known):
            return dtype
    family = kind.get_class()
    if family == h5py.h5t.STRING:
        return None if kind.is_variable_str() else np.dtype(("S", kind.get_size()))
    return kind.dtype if family in (h5py.h5t.INTEGER, h5py.h5t.FLOAT) else None


def _checked(found: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return a file's attributes, those that are missing too, once they are what they should be."""
    if found.get("schema") != schema.NAME:
        raise HpctkError(f"is no statistics file of hpctk (its attribute schema is not {schema.NAME!r})")
    check_version(found.get("schema_version"), schema.VERSION)
    for name in _NEEDED:
        if name not in found:
            raise HpctkError(f"lacks the attribute {name}")
    attributes = typed(found)
    rank, size, node = attributes["rank"], attributes["size"], attributes["node"]
    if not 0 <= int(rank) < int(size) <= MOST_RANKS:
        raise HpctkError(f"is damaged: it says to be of rank {rank} of {size}")
    if not -1 <= int(node) < int(size):
        raise HpctkError(f"is damaged: it says to be of node {node}, with {size} ranks")
    return attributes


def typed(found: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return all attributes that there are, known ones of their type, and "", -1 or NaN for those that are missing."""
    attributes = {name: value for name, value in found.items() if value is not None}
    for column in schema.ATTRIBUTES:
        kind, called = _KINDS[column.kind]
        if column.name not in found:
            attributes[column.name] = _MISSING[column.kind]
        elif not isinstance(found[column.name], kind):
            raise HpctkError(f"is damaged: its attribute {column.name} must be {called}")
    return attributes


def check_version(version: Any, known: int) -> None:
    """Raise HpctkError for a schema that this hpctk does not read."""
    if not isinstance(version, int) or not 1 <= version <= known:
        newer = isinstance(version, int) and version > known
        advice = "a newer hpctk wrote it: install that one" if newer else "there is no such"
        raise HpctkError(f"has schema version {version}, this hpctk reads up to {known}; {advice}")


def _environment(root: Any) -> dict[str, str]:
    if not root.links.exists(b"environment"):
        return {}
    kept = _attributes(hdf5.group(root, "environment"))
    return {name: value for name, value in kept.items() if isinstance(value, str)}


def _columns(root: Any, table: TableFormat) -> dict[str, Stored]:
    """Return where a table's columns lie, all as long."""
    group = hdf5.group(root, table.name)
    found = {column.name: _column(group, table.name, column) for column in table.columns}
    rows = {stored.rows for stored in found.values()}
    if len(rows) > 1:
        raise HpctkError(f"is damaged: the columns of {table.name} have {min(rows)} to {max(rows)} rows")
    # Columns that lie upon each other could be many times as long as the file.
    nbytes = sum(stored.rows * stored.dtype.itemsize for stored in found.values())
    if nbytes > h5py.h5i.get_file_id(root).get_filesize():
        raise HpctkError(f"is damaged: {table.name} is longer than the file")
    return found


def _column(group: Any, table: str, column: Column) -> Stored:
    dataset = hdf5.dataset(group, column.name)
    dtype = _dtype(dataset.get_type())
    offset, nbytes = dataset.get_offset(), dataset.get_storage_size()
    if dtype is None or (dtype.kind != "S" if column.kind[0] == "S" else dtype.str != column.kind):
        why = f"is damaged: {table}/{column.name} is of type {dataset.dtype.str}, not {column.kind}"
    elif dtype.itemsize > LONGEST_TEXT:
        why = f"is damaged: {table}/{column.name} has text of {dtype.itemsize} bytes"
    elif offset is None and nbytes:
        why = f"is not as hpctk writes it: {table}/{column.name} does not lie in one piece"
    else:
        return Stored(offset or 0, nbytes // dtype.itemsize, dtype)
    raise HpctkError(why)


def _progress(name: str, values: Any) -> Any:
    if len(values) != 1:
        raise HpctkError(f"is damaged: progress has {len(values)} rows instead of one")
    value = values[0].item()
    if isinstance(value, int) and value < 0:
        raise HpctkError(f"is damaged: progress says {name} = {value}")
    return value


def _filled(name: str, progress: Mapping[str, Any]) -> int | None:
    """Return how many rows of a table are filled, None for all."""
    rows = progress.get(f"{name}_rows")
    return None if rows is None else int(rows)


def _check_rows(
    name: str, columns: Mapping[str, Stored], progress: Mapping[str, Any], size: int | None
) -> None:
    room = next(iter(columns.values())).rows
    rows = _filled(name, progress)
    if rows is not None and rows > room:
        raise HpctkError(f"is damaged: progress says {rows} rows of {name}, there are {room}")
    if name == "peers" and size is not None and room != size:
        raise HpctkError(f"is damaged: it has {room} peers and {size} ranks")
    if name == "sizes" and room != schema.SIZE_BINS:
        raise HpctkError(f"is damaged: sizes has {room} rows instead of {schema.SIZE_BINS}")


def _values(descriptor: int, columns: Mapping[str, Stored], last: int | None = None, first: int = 0) -> Table:
    """Read the rows from `first` to before `last` of columns, None for all."""
    table = {}
    for name, stored in columns.items():
        rows = max(0, (stored.rows if last is None else last) - first)
        table[name] = np.empty(rows, stored.dtype)
        place = stored.offset + first * stored.dtype.itemsize
        left: Any = table[name].view(np.uint8)
        while len(left):
            count = os.preadv(descriptor, [left], place)
            if not count:
                raise HpctkError("is cut off")
            left, place = left[count:], place + count
    return table

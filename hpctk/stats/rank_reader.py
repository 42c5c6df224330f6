"""One rank's statistics file, wherever it may come from, checked before it is read.

What comes out is what schema.py says, or an HpctkError that names the file and what is wrong with it. HDF5 says once
where the columns lie; rows are read straight from there, as they were written. Only what lies in the file itself, in
one piece, is read: so a file never costs more memory than it is long. A report opens a thousand files with 84 columns
each, hence h5py's low-level interface, which needs a fifth of the time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpctk import hdf5
from hpctk.errors import HpctkError
from hpctk.telemetry import schema
from hpctk.telemetry.schema import Column, Table, TableFormat

Value = str | int | float

_ALL = tuple(schema.TABLES)
#: More ranks than there will be: a file that says so is damaged.
MOST_RANKS = 1 << 24
#: The longest text in a column, in bytes.
LONGEST_TEXT = 1024
#: Attributes that every file must have.
_NEEDED = ("schema", "schema_version", "state", "rank", "size")
#: By kind of attribute: its Python type, what that is called, and what stands for a missing one.
_KINDS: dict[str, tuple[Any, str, Value]] = {
    "S": (str, "text", ""),
    "<i8": (int, "a whole number", -1),
    "<f8": ((int, float), "a number", float("nan")),
}
#: What hpctk writes, so that it is known at once.
_NUMBERS = ((h5py.h5t.STD_I64LE, np.dtype("<i8")), (h5py.h5t.IEEE_F64LE, np.dtype("<f8")))


class Stored(NamedTuple):
    """Where a column lies in its file; nowhere, where the offset is None: it reads as zeros."""

    offset: int | None
    rows: int
    dtype: np.dtype[Any]


class RankReader:
    """One rank's file, and where its columns lie.

    `tables` are read at once, into the attribute of that name; those in `checked` must be readable, too. `attributes`
    and `environment` are what the file says of itself, `progress` how far its tables are filled.
    """

    def __init__(self, path: Path, tables: Sequence[str] = (), checked: Sequence[str] = _ALL) -> None:
        self.path = path
        with opened(path) as (root, descriptor):
            self.attributes = _checked_attributes(_attributes(root))
            names = dict.fromkeys(["progress", *tables, *checked])
            self._columns = {name: _columns(root, schema.TABLES[name]) for name in names}
            rows = _values(descriptor, self._columns["progress"])
            self.progress = {name: _progress(name, values) for name, values in rows.items()}
            for name in names:
                self._check_rows(name)
            self.tables = {name: self._table(descriptor, name) for name in tables}
            self.environment, self._identity = _environment(root), _identity(descriptor)

    def read(
        self, tables: Sequence[str], columns: Sequence[str] | None = None, rows: slice = slice(None)
    ) -> dict[str, Table]:
        """Return tables, or some columns and rows of them; no more is read.

        Rows are those that progress counted when the file was opened: one that has grown since is cut to what it was.
        """
        if all(name in self._columns for name in tables):
            with _named(self.path), self.path.open("rb", buffering=0) as file:
                if _identity(file.fileno()) == self._identity:
                    return {name: self._table(file.fileno(), name, columns, rows) for name in tables}
        # Not looked for yet; or a larger file has replaced it, or a closed one, and they lie elsewhere.
        now = RankReader(self.path, checked=[*self._columns, *tables])
        self._columns, self._identity = now._columns, now._identity
        return self.read(tables, columns, rows)

    def _table(
        self, descriptor: int, name: str, columns: Sequence[str] | None = None, rows: slice = slice(None)
    ) -> Table:
        self._check_rows(name)
        stored = self._columns[name]
        first, last, _ = rows.indices(self.progress.get(f"{name}_rows", _rows(stored)))
        return _values(descriptor, {column: stored[column] for column in columns or stored}, first, last)

    def _check_rows(self, name: str) -> None:
        room, filled = _rows(self._columns[name]), self.progress.get(f"{name}_rows", 0)
        if filled > room:
            raise HpctkError(f"is damaged: progress says {filled} rows of {name}, there are {room}")
        if name == "peers" and room != self.attributes["size"]:
            raise HpctkError(f"is damaged: it has {room} peers and {self.attributes['size']} ranks")
        if name == "sizes" and room != schema.SIZE_BINS:
            raise HpctkError(f"is damaged: sizes has {room} rows instead of {schema.SIZE_BINS}")


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
    """Open a file; yield its root, a `h5py.h5g.GroupID`, and a descriptor. Errors in the block name the file."""
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
    """Raise errors of the block as HpctkError that names the file."""
    try:
        yield
    except HpctkError as error:
        raise HpctkError(f"{path}: {error}") from None
    except hdf5.ERRORS as error:
        reason = hdf5.reason(error)
        if getattr(error, "errno", None):
            why = f"cannot be read ({reason})"
        elif "file signature not found" in reason:
            why = "is no HDF5 file"
        else:
            why = f"is {'cut off' if 'truncated file' in reason else 'damaged'} ({reason})"
        raise HpctkError(f"{path}: {why}") from None


def _identity(descriptor: int) -> tuple[int, int, int]:
    """Return what is another where a file was replaced."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size


def _attributes(parent: Any) -> dict[str, Value | None]:
    names: list[bytes] = []
    h5py.h5a.iterate(parent, names.append)
    return {name.decode(errors="replace"): _value(h5py.h5a.open(parent, name)) for name in names}


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


def _checked_attributes(raw: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return a file's attributes, those that are missing too, once they are what they should be."""
    if raw.get("schema") != schema.NAME:
        raise HpctkError(f"is no statistics file of hpctk (its attribute schema is not {schema.NAME!r})")
    check_version(raw.get("schema_version"), schema.VERSION)
    for name in _NEEDED:
        if name not in raw:
            raise HpctkError(f"lacks the attribute {name}")
    attributes = typed(raw)
    rank, size, node = (int(attributes[name]) for name in ("rank", "size", "node"))
    if not 0 <= rank < size <= MOST_RANKS:
        raise HpctkError(f"is damaged: it says to be of rank {rank} of {size}")
    if not -1 <= node < size:
        raise HpctkError(f"is damaged: it says to be of node {node}, with {size} ranks")
    return attributes


def typed(raw: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return all attributes that there are, known ones of their type, and "", -1 or NaN for those that are missing."""
    attributes = {name: value for name, value in raw.items() if value is not None}
    for column in schema.ATTRIBUTES:
        kind, kind_name, absent = _KINDS[column.kind]
        if column.name not in raw:
            attributes[column.name] = absent
        elif not isinstance(raw[column.name], kind):
            raise HpctkError(f"is damaged: its attribute {column.name} must be {kind_name}")
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
    attributes = _attributes(hdf5.group(root, "environment"))
    return {name: value for name, value in attributes.items() if isinstance(value, str)}


def _columns(root: Any, table: TableFormat) -> dict[str, Stored]:
    """Return where a table's columns lie, all as long."""
    group = hdf5.group(root, table.name)
    there = [column for column in table.columns if not column.later or group.links.exists(column.name.encode())]
    columns = {column.name: _column(group, table.name, column) for column in there}
    rows = {stored.rows for stored in columns.values()}
    if len(rows) > 1:
        raise HpctkError(f"is damaged: the columns of {table.name} have {min(rows)} to {max(rows)} rows")
    # Columns that lie upon each other could be many times as long as the file.
    nbytes = sum(stored.rows * stored.dtype.itemsize for stored in columns.values())
    if nbytes > h5py.h5i.get_file_id(root).get_filesize():
        raise HpctkError(f"is damaged: {table.name} is longer than the file")
    for column in table.columns:
        columns.setdefault(column.name, Stored(None, min(rows), np.dtype(column.kind)))
    return columns


def _column(group: Any, table: str, column: Column) -> Stored:
    dataset = hdf5.dataset(group, column.name)
    dtype, name = _dtype(dataset.get_type()), f"{table}/{column.name}"
    offset, nbytes = dataset.get_offset(), dataset.get_storage_size()
    if dtype is None or (dtype.kind != "S" if column.kind[0] == "S" else dtype.str != column.kind):
        raise HpctkError(f"is damaged: {name} is of type {dataset.dtype.str}, not {column.kind}")
    if dtype.itemsize > LONGEST_TEXT:
        raise HpctkError(f"is damaged: {name} has text of {dtype.itemsize} bytes")
    if offset is None and nbytes:
        raise HpctkError(f"is not as hpctk writes it: {name} does not lie in one piece")
    return Stored(offset or 0, nbytes // dtype.itemsize, dtype)


def _progress(name: str, values: Any) -> Any:
    if len(values) != 1:
        raise HpctkError(f"is damaged: progress has {len(values)} rows instead of one")
    value = values[0].item()
    if isinstance(value, int) and value < 0:
        raise HpctkError(f"is damaged: progress says {name} = {value}")
    return value


def _rows(columns: Mapping[str, Stored]) -> int:
    return next(iter(columns.values())).rows


def _values(descriptor: int, columns: Mapping[str, Stored], first: int = 0, last: int | None = None) -> Table:
    """Read the rows from `first` to before `last` of columns, to the end where None."""
    table = {}
    for name, stored in columns.items():
        rows = max(0, (stored.rows if last is None else last) - first)
        if stored.offset is None:
            table[name] = np.zeros(rows, stored.dtype)
            continue
        table[name] = np.empty(rows, stored.dtype)
        offset = stored.offset + first * stored.dtype.itemsize
        unread: Any = table[name].view(np.uint8)
        while len(unread):
            count = os.preadv(descriptor, [unread], offset)
            if not count:
                raise HpctkError("is cut off")
            unread, offset = unread[count:], offset + count
    return table

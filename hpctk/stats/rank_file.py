"""One rank's statistics file: HDF5 lays it out once, then its rows are filled in place.

After SIGKILL a file that HDF5 was appending to may be unreadable. So HDF5 only makes it: fixed, contiguous datasets
with room for more rows, beside the file's place, renamed when whole. From then on rows are written straight to where
the datasets lie and touch nothing else; `progress` is written last and says how many there are. Where the room ends,
a larger file is made in the same way. Whenever the process dies, what stands there is a whole HDF5 file, readable by
everybody and while it grows, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk.stats import schema
from hpctk.stats.schema import TABLES, Column, TableFormat

Attributes = Mapping[str, str | int | float]


class RankFile:
    """A statistics file that is being written.

    Parameters
    ----------
    path : Path
        Replaced where there is one.
    attributes : mapping
        What describes the recording; strings and numbers.
    environment : mapping
        Environment variables worth keeping.
    rows : mapping of str to int
        The rows that each table has room for.
    """

    def __init__(
        self, path: Path, attributes: Attributes, environment: Mapping[str, str], rows: Mapping[str, int]
    ) -> None:
        self.path = path
        self._attributes, self._environment = dict(attributes), dict(environment)
        self.rows = dict(rows)
        self._descriptor, self._offsets = self._make("running", {})

    def write(self, table: TableFormat, first: int, rows: Any) -> None:
        """Write rows, an array of the table's dtype, from row `first` on; there must be room."""
        for column in table.columns:
            offset = self._offsets[table.name, column.name] + first * rows.dtype[column.name].itemsize
            _write_all(self._descriptor, rows[column.name].tobytes(), offset)

    def grow(self, table: TableFormat, rows: int) -> None:
        """Make room for more rows of a table."""
        kept = self._read(self.rows)
        self.rows[table.name] = rows
        self._replace("running", kept)

    def close(self, rows: Mapping[str, int]) -> None:
        """Cut the tables to their rows and mark the file as closed."""
        kept = self._read({**self.rows, **rows})
        self.rows = {name: len(table) for name, table in kept.items()}
        self._replace("closed", kept)
        os.close(self._descriptor)

    def abandon(self) -> None:
        """Leave the file as it is."""
        with suppress(OSError):
            os.close(self._descriptor)

    def _replace(self, state: str, kept: Mapping[str, Any]) -> None:
        descriptor, offsets = self._make(state, kept)
        os.close(self._descriptor)
        self._descriptor, self._offsets = descriptor, offsets

    def _read(self, rows: Mapping[str, int]) -> dict[str, Any]:
        """Return the first rows of each table."""
        tables = {name: np.zeros(rows[name], table.dtype) for name, table in TABLES.items()}
        for (name, column), offset in self._offsets.items():
            field = tables[name][column]
            field[:] = np.frombuffer(os.pread(self._descriptor, field.nbytes, offset), field.dtype)
        return tables

    def _make(self, state: str, kept: Mapping[str, Any]) -> tuple[int, dict[tuple[str, str], int]]:
        """Lay out a whole file beside its place, and put it there; return a descriptor and where columns lie."""
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            # The oldest format: every HDF5 reads it, and so does plain_hdf5.py.
            with h5py.File(unfinished, "w", libver="earliest", locking="best-effort") as file:
                file.attrs.update(_plain({"schema": schema.NAME, "schema_version": schema.VERSION}))
                file.attrs.update(_plain({"state": state, **self._attributes}))
                file.create_group("environment").attrs.update(_plain(self._environment))
                datasets = {
                    (name, column.name): dataset
                    for name, table in TABLES.items()
                    for column, dataset in lay_out(file, table, self.rows[name], kept.get(name))
                }
                file.flush()
                offsets = {place: dataset.id.get_offset() or 0 for place, dataset in datasets.items()}
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CLOEXEC)
            # The room is there or it is not: a disk that fills up must not fail in the middle of a row.
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
            unfinished.replace(self.path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        return descriptor, offsets


def lay_out(file: Any, table: TableFormat, rows: int, kept: Any = None) -> list[tuple[Column, Any]]:
    """Make a table's group and datasets, filled with the rows that are there; return the datasets by column."""
    group = file.create_group(table.name)
    group.attrs.update(_plain({"long_name": table.description}))
    made = []
    for column in table.columns:
        values = np.zeros(rows, stored(column))
        if kept is not None:
            values[: len(kept)] = kept[column.name]
        dataset = group.create_dataset(column.name, data=values)
        describe(dataset, column)
        made.append((column, dataset))
    scale = made[0][1]
    scale.make_scale(table.columns[0].name)
    for _, dataset in made[1:]:
        dataset.dims[0].attach_scale(scale)
    return made


def describe(dataset: Any, column: Column) -> None:
    """Give a dataset its units and long name."""
    dataset.attrs.update(_plain({"units": column.units, "long_name": column.long_name}))


def stored(column: Column) -> Any:
    """Return a column's type in HDF5: strings say that they are UTF-8."""
    return h5py.string_dtype("utf-8", int(column.kind[1:])) if column.kind[0] == "S" else column.kind


def put_attributes(place: Any, attributes: Attributes) -> None:
    """Give a file, group or dataset attributes."""
    place.attrs.update(_plain(attributes))


def _plain(attributes: Attributes) -> dict[str, Any]:
    """Return attributes with strings of fixed length: whoever reads them can see how long they are."""
    return {name: _fixed(value) if isinstance(value, str) else value for name, value in attributes.items()}


def _fixed(text: str) -> Any:
    data = text.encode(errors="backslashreplace")
    return np.array(data, h5py.string_dtype("utf-8", max(1, len(data))))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written

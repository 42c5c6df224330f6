"""One rank's statistics file: HDF5 lays it out once, then its rows are filled in place.

After SIGKILL a file that HDF5 was appending to may be unreadable, and where the disk is full HDF5 may take the process
with it. So HDF5 never touches the disk: it lays out a file in memory, with fixed, contiguous datasets and room for
more rows, which are holes there. The rest is copied to the disk, into a file beside the target, room and all, and
renamed when complete. From then on rows are written straight to where the datasets lie and touch nothing else;
`progress` is written last and says how many there are. Where the room ends, a larger file is made in the same way.
Whenever the process dies, what stands there is a complete HDF5 file, readable by everybody and while it grows, too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk.telemetry import schema
from hpctk.telemetry.schema import TABLES, Column, TableFormat

Attributes = Mapping[str, str | int | float]
#: Bytes that are copied at once.
PIECE = 2**20
#: Where the bytes of a column begin, by table and column.
Offsets = dict[tuple[str, str], int]


class RankFile:
    """A statistics file that is being written; one that is there is replaced.

    `attributes` describe the recording, `environment` has variables worth keeping, `rows` the rows that each table has
    room for.
    """

    def __init__(
        self, path: Path, attributes: Attributes, environment: Mapping[str, str], rows: Mapping[str, int]
    ) -> None:
        self.path = path
        self._attributes, self._environment = dict(attributes), dict(environment)
        self.rows = dict(rows)
        self._descriptor, self._offsets = self._make("running", self.rows)

    def write(self, table: TableFormat, first: int, rows: Any) -> None:
        """Write rows, an array of the table's dtype, from row `first` on; there must be room."""
        for column in table.columns:
            offset = self._offsets[table.name, column.name] + first * rows.dtype[column.name].itemsize
            _write_all(self._descriptor, rows[column.name].tobytes(), offset)

    def grow(self, table: TableFormat, rows: int) -> None:
        """Make room for more rows of a table."""
        self._replace("running", {**self.rows, table.name: rows})

    def close(self, rows: Mapping[str, int]) -> None:
        """Cut the tables to their rows and mark the file as closed."""
        self._replace("closed", {**self.rows, **rows})
        os.close(self._descriptor)

    def abandon(self) -> None:
        """Leave the file as it is."""
        with suppress(OSError):
            os.close(self._descriptor)

    def _replace(self, state: str, rows: Mapping[str, int]) -> None:
        """Make a file with other numbers of rows, and what was written so far."""
        descriptor, offsets = self._make(state, rows, self._descriptor)
        os.close(self._descriptor)
        self._descriptor, self._offsets, self.rows = descriptor, offsets, dict(rows)

    def _make(self, state: str, rows: Mapping[str, int], old: int | None = None) -> tuple[int, Offsets]:
        """Replace the file by a complete new one; return a descriptor and where columns lie."""
        image, offsets = self._laid_out(state, rows)
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        descriptor = -1
        try:
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            # The room is there or it is not: a disk that fills up must not fail in the middle of a row.
            os.posix_fallocate(descriptor, 0, os.fstat(image).st_size)
            _copy_data(image, descriptor)
            if old is not None:
                self._copy_rows(old, descriptor, offsets, rows)
            unfinished.replace(self.path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            if descriptor >= 0:
                os.close(descriptor)
            raise
        finally:
            os.close(image)
        return descriptor, offsets

    def _copy_rows(self, old: int, new: int, offsets: Offsets, rows: Mapping[str, int]) -> None:
        for name, table in TABLES.items():
            for column in table.columns:
                nbytes = min(rows[name], self.rows[name]) * table.dtype[column.name].itemsize
                source, target = self._offsets[name, column.name], offsets[name, column.name]
                for done in range(0, nbytes, PIECE):
                    data = os.pread(old, min(PIECE, nbytes - done), source + done)
                    _write_all(new, data, target + done)

    def _laid_out(self, state: str, rows: Mapping[str, int]) -> tuple[int, Offsets]:
        """Return an empty file in memory, and where its columns lie."""
        image = os.memfd_create("hpctk-stats")
        with open(image, "w+b", buffering=0, closefd=False) as raw, h5py.File(raw, "w", libver="earliest") as file:
            put_attributes(file, {"schema": schema.NAME, "schema_version": schema.VERSION, "state": state})
            put_attributes(file, self._attributes)
            put_attributes(file.create_group("environment"), self._environment)
            offsets = {}
            for name, table in TABLES.items():
                for column, dataset in _lay_out(file, table, rows[name]).items():
                    offsets[name, column] = dataset.id.get_offset() or 0
        return image, offsets


def _lay_out(file: Any, table: TableFormat, rows: int) -> dict[str, Any]:
    """Make a table's group and datasets, with room for rows but none written; return the datasets by column."""
    group = file.create_group(table.name)
    put_attributes(group, {"long_name": table.description})
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.CONTIGUOUS)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    datasets = {}
    for column in table.columns:
        kind = h5py.h5t.py_create(np.dtype(stored(column)), logical=True)
        space = h5py.h5s.create_simple((rows,))
        dataset = h5py.Dataset(h5py.h5d.create(group.id, column.name.encode(), kind, space, plan))
        describe(dataset, column)
        datasets[column.name] = dataset
    scale, *others = datasets.values()
    scale.make_scale(table.columns[0].name)
    for dataset in others:
        dataset.dims[0].attach_scale(scale)
    return datasets


def describe(dataset: Any, column: Column) -> None:
    """Give a dataset its units and long name."""
    put_attributes(dataset, {"units": column.units, "long_name": column.long_name})


def stored(column: Column) -> Any:
    """Return a column's type in HDF5: strings say that they are UTF-8."""
    return h5py.string_dtype("utf-8", int(column.kind[1:])) if column.kind[0] == "S" else column.kind


def put_attributes(owner: Any, attributes: Attributes) -> None:
    """Give a file, group or dataset attributes; strings of fixed length, so that readers see how long they are."""
    for name, value in attributes.items():
        if isinstance(value, str):
            data = value.encode(errors="backslashreplace")
            owner.attrs[name] = np.array(data, h5py.string_dtype("utf-8", max(1, len(data))))
        else:
            owner.attrs[name] = value


def _copy_data(source: int, target: int) -> None:
    """Copy a file without its holes; those read as zeros in the target, which was just made."""
    end, offset = os.fstat(source).st_size, 0
    while offset < end:
        try:
            offset = os.lseek(source, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        hole = os.lseek(source, offset, os.SEEK_HOLE)
        _write_all(target, os.pread(source, hole - offset, offset), offset)
        offset = hole


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written

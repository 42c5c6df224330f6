"""Merged files read back: a view by what it is a view of, a copy by itself.

A view says where its run is, below its own folder, and the ranks' files there are read; its virtual datasets, which
could name any file, never are. A copy's table of ranks is plain and read like a rank's file; its other tables are
compressed, so HDF5 reads them, once their shapes agree with that table and no more is declared than compressed bytes
can hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk import hdf5
from hpctk.errors import HpctkError
from hpctk.stats import merged_format, rank_reader
from hpctk.stats.merged_format import JOINED, OWN, RANKS
from hpctk.stats.read import RankStats, RecordingStats, RunStats, Wanted, load
from hpctk.telemetry import schema
from hpctk.telemetry.schema import Table

#: Bytes that one byte of deflate can stand for.
_MOST_DENSE = 1032
#: Bytes of a chunk: those that hpctk writes are a megabyte at most, of peers 512 bytes for each rank.
_CHUNK_BYTES = 1 << 28
#: Rows of peers that are read at once.
_BLOCK = 64


def load_merged(path: Path, attributes: dict[str, Any], wanted: Wanted) -> RunStats:
    """Read a merged file whose root has these attributes."""
    try:
        rank_reader.check_version(attributes.get("schema_version"), merged_format.VERSION)
        if attributes.get("storage") == "copy":
            kept = {name: value for name, value in attributes.items() if name not in OWN}
            common = {**rank_reader.typed(kept), "schema": schema.NAME, "schema_version": schema.VERSION}
            return _load_copy(path, common, wanted.tables)
    except HpctkError as error:
        raise HpctkError(str(error) if str(error).startswith(f"{path}: ") else f"{path}: {error}") from None
    run = attributes.get("run")
    if not isinstance(run, str) or not run or "\0" in run:
        raise HpctkError(f"{path}: is damaged: it does not say where its run is")
    if Path(run).is_absolute() or ".." in Path(run).parts:
        raise HpctkError(
            f"{path}: is a view of {run}, outside its own folder: load that one if you trust the file"
        )
    folder = path.parent / run
    if not folder.is_dir():
        raise HpctkError(
            f"{path}: is a view of {folder}, which is not there (hpctk merge --copy stands by itself)"
        )
    return load(folder, wanted.tables, checked=wanted.checked)


def _load_copy(path: Path, common: dict[str, Any], tables: tuple[str, ...]) -> RunStats:
    ranks, environment = rank_reader.read_one_table(path, RANKS)
    columns = [ranks[name].tolist() for name in ranks]
    rows = [dict(zip(ranks, values, strict=True)) for values in zip(*columns, strict=True)]
    sizes = _check(rows)
    shapes: dict[str, tuple[int, ...]] = {name: (sum(_rows(name, row) for row in rows),) for name in JOINED}
    shapes["peers"] = (len(sizes), max(sizes.values(), default=0), max(sizes.values(), default=0))
    copy = _Copy(path, shapes)
    index = {number: place for place, number in enumerate(sizes)}
    found = {number: RecordingStats(number, size, {}, {}) for number, size in sizes.items()}
    first = dict.fromkeys(JOINED, 0)
    for row in rows:
        number, rank, size = row["recording"], row["rank"], row["size"]
        if not row["present"]:
            found[number].missing[rank] = row["reason"].decode(errors="replace")
            continue
        progress = {column.name: row[column.name] for column in schema.PROGRESS.columns}
        places = {name: (first[name], _rows(name, row)) for name in JOINED}
        source = _RankOfCopy(copy, places, (index[number], rank, size), progress)
        one = RankStats(path, rank, size, {**common, **_described(row)}, environment, progress, {}, source)
        one.keep(tables)
        found[number].ranks[rank] = one
        first = {name: first[name] + _rows(name, row) for name in JOINED}
    recordings = [recording for recording in found.values() if recording.ranks]
    if not recordings:
        raise HpctkError("no rank in it left a file")
    return RunStats(path, recordings)


def _described(row: dict[str, Any]) -> dict[str, Any]:
    """Return what the table of ranks says of the attributes of a rank's file."""
    known = {column.name for column in schema.ATTRIBUTES}
    return {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value
        for name, value in row.items()
        if name in known
    }


def _check(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Return the size of each recording; HpctkError where the table of ranks contradicts itself."""
    sizes: dict[int, int] = {}
    counts = [column.name for column in schema.PROGRESS.columns if column.kind == "<i8"]
    for row in rows:
        size = sizes.setdefault(row["recording"], row["size"])
        if row["size"] != size or not 0 <= row["rank"] < size or row["recording"] < 0 or row["node"] >= size:
            raise HpctkError(f"is damaged: its table of ranks has rank {row['rank']} of {row['size']}")
        if row["present"] and min(row[name] for name in counts) < 0:
            raise HpctkError(
                f"is damaged: its table of ranks says that rank {row['rank']} has less than no rows"
            )
    if len({(row["recording"], row["rank"]) for row in rows}) != len(rows) or sum(sizes.values()) != len(
        rows
    ):
        raise HpctkError("is damaged: its table of ranks does not have one row for each")
    return sizes


def _rows(name: str, row: dict[str, Any]) -> int:
    if not row["present"]:
        return 0
    return int(row.get(f"{name}_rows", schema.SIZE_BINS))


@dataclass(frozen=True)
class _RankOfCopy:
    """One rank's part of a copy: first row and number of rows by table, recording, rank and size in peers."""

    copy: _Copy
    places: dict[str, tuple[int, int]]
    cell: tuple[int, int, int]
    progress: dict[str, Any]

    def read(
        self, tables: Sequence[str], columns: Sequence[str] | None = None, rows: slice = slice(None)
    ) -> dict[str, Table]:
        """Return tables, or some columns and rows of them."""
        found = {name: self._table(name) for name in tables}
        return {
            name: {column: table[column][rows] for column in columns or table}
            for name, table in found.items()
        }

    def _table(self, name: str) -> Table:
        if name == "progress":
            return {c.name: np.array([self.progress[c.name]], c.kind) for c in schema.PROGRESS.columns}
        if name == "peers":
            return self.copy.peers(*self.cell)
        return self.copy.rows(name, *self.places[name])


class _Copy:
    """The compressed tables of a copy; ranks that follow each other share what is unpacked for them."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self._shapes = path, shapes
        self._window: dict[str, tuple[int, int, Table]] = {}
        self._block: tuple[tuple[int, int], Table] | None = None

    def rows(self, name: str, first: int, count: int) -> Table:
        """Return rows of a table."""
        begin, end, table = self._window.get(name, (0, 0, {}))
        if not table or not begin <= first <= first + count <= end:
            step = merged_format.CHUNK_ROWS
            begin = first // step * step
            end = min(-(-(first + count) // step) * step, self._shapes[name][0])
            table = self._columns(name, schema.TABLES[name].columns, np.s_[begin:end])
            self._window[name] = (begin, end, table)
        return {column: values[first - begin : first - begin + count] for column, values in table.items()}

    def peers(self, recording: int, rank: int, size: int) -> Table:
        """Return what a rank exchanged with its peers."""
        key, start = (recording, rank // _BLOCK), rank // _BLOCK * _BLOCK
        if self._block is None or self._block[0] != key:
            place = np.s_[recording, start : start + _BLOCK, :size]
            self._block = key, self._columns("peers", schema.PEERS.columns[1:], place)
        rows = {column: values[rank - start] for column, values in self._block[1].items()}
        return {"peer": np.arange(size), **rows}

    def _columns(self, name: str, columns: Any, place: Any) -> Table:
        with rank_reader.opened(self.path) as (root, _):
            group = hdf5.group(root, name)
            return {c.name: self._checked(group, name, c)[place].astype(c.kind) for c in columns}

    def _checked(self, group: Any, name: str, column: schema.Column) -> Any:
        """Return a dataset once it is what `hpctk merge --copy` writes, and no longer than it can be."""
        called, shape = f"{name}/{column.name}", self._shapes[name]
        data = h5py.Dataset(hdf5.dataset(group, column.name))
        if data.dtype.kind != np.dtype(column.kind).kind or data.dtype.itemsize > rank_reader.LONGEST_TEXT:
            raise HpctkError(f"is damaged: {called} is of type {data.dtype.str}, not {column.kind}")
        if data.shape != shape:
            raise HpctkError(f"is damaged: {called} has the shape {data.shape}, not {shape}")
        chunk = math.prod(data.chunks or (1,)) * data.dtype.itemsize
        plan = data.id.get_create_plist()
        filters = {plan.get_filter(i)[0] for i in range(plan.get_nfilters())}
        if not filters <= {h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE} or chunk > _CHUNK_BYTES:
            raise HpctkError(f"is not as hpctk writes it: {called} is packed in another way")
        length = math.prod(shape) * data.dtype.itemsize
        # Of peers a few rows are read at a time, and those of absent ranks are nowhere.
        if name != "peers" and length > data.id.get_storage_size() * _MOST_DENSE + chunk:
            raise HpctkError(f"is damaged: {called} declares {length} bytes that are not there")
        return data

"""Merged files: what stands in them (docs/hdf5-format.md), and how they are read back.

The tables of all recordings and ranks stand one after the other. A view says where its run is, below its own folder,
and the ranks' files there are read; its virtual datasets, which could name any file, never are. A copy's table of ranks
is plain and read like a rank's file; its other tables are compressed, so HDF5 reads them, once their shapes agree with
that table and no more is declared than compressed bytes can hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk import hdf5
from hpctk.errors import HpctkError
from hpctk.stats import rank_reader
from hpctk.stats.read import Names, RankStats, Read, RecordingStats, RunStats, load
from hpctk.telemetry import schema
from hpctk.telemetry.schema import CALLS, PROGRESS, SIZES, STEPS, SUMMARY, Column, Table, TableFormat

NAME = "hpctk-stats-merged"
#: Raised when a reader of the version before would misread the file.
VERSION = 1
#: Rows of a chunk of a copy.
CHUNK_ROWS = 16384
#: Attributes of a merged file that a rank's has not, or that say something else there.
OWN = ("schema", "schema_version", "storage", "run", "merged_by")

ROW = Column("row", "<i8", "1", "number of the row")
RECORDING = Column("recording", "<i8", "1", "number of the recording, from 0")
RANK = Column("rank", "<i8", "1", "rank in the communicator of the recording")
RANKS = TableFormat(
    "ranks",
    "one row for each recording and rank, whether it left a file or not",
    (
        ROW,
        RECORDING,
        RANK,
        Column("size", "<i8", "1", "ranks in the recording"),
        Column("present", "<i8", "1", "1 where there was a file that could be read, 0 where not: see reason"),
        Column("state", "S16", "", "closed, or running where the rank died or still runs; empty for absent ones"),
        Column("reason", "S240", "", "why an absent rank is absent"),
        Column("file", "S240", "", "the rank's file, from where the merged file is"),
        Column("host", "S64", "", "name of the machine"),
        Column("node", "<i8", "1", "number of the node, from 0 in the order of their first ranks"),
        Column("local_rank", "<i8", "1", "rank on the node"),
        Column("pid", "<i8", "1", "process"),
        Column("began_unix_s", "<f8", "s", "when the recording began, since 1970 in UTC, by the machine's clock"),
        Column("clock_offset_s", "<f8", "s", "a time of this rank plus this is a time of rank 0"),
        Column("clock_error_s", "<f8", "s", "that is right up to this much"),
        *PROGRESS.columns,
    ),
)  # fmt: skip
#: Tables whose rows of all ranks come one after the other, after row, recording and rank.
JOINED = {
    table.name: TableFormat(table.name, table.description, (ROW, RECORDING, RANK, *table.columns))
    for table in (CALLS, STEPS, SUMMARY, SIZES)
}

#: First row and number of rows, by table.
Ranges = dict[str, tuple[int, int]]
#: Bytes that one byte of deflate can stand for.
_MOST_DENSE = 1032
#: Bytes of a chunk: those that hpctk writes are a megabyte at most, of peers 512 bytes for each rank.
_CHUNK_BYTES = 1 << 28
#: Rows of peers that are read at once.
_BLOCK = 64


def load_merged(path: Path, attributes: dict[str, Any], tables: Names, checked: Names) -> RunStats:
    """Read a merged file whose root has these attributes."""
    try:
        rank_reader.check_version(attributes.get("schema_version"), VERSION)
        if attributes.get("storage") == "copy":
            shared = rank_reader.typed({name: value for name, value in attributes.items() if name not in OWN})
            shared |= {"schema": schema.NAME, "schema_version": schema.VERSION}
            return _load_copy(path, shared, tables)
    except HpctkError as error:
        raise HpctkError(str(error) if str(error).startswith(f"{path}: ") else f"{path}: {error}") from None
    run = attributes.get("run")
    if not isinstance(run, str) or not run or "\0" in run:
        raise HpctkError(f"{path}: is damaged: it does not say where its run is")
    if Path(run).is_absolute() or ".." in Path(run).parts:
        why = "outside its own folder: load that one if you trust the file"
        raise HpctkError(f"{path}: is a view of {run}, {why}")
    folder = path.parent / run
    if not folder.is_dir():
        why = "which is not there (hpctk merge --copy stands by itself)"
        raise HpctkError(f"{path}: is a view of {folder}, {why}")
    return load(folder, tables, checked=checked)


def _load_copy(path: Path, shared: dict[str, Any], tables: Names) -> RunStats:
    ranks, environment = rank_reader.read_one_table(path, RANKS)
    columns = [ranks[name].tolist() for name in ranks]
    rows = [dict(zip(ranks, values, strict=True)) for values in zip(*columns, strict=True)]
    recordings = {number: RecordingStats(number, size, {}) for number, size in _sizes(rows).items()}
    largest = max((one.size for one in recordings.values()), default=0)
    shapes: dict[str, tuple[int, ...]] = {name: (sum(_rows(name, row) for row in rows),) for name in JOINED}
    copy = _Copy(path, {**shapes, "peers": (len(recordings), largest, largest)})
    indices = {number: index for index, number in enumerate(recordings)}
    described = {column.name for column in schema.ATTRIBUTES}
    first = dict.fromkeys(JOINED, 0)
    for row in rows:
        number, rank, size = row["recording"], row["rank"], row["size"]
        texts = {name: text.decode(errors="replace") for name, text in row.items() if isinstance(text, bytes)}
        if not row["present"]:
            recordings[number].missing[rank] = texts["reason"]
            continue
        progress = {column.name: row[column.name] for column in PROGRESS.columns}
        attributes = {name: value for name, value in {**row, **texts}.items() if name in described}
        ranges = {name: (first[name], _rows(name, row)) for name in JOINED}
        read = copy.reader(ranges, (indices[number], rank, size), progress)
        loaded = read(tables, None, slice(None))
        recordings[number].ranks[rank] = RankStats(
            path, rank, size, {**shared, **attributes}, environment, progress, loaded, read
        )
        first = {name: start + rows_of_rank for name, (start, rows_of_rank) in ranges.items()}
    readable = [recording for recording in recordings.values() if recording.ranks]
    if not readable:
        raise HpctkError("no rank in it left a file")
    return RunStats(path, readable)


def _sizes(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Return the size of each recording; HpctkError where the table of ranks contradicts itself."""
    sizes: dict[int, int] = {}
    counts = [column.name for column in PROGRESS.columns if column.kind == "<i8"]
    for row in rows:
        size = sizes.setdefault(row["recording"], row["size"])
        if row["size"] != size or not 0 <= row["rank"] < size or row["recording"] < 0 or row["node"] >= size:
            raise HpctkError(f"is damaged: its table of ranks has rank {row['rank']} of {row['size']}")
        if row["present"] and min(row[name] for name in counts) < 0:
            whose = f"rank {row['rank']}"
            raise HpctkError(f"is damaged: its table of ranks says that {whose} has less than no rows")
    ranks = {(row["recording"], row["rank"]) for row in rows}
    if len(ranks) != len(rows) or sum(sizes.values()) != len(rows):
        raise HpctkError("is damaged: its table of ranks does not have one row for each")
    return sizes


def _rows(name: str, row: dict[str, Any]) -> int:
    return int(row.get(f"{name}_rows", schema.SIZE_BINS)) if row["present"] else 0


class _Copy:
    """The compressed tables of a copy; ranks that follow each other share what is unpacked for them."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self._shapes = path, shapes
        self._window: dict[str, tuple[int, int, Table]] = {}
        self._block: tuple[tuple[int, int], Table] | None = None

    def reader(self, ranges: Ranges, cell: tuple[int, int, int], progress: dict[str, Any]) -> Read:
        """Return what reads one rank's part; `cell` is its recording, rank and size in peers."""

        def table(name: str) -> Table:
            if name == "progress":
                return {c.name: np.array([progress[c.name]], c.kind) for c in PROGRESS.columns}
            return self._peers(*cell) if name == "peers" else self._joined(name, *ranges[name])

        def read(names: Names, columns: Names | None, rows: slice) -> dict[str, Table]:
            tables = {name: table(name) for name in names}
            return {name: {c: data[c][rows] for c in columns or data} for name, data in tables.items()}

        return read

    def _joined(self, name: str, first: int, count: int) -> Table:
        begin, end, table = self._window.get(name, (0, 0, {}))
        if not table or not begin <= first <= first + count <= end:
            begin = first // CHUNK_ROWS * CHUNK_ROWS
            end = min(-(-(first + count) // CHUNK_ROWS) * CHUNK_ROWS, self._shapes[name][0])
            table = self._columns(name, schema.TABLES[name].columns, np.s_[begin:end])
            self._window[name] = (begin, end, table)
        return {column: values[first - begin : first - begin + count] for column, values in table.items()}

    def _peers(self, recording: int, rank: int, size: int) -> Table:
        key, start = (recording, rank // _BLOCK), rank // _BLOCK * _BLOCK
        if self._block is None or self._block[0] != key:
            cells = np.s_[recording, start : start + _BLOCK, :size]
            self._block = key, self._columns("peers", schema.PEERS.columns[1:], cells)
        columns = {column: values[rank - start] for column, values in self._block[1].items()}
        return {"peer": np.arange(size), **columns}

    def _columns(self, name: str, columns: Sequence[Column], cells: Any) -> Table:
        with rank_reader.opened(self.path) as (root, _):
            group = hdf5.group(root, name)
            there = [c for c in columns if not c.later or group.links.exists(c.name.encode())]
            table = {c.name: self._checked(group, name, c)[cells].astype(c.kind) for c in there}
        rows = len(table[columns[0].name])
        return {c.name: table[c.name] if c.name in table else np.zeros(rows, c.kind) for c in columns}

    def _checked(self, group: Any, table: str, column: Column) -> Any:
        """Return a dataset once it is what `hpctk merge --copy` writes, and no longer than it can be."""
        name, shape = f"{table}/{column.name}", self._shapes[table]
        data = h5py.Dataset(hdf5.dataset(group, column.name))
        if data.dtype.kind != np.dtype(column.kind).kind or data.dtype.itemsize > rank_reader.LONGEST_TEXT:
            raise HpctkError(f"is damaged: {name} is of type {data.dtype.str}, not {column.kind}")
        if data.shape != shape:
            raise HpctkError(f"is damaged: {name} has the shape {data.shape}, not {shape}")
        chunk = math.prod(data.chunks or (1,)) * data.dtype.itemsize
        plan = data.id.get_create_plist()
        filters = {plan.get_filter(i)[0] for i in range(plan.get_nfilters())}
        if not filters <= {h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE} or chunk > _CHUNK_BYTES:
            raise HpctkError(f"is not as hpctk writes it: {name} is packed in another way")
        length = math.prod(shape) * data.dtype.itemsize
        # Of peers a few rows are read at a time, and those of absent ranks are nowhere.
        if table != "peers" and length > data.id.get_storage_size() * _MOST_DENSE + chunk:
            raise HpctkError(f"is damaged: {name} declares {length} bytes that are not there")
        return data

"""All ranks' statistics in one file: a view on theirs (virtual datasets), or a copy.

A view costs nothing and goes with the folder: it names the ranks' files relative to itself. What they say later, or
that they are gone, is seen through it: rows that are no longer there read as fill values. A copy stands by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk import hdf5
from hpctk._version import __version__
from hpctk.errors import HpctkError
from hpctk.stats import merged
from hpctk.stats.merged import CHUNK_ROWS, JOINED, RANK, RANKS, RECORDING, ROW
from hpctk.stats.read import RankStats, RecordingStats, RunStats
from hpctk.telemetry import schema
from hpctk.telemetry.names import FILE
from hpctk.telemetry.rank_file import Attributes, describe, put_attributes, stored
from hpctk.telemetry.schema import PEERS, Column, TableFormat

#: A view opens every rank's file when it is read. Beyond the limit of open files (ulimit -n, mostly 1024) HDF5 says
#: nothing and gives fill values.
MOST_VIEWED = 900
#: What is the same for all ranks, or near enough: of the first that is there.
COMMON = (
    "run_id", "command", "platform", "python", "hpctk", "numpy", "torch", "h5py", "mpi4py", "horovod", "numba",
    "communicator", "library", "gpu_aware", "gpu_aware_because", "method", "settings", "schedule", "events",
    "nodes", "local_size", "parameters", "parameter_bytes",
)  # fmt: skip
Shape = tuple[int, ...]
#: What stands where nothing is known.
_FILL: dict[str, int | float] = {"<i8": -1, "<f8": float("nan")}


@dataclass(frozen=True)
class Part:
    """Where a rank's rows go: the recording's number and index, first row and number of rows by table."""

    recording: int
    index: int
    rank: RankStats
    first: dict[str, int]
    rows: dict[str, int]


@dataclass(frozen=True)
class Group:
    """A group whose datasets have the same shape: the lengths of its scales."""

    group: Any
    scales: list[Any]
    shape: Shape


def why_copy(run: RunStats, target: Path) -> str:
    """Return why a view on a run would not do, empty where it would."""
    files = sum(len(recording.ranks) for recording in run.recordings)
    if files > MOST_VIEWED:
        return f"{files} files are more than most programs may open at once"
    if ".." in Path(_relative(run.path, target)).parts:
        return "a view lies in the folder of its run, or above it"
    return ""


def merge(run: RunStats, target: Path, *, copy: bool = False, force: bool = False) -> None:
    """Write one file with the statistics of all recordings and ranks, in full or not at all.

    `copy` writes the rows themselves, compressed, instead of where they are; `force` replaces a file that is there.
    """
    if FILE.fullmatch(target.name) and target.exists():
        raise HpctkError(f"{target}: is a rank's file and stays what it is")
    if target.exists() and not force:
        raise HpctkError(f"{target}: is there already; --force replaces it")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with h5py.File(unfinished, "w", libver="earliest", locking="best-effort") as file:
            _write(file, run, target, copy)
        unfinished.replace(target)
    except (OSError, RuntimeError, ValueError) as error:
        raise HpctkError(f"{target}: cannot be written ({hdf5.reason(error)})") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _write(file: Any, run: RunStats, target: Path, copy: bool) -> None:
    parts = list(_parts(run))
    first = parts[0].rank
    about: Attributes = {
        "schema": merged.NAME,
        "schema_version": merged.VERSION,
        "storage": "copy" if copy else "virtual",
        "run": "" if copy else _relative(run.path, target),
        "merged_by": f"hpctk {__version__}",
    }
    put_attributes(file, {**about, **{name: first.attributes[name] for name in COMMON}})
    put_attributes(file.create_group("environment"), first.environment)
    _put_ranks(file, run, target)
    tables = {name: _labelled(file, table, parts) for name, table in JOINED.items()}
    peers = _peers(file, run)
    if copy:
        _copy(tables, peers, parts)
    else:
        # HDF5 takes % for the beginning of a pattern.
        files = [_relative(part.rank.path, target).replace("%", "%%").encode() for part in parts]
        _view(tables, peers, parts, files)


def _parts(run: RunStats) -> Iterator[Part]:
    """Yield where every rank's rows go: in the order of recordings and ranks."""
    first = dict.fromkeys(JOINED, 0)
    for index, recording in enumerate(run.recordings):
        for rank in recording.ranks.values():
            rows = {name: int(rank.progress.get(f"{name}_rows", schema.SIZE_BINS)) for name in JOINED}
            yield Part(recording.number, index, rank, first, rows)
            first = {name: first[name] + rows[name] for name in JOINED}


def _put_ranks(file: Any, run: RunStats, target: Path) -> None:
    """Write the table of ranks."""
    rows = [row for recording in run.recordings for row in _rank_rows(recording, target)]
    group = _group(file, RANKS)
    scales: list[Any] = []
    for column in RANKS.columns:
        values = [row.get(column.name, _FILL.get(column.kind, b"")) for row in rows]
        texts = [_cut(value, column) if isinstance(value, str) else value for value in values]
        data = np.arange(len(rows)) if column is ROW else np.array(texts, column.kind)
        dataset = group.create_dataset(column.name, data=data.astype(stored(column)))
        _attach(dataset, column, scales)
        scales = scales or [dataset]


def _rank_rows(recording: RecordingStats, target: Path) -> Iterator[dict[str, Any]]:
    """Yield what the table of ranks says of a recording's."""
    for rank in range(recording.size):
        row: dict[str, Any] = {"recording": recording.number, "rank": rank, "size": recording.size}
        stats = recording.ranks.get(rank)
        if stats is None:
            empty = {"calls_rows": 0, "steps_rows": 0, "summary_rows": 0}
            yield {**row, "present": 0, "reason": recording.missing.get(rank, ""), **empty}
        else:
            path = _relative(stats.path, target)
            yield {**stats.attributes, **row, "present": 1, "file": path, **stats.progress}


def _labelled(file: Any, table: TableFormat, parts: list[Part]) -> Group:
    """Make a table's group with the columns that say whose a row is."""
    group, counts = _group(file, table), [part.rows[table.name] for part in parts]
    recordings, ranks = [part.recording for part in parts], [part.rank.rank for part in parts]
    shape = (sum(counts),)
    scale = _packed(group, ROW, shape, [], np.arange(*shape))
    _packed(group, RECORDING, shape, [scale], np.repeat(recordings, counts))
    _packed(group, RANK, shape, [scale], np.repeat(ranks, counts))
    return Group(group, [scale], shape)


def _peers(file: Any, run: RunStats) -> Group:
    """Make the group of what peers exchanged, with three scales."""
    group, size = _group(file, PEERS), max(recording.size for recording in run.recordings)
    numbers = np.array([recording.number for recording in run.recordings])
    values = {RECORDING: numbers, RANK: np.arange(size), PEERS.columns[0]: np.arange(size)}
    scales = []
    for column, data in values.items():
        scales.append(group.create_dataset(column.name, data=data.astype("<i8")))
        _attach(scales[-1], column)
    return Group(group, scales, (len(numbers), size, size))


def _copy(tables: dict[str, Group], peers: Group, parts: list[Part]) -> None:
    """Write every rank's rows, each file opened once."""
    datasets = {
        name: {c.name: _packed(to.group, c, to.shape, to.scales) for c in schema.TABLES[name].columns}
        for name, to in tables.items()
    }
    matrices = {c.name: _packed(peers.group, c, peers.shape, peers.scales) for c in PEERS.columns[1:]}
    buffered: dict[str, list[dict[str, Any]]] = {name: [] for name in JOINED}
    written = dict.fromkeys(JOINED, 0)
    for part in parts:
        of_rank = part.rank.tables(*JOINED, "peers")
        for name in JOINED:
            buffered[name].append(of_rank[name])
            end = part.first[name] + part.rows[name]
            if end - written[name] >= CHUNK_ROWS or (part is parts[-1] and end > written[name]):
                for column, dataset in datasets[name].items():
                    values = np.concatenate([table[column] for table in buffered[name]])
                    dataset[written[name] : end] = values.astype(dataset.dtype)
                buffered[name], written[name] = [], end
        for column, dataset in matrices.items():
            dataset[part.index, part.rank.rank, : part.rank.size] = of_rank["peers"][column]


def _view(tables: dict[str, Group], peers: Group, parts: list[Part], files: list[bytes]) -> None:
    """Write where every rank's rows are."""
    for name, to in tables.items():
        boxes = [((part.first[name],), (part.rows[name],)) for part in parts]
        spaces = [(file, _box(to.shape, *box), box[1]) for file, box in zip(files, boxes, strict=True)]
        for column in schema.TABLES[name].columns:
            _virtual(to, column, spaces)
    cells = [(part.index, part.rank.rank, 0) for part in parts]
    sizes = [part.rank.size for part in parts]
    spaces = [
        (file, _box(peers.shape, cell, (1, 1, size)), (size,))
        for file, cell, size in zip(files, cells, sizes, strict=True)
    ]
    for column in PEERS.columns[1:]:
        _virtual(peers, column, spaces)


def _group(file: Any, table: TableFormat) -> Any:
    group = file.create_group(table.name)
    put_attributes(group, {"long_name": table.description})
    return group


def _box(shape: Shape, first: Shape, count: Shape) -> Any:
    """Return a box in a dataspace."""
    space = h5py.h5s.create_simple(shape)
    space.select_hyperslab(first, count)
    return space


def _virtual(to: Group, column: Column, parts: Iterable[tuple[bytes, Any, tuple[int]]]) -> None:
    """Make a dataset that is elsewhere: for each part its file, its box here and its rows there."""
    if not all(to.shape):
        _packed(to.group, column, to.shape, to.scales)
        return
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # Text is empty by itself; h5py 3.16 fills it with whatever lies in memory where it is asked to.
    if column.kind in _FILL:
        plan.set_fill_value(np.array(_FILL[column.kind], column.kind))
    source = f"{to.group.name}/{column.name}".encode()
    for file, box, rows in parts:
        if all(rows):
            plan.set_virtual(box, file, source, _box(rows, (0,), rows))
    kind = h5py.h5t.py_create(np.dtype(stored(column)), logical=True)
    h5py.h5d.create(to.group.id, column.name.encode(), kind, h5py.h5s.create_simple(to.shape), plan)
    _attach(to.group[column.name], column, to.scales)


def _packed(group: Any, column: Column, shape: Shape, scales: Sequence[Any], values: Any = None) -> Any:
    """Make a compressed dataset, where there is anything to compress."""
    options: dict[str, Any] = {}
    if all(shape):
        chunk = (min(shape[0], CHUNK_ROWS),) if len(shape) == 1 else (1, min(shape[1], 64), shape[2])
        options = {"chunks": chunk, "compression": "gzip", "compression_opts": 1, "shuffle": True}
        if column.kind in _FILL:
            options["fillvalue"] = _FILL[column.kind]
    dataset = group.create_dataset(column.name, shape, stored(column), **options)
    if values is not None and len(values):
        dataset[...] = values
    _attach(dataset, column, scales)
    return dataset


def _attach(dataset: Any, column: Column, scales: Sequence[Any] = ()) -> None:
    """Describe a dataset and attach a scale to each dimension; without any it is one itself."""
    describe(dataset, column)
    if not scales:
        dataset.make_scale(column.name)
    for dimension, scale in enumerate(scales):
        dataset.dims[dimension].attach_scale(scale)


def _cut(text: str, column: Column) -> bytes:
    """Return as much of a text as a column holds, without half a character at its end."""
    data = text.encode(errors="backslashreplace")[: int(column.kind[1:])]
    return data.decode(errors="ignore").encode()


def _relative(path: Path, target: Path) -> str:
    """Return a path from where the merged file is; what lies below it as it is written, so that links may move."""
    with suppress(ValueError):
        return str(path.absolute().relative_to(target.absolute().parent))
    return os.path.relpath(path.resolve(), target.absolute().parent.resolve())

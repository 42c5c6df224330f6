"""All ranks' statistics in one file: a view on theirs (virtual datasets), or a copy.

A view costs nothing and goes with the folder: it names the ranks' files relative to itself. What they say later, or
that they are gone, is seen through it: rows that are no longer there read as fill values. A copy stands by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk import hdf5
from hpctk._version import __version__
from hpctk.errors import HpctkError
from hpctk.stats import merged_datasets as datasets
from hpctk.stats import merged_format
from hpctk.stats.merged_format import CHUNK_ROWS, JOINED, RANK, RANKS, RECORDING, ROW
from hpctk.stats.read import RankStats, RecordingStats, RunStats
from hpctk.telemetry import schema
from hpctk.telemetry.names import FILE
from hpctk.telemetry.rank_file import describe, put_attributes, stored
from hpctk.telemetry.schema import Column, TableFormat

#: A view opens every rank's file when it is read. Beyond the limit of open files (ulimit -n, mostly 1024) HDF5 says
#: nothing and gives fill values.
MOST_VIEWED = 900
#: What is the same for all ranks, or near enough: of the first that is there.
COMMON = (
    "run_id", "command", "platform", "python", "hpctk", "numpy", "torch", "h5py", "mpi4py", "horovod", "numba",
    "communicator", "library", "gpu_aware", "gpu_aware_because", "method", "settings", "schedule", "events",
    "nodes", "local_size", "parameters", "parameter_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a rank's rows go."""

    recording: int
    index: int
    rank: RankStats
    first: dict[str, int]
    rows: dict[str, int]


def why_copy(run: RunStats, target: Path) -> str:
    """Return why a view on a run would not do, empty where it would."""
    files = sum(len(recording.ranks) for recording in run.recordings)
    if files > MOST_VIEWED:
        return f"{files} files are more than most programs may open at once"
    if ".." in Path(_relative(run.path, target)).parts:
        return "a view lies in the folder of its run, or above it"
    return ""


def merge(run: RunStats, target: Path, *, copy: bool = False, force: bool = False) -> None:
    """Write one file with the statistics of all recordings and ranks, whole or not at all.

    Parameters
    ----------
    run : RunStats
    target : Path
    copy : bool
        Write the rows themselves, compressed, instead of where they are.
    force : bool
        Replace a file that is there.
    """
    if FILE.fullmatch(target.name) and target.exists():
        raise HpctkError(f"{target}: is a rank's file and stays what it is")
    if target.exists() and not force:
        raise HpctkError(f"{target}: is there already; --force replaces it")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with h5py.File(unfinished, "w", libver="earliest", locking="best-effort") as file:
            _fill(file, run, target, copy)
        unfinished.replace(target)
    except (OSError, RuntimeError, ValueError) as error:
        raise HpctkError(f"{target}: cannot be written ({hdf5.reason(error)})") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _fill(file: Any, run: RunStats, target: Path, copy: bool) -> None:
    places = list(_places(run))
    first = places[0].rank
    put_attributes(
        file,
        {
            "schema": merged_format.NAME,
            "schema_version": merged_format.VERSION,
            "storage": "copy" if copy else "virtual",
            "run": "" if copy else _relative(run.path, target),
            "merged_by": f"hpctk {__version__}",
            **{name: first.attributes[name] for name in COMMON},
        },
    )
    put_attributes(file.create_group("environment"), first.environment)
    _put_ranks(file, run, target)
    totals = {name: sum(place.rows[name] for place in places) for name in JOINED}
    tables = {name: _labelled(file, JOINED[name], places, totals[name]) for name in JOINED}
    matrices = _matrices(file, run)
    if copy:
        _copy(tables, matrices, places, totals)
    else:
        _view(tables, matrices, places, totals, lambda path: _relative(path, target))


def _places(run: RunStats) -> Iterator[Place]:
    """Say where every rank's rows go: the recordings' and ranks' order."""
    first = dict.fromkeys(JOINED, 0)
    for index, recording in enumerate(run.recordings):
        for rank in recording.ranks.values():
            rows = {name: int(rank.progress.get(f"{name}_rows", schema.SIZE_BINS)) for name in JOINED}
            yield Place(recording.number, index, rank, dict(first), rows)
            first = {name: first[name] + rows[name] for name in JOINED}


def _put_ranks(file: Any, run: RunStats, target: Path) -> None:
    """Write the table of ranks."""
    rows = [row for recording in run.recordings for row in _rank_rows(recording, target)]
    table = np.zeros(len(rows), RANKS.dtype)
    for column in RANKS.columns:
        values = [row.get(column.name, merged_format.fill(column)) for row in rows]
        texts = [_cut(value, column) if isinstance(value, str) else value for value in values]
        table[column.name] = texts
    table["row"] = np.arange(len(rows))
    group = datasets.group(file, RANKS)
    scale = None
    for column in RANKS.columns:
        dataset = group.create_dataset(column.name, data=table[column.name].astype(stored(column)))
        describe(dataset, column)
        scale = datasets.scaled(dataset, scale)


def _rank_rows(recording: RecordingStats, target: Path) -> Iterator[dict[str, Any]]:
    """Yield what the table of ranks says of a recording's."""
    for rank in range(recording.size):
        row: dict[str, Any] = {"recording": recording.number, "rank": rank, "size": recording.size}
        stats = recording.ranks.get(rank)
        if stats is None:
            none = {"calls_rows": 0, "steps_rows": 0, "summary_rows": 0}
            yield {**row, "present": 0, "reason": recording.missing.get(rank, ""), **none}
        else:
            known = {column.name: stats.attributes.get(column.name) for column in RANKS.columns}
            kept = {name: value for name, value in known.items() if value is not None}
            path = _relative(stats.path, target)
            yield {**kept, **row, "present": 1, "file": path, **stats.progress}


def _labelled(file: Any, table: TableFormat, places: list[Place], total: int) -> tuple[Any, Any]:
    """Make a table's group with the columns that say whose a row is; return the group and its scale."""
    group, counts = datasets.group(file, table), [place.rows[table.name] for place in places]
    scale = None
    for column, values in (
        (ROW, np.arange(total)),
        (RECORDING, np.repeat([place.recording for place in places], counts)),
        (RANK, np.repeat([place.rank.rank for place in places], counts)),
    ):
        dataset = datasets.packed(group, column, (total,), values.astype("<i8"))
        scale = datasets.scaled(dataset, scale)
    return group, scale


def _matrices(file: Any, run: RunStats) -> tuple[Any, list[Any]]:
    """Make the group of what peers exchanged; return it and its three scales."""
    group, size = datasets.group(file, schema.PEERS), max(recording.size for recording in run.recordings)
    numbers = np.array([recording.number for recording in run.recordings], "<i8")
    scales = []
    for column, values in (
        (RECORDING, numbers), (RANK, np.arange(size)), (schema.PEERS.columns[0], np.arange(size)),
    ):  # fmt: skip
        dataset = group.create_dataset(column.name, data=values.astype("<i8"))
        describe(dataset, column)
        datasets.scaled(dataset, None)
        scales.append(dataset)
    return group, scales


Tables = dict[str, tuple[Any, Any]]
Matrices = tuple[Any, list[Any]]


def _copy(tables: Tables, matrices: Matrices, places: list[Place], totals: dict[str, int]) -> None:
    """Write every rank's rows, each file opened once."""
    columns: dict[str, dict[str, Any]] = {}
    for name, (group, scale) in tables.items():
        columns[name] = {
            c.name: datasets.packed(group, c, (totals[name],)) for c in schema.TABLES[name].columns
        }
        for dataset in columns[name].values():
            datasets.scaled(dataset, scale)
    group, scales = matrices
    shape = tuple(len(scale) for scale in scales)
    peers = {c.name: datasets.packed(group, c, shape) for c in schema.PEERS.columns[1:]}
    for dataset in peers.values():
        datasets.scaled_matrix(dataset, scales)
    waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in JOINED}
    begun = dict.fromkeys(JOINED, 0)

    def flush(name: str) -> None:
        parts, waiting[name] = waiting[name], []
        for column, dataset in columns[name].items():
            values = np.concatenate([part[column] for part in parts])
            dataset[begun[name] : begun[name] + len(values)] = values.astype(dataset.dtype)
        begun[name] += len(values)

    for place in places:
        found = place.rank.tables(*JOINED, "peers")
        for name in JOINED:
            waiting[name].append(found[name])
            gathered = place.first[name] + place.rows[name] - begun[name]
            if gathered >= CHUNK_ROWS or (place is places[-1] and gathered):
                flush(name)
        for column, dataset in peers.items():
            dataset[place.index, place.rank.rank, : place.rank.size] = found["peers"][column]


def _view(
    tables: Tables,
    matrices: Matrices,
    places: list[Place],
    totals: dict[str, int],
    relative: Callable[[Path], str],
) -> None:
    """Write where every rank's rows are."""
    # HDF5 takes % for the beginning of a pattern.
    names = [relative(place.rank.path).replace("%", "%%").encode() for place in places]
    for name, (group, scale) in tables.items():
        spaces = [
            (datasets.part((totals[name],), (place.first[name],), (place.rows[name],)), place.rows[name])
            for place in places
        ]
        for column in schema.TABLES[name].columns:
            plan = datasets.plan(column)
            for source, (space, rows) in zip(names, spaces, strict=True):
                if rows:
                    inside = datasets.part((rows,), (0,), (rows,))
                    plan.set_virtual(space, source, f"/{name}/{column.name}".encode(), inside)
            datasets.scaled(datasets.virtual(group, column, (totals[name],), plan), scale)
    group, scales = matrices
    shape = tuple(len(scale) for scale in scales)
    for column in schema.PEERS.columns[1:]:
        plan = datasets.plan(column)
        for source, place in zip(names, places, strict=True):
            size = place.rank.size
            space = datasets.part(shape, (place.index, place.rank.rank, 0), (1, 1, size))
            plan.set_virtual(
                space, source, f"/peers/{column.name}".encode(), datasets.part((size,), (0,), (size,))
            )
        datasets.scaled_matrix(datasets.virtual(group, column, shape, plan), scales)


def _cut(text: str, column: Column) -> bytes:
    """Return as much of a text as a column holds, in whole characters."""
    data = text.encode(errors="backslashreplace")[: int(column.kind[1:])]
    return data.decode(errors="ignore").encode()


def _relative(path: Path, target: Path) -> str:
    """Return a path from where the merged file is; what lies below it as it is written, so that links may move."""
    with suppress(ValueError):
        return str(path.absolute().relative_to(target.absolute().parent))
    return os.path.relpath(path.resolve(), target.absolute().parent.resolve())

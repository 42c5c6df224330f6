"""A run's statistics as Python objects: `hpctk.stats.load(path)`.

    run = hpctk.stats.load("runs/7/stats")
    for recording in run.recordings:                # one for each start of training
        for rank in recording.ranks.values():       # those whose file is there; the others are in recording.missing
            rank.table("calls")["sent_bytes"].sum()
    run.table("steps")                              # all recordings and ranks, with columns recording and rank

A run folder holds a folder for each recording, 000, 001 and so on, and that a file for each rank. One bad file does not
spoil the rest: its rank is missing, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats.rank_reader import RankReader, read_attributes
from hpctk.telemetry import schema
from hpctk.telemetry.names import FILE, FOLDER, file_name, folder_name
from hpctk.telemetry.schema import Table

#: The name of the file that `hpctk merge` makes, unless it is given another.
MERGED = "merged.h5"
#: The names of tables or columns.
Names = Sequence[str]
#: From tables, some of their columns (None for all) and rows to those tables.
Read = Callable[[Names, Names | None, slice], dict[str, Table]]


@dataclass(frozen=True)
class RankStats:
    """What one rank's file says.

    Attributes
    ----------
    path : Path
    rank, size : int
    attributes : dict
        Everything that describes the recording: host, node, state ("running" or "closed"), method and so on; all of
        `schema.ATTRIBUTES`, those that are not in the file as "", -1 or NaN.
    environment : dict of str to str
    progress : dict
        Column of the progress table: value.
    """

    path: Path
    rank: int
    size: int
    attributes: dict[str, Any]
    environment: dict[str, str]
    progress: dict[str, Any]
    _loaded: dict[str, Table] = field(default_factory=dict, repr=False, compare=False)
    _read: Read | None = field(default=None, repr=False, compare=False)

    def table(self, name: str) -> Table:
        """Return a table as arrays by column, all as long; text as arrays of bytes ("S24")."""
        return self.tables(name)[name]

    def tables(self, *names: str) -> dict[str, Table]:
        """Return several tables, by name; the file is opened once, or not at all for what `load` has read."""
        _check_tables(names)
        others = [name for name in names if name not in self._loaded]
        tables = self._read(others, None, slice(None)) if others and self._read else {}
        return {name: self._loaded[name] if name in self._loaded else tables[name] for name in names}

    def part(self, name: str, columns: Names, rows: slice = slice(None)) -> Table:
        """Return some columns and rows of a table, for one that may be long: no more than that is read."""
        if name in self._loaded or self._read is None:
            return {column: self._loaded[name][column][rows] for column in columns}
        return self._read([name], columns, rows)[name]


@dataclass(frozen=True)
class RecordingStats:
    """One start of training: the ranks that wrote a file, and those that did not.

    Attributes
    ----------
    number : int
    size : int
        The number of ranks that there were.
    ranks : dict of int to RankStats
        At least one, in order.
    missing : dict of int to str
        All other ranks below `size`: why there is no file, or what is wrong with it.
    foreign : dict of str to str
        Files that look like those of ranks and belong to none: name and why.
    """

    number: int
    size: int
    ranks: dict[int, RankStats]
    missing: dict[int, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)

    def table(self, name: str) -> Table:
        """Return a table of all its ranks, one after the other, with a column rank."""
        return _joined(name, [({"rank": rank}, stats) for rank, stats in self.ranks.items()])

    def clock_shifts(self) -> dict[int, float]:
        """Return what is added to each rank's seconds to have them since rank 0's recording began; 0 where not known.

        Where rank 0 left no file, since that of the lowest rank that did.
        """
        offsets = {rank: stats.attributes.get("clock_offset_s") for rank, stats in self.ranks.items()}
        origin, shifts = offsets.get(min(offsets, default=0)), dict.fromkeys(self.ranks, 0.0)
        for rank, offset in offsets.items():
            if isinstance(origin, int | float) and isinstance(offset, int | float):
                shift = float(offset) - float(origin)
                # Ranks start within a day of each other: what is farther away is no clock, and NaN is not even that.
                shifts[rank] = shift if abs(shift) < 86400 else 0.0
        return shifts


@dataclass(frozen=True)
class RunStats:
    """A run.

    Attributes
    ----------
    path : Path
    recordings : list of RecordingStats
        In the order they were begun; each has at least one rank that can be read.
    unreadable : dict of int to str
        Recordings without: why.
    """

    path: Path
    recordings: list[RecordingStats]
    unreadable: dict[int, str] = field(default_factory=dict)

    def table(self, name: str) -> Table:
        """Return a table of all recordings and ranks, one after the other, with columns recording and rank.

        Examples
        --------
        >>> pandas.DataFrame(hpctk.stats.load("runs/7/stats").table("calls"))   # doctest: +SKIP
        """
        ranks = [(one.number, rank, stats) for one in self.recordings for rank, stats in one.ranks.items()]
        return _joined(name, [({"recording": number, "rank": rank}, stats) for number, rank, stats in ranks])


def load(path: str | Path, tables: Iterable[str] = (), *, checked: Iterable[str] = schema.TABLES) -> RunStats:
    """Read statistics: of a run, of one recording, of one rank, or a merged file.

    Parameters
    ----------
    path : path
        A run folder, the folder of a recording in it, one rank's file, or what `hpctk merge` made.
    tables : iterable of str
        Tables to read at once and keep in memory; others are read when they are asked for.
    checked : iterable of str
        Tables that are looked at in every rank's file, so that a rank with a damaged one is missing. What is wrong with
        others is an error when they are read; that makes loading a thousand ranks quicker.

    Returns
    -------
    RunStats

    Raises
    ------
    HpctkError
        Where there is nothing to read; in one line, with what is wrong.
    """
    path, tables, checked = Path(path), tuple(tables), tuple(checked)
    _check_tables((*tables, *checked))
    try:
        if path.is_dir():
            return _load_folder(path, tables, checked)
        if not path.exists():
            raise HpctkError(f"{path}: no such file or folder")
    except OSError as error:
        raise HpctkError(f"{path}: cannot be read ({error.strerror or error})") from None
    return _load_file(path, tables, checked)


def _load_folder(folder: Path, tables: Names, checked: Names) -> RunStats:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(FILE.fullmatch(name) for name in names):
        name = folder.resolve().name
        folders = {int(name) if FOLDER.fullmatch(name) else 0: folder}
    else:
        numbers = sorted(int(name) for name in names if FOLDER.fullmatch(name))
        folders = {number: folder / folder_name(number) for number in numbers}
    recordings, unreadable = [], {}
    for number, path in folders.items():
        try:
            recordings.append(_load_recording(number, path, tables, checked))
        except HpctkError as error:
            unreadable[number] = str(error)
    if recordings:
        return RunStats(folder, recordings, unreadable)
    # Of several, what is wrong with the first.
    why = next(
        iter(unreadable.values()),
        f"{folder}: no statistics here (no NNN/rank-NNNNN.h5); hpctk train --run DIR and HPCTK_STATS=DIR write some",
    )
    raise HpctkError(why)


def _load_recording(number: int, folder: Path, tables: Names, checked: Names) -> RecordingStats:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise HpctkError(f"{folder}: cannot be read ({error.strerror or error})") from None
    readable, bad = {}, {}
    for rank in sorted({int(match[1]) for name in names if (match := FILE.fullmatch(name))}):
        path = folder / file_name(rank)
        try:
            readable[rank] = read_rank(path, tables, checked)
            if readable[rank].rank != rank:
                raise HpctkError(f"{path}: is the file of rank {readable.pop(rank).rank}, not of {rank}")
        except HpctkError as error:
            bad[rank] = str(error)
    if not readable:
        why = next(iter(bad.values()), f"{folder}: no statistics here (no rank-NNNNN.h5)")
        raise HpctkError(why)
    # Whatever else was copied into the folder: the run is the one that most files are of.
    run, size = Counter(_run(stats) for stats in readable.values()).most_common(1)[0][0]
    ranks = {rank: stats for rank, stats in readable.items() if _run(stats) == (run, size)}
    for rank, stats in readable.items():
        if rank not in ranks:
            other, other_size = _run(stats)
            whose = f"{other[:40]!r} of {other_size} ranks, the others {run[:40]!r} of {size} ranks"
            bad[rank] = f"{stats.path}: is of another run ({whose})"
    missing = {
        rank: bad.get(rank, f"{folder / file_name(rank)}: no such file") for rank in range(size) if rank not in ranks
    }
    foreign = {file_name(rank): why for rank, why in bad.items() if rank >= size}
    return RecordingStats(number, size, ranks, missing, foreign)


def _run(stats: RankStats) -> tuple[str, int]:
    return str(stats.attributes["run_id"]), stats.size


def read_rank(path: Path, tables: Names = (), checked: Names = tuple(schema.TABLES)) -> RankStats:
    """Read one rank's file: what it says of itself, and some tables."""
    reader = RankReader(path, tables, checked)
    about, rank, size = reader.attributes, int(reader.attributes["rank"]), int(reader.attributes["size"])
    return RankStats(path, rank, size, about, reader.environment, reader.progress, reader.tables, reader.read)


def _load_file(path: Path, tables: Names, checked: Names) -> RunStats:
    """Read one file: a merged one, or a rank's."""
    # Not above: it needs this module.
    from hpctk.stats import merged

    attributes = read_attributes(path)
    if attributes.get("schema") == merged.NAME:
        return merged.load_merged(path, attributes, tables, checked)
    rank, why = read_rank(path, tables, checked), f"only {path} was read"
    missing = {other: why for other in range(rank.size) if other != rank.rank}
    number = max(0, int(rank.attributes["recording"]))
    return RunStats(path, [RecordingStats(number, rank.size, {rank.rank: rank}, missing)])


def _check_tables(names: Iterable[str]) -> None:
    for name in names:
        if name not in schema.TABLES:
            raise HpctkError(f"no table {name!r}; there are {', '.join(schema.TABLES)}")


def _joined(name: str, ranks: Iterable[tuple[dict[str, int], RankStats]]) -> Table:
    """Return the tables of several ranks as one, after columns that say whose a row is."""
    parts = []
    for labels, stats in ranks:
        table = stats.table(name)
        rows = len(next(iter(table.values())))
        parts.append({**{label: np.full(rows, value) for label, value in labels.items()}, **table})
    return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}

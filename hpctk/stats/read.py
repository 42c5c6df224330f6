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
from typing import Any, Protocol

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats import merged_format
from hpctk.telemetry import schema
from hpctk.telemetry.names import FILE, FOLDER, file_name, folder_name
from hpctk.telemetry.schema import Table

#: The name of the file that `hpctk merge` makes, unless it is told another.
MERGED = "merged.h5"


@dataclass(frozen=True)
class Wanted:
    """Tables that are read at once, and those that are looked at."""

    tables: tuple[str, ...] = ()
    checked: tuple[str, ...] = tuple(schema.TABLES)


class Source(Protocol):
    """Where a rank's tables are read from."""

    def read(
        self, tables: Sequence[str], columns: Sequence[str] | None = None, rows: slice = slice(None)
    ) -> dict[str, Table]:
        """Return tables, or some columns and rows of them."""


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
    _kept: dict[str, Table] = field(default_factory=dict, repr=False, compare=False)
    _source: Source | None = field(default=None, repr=False, compare=False)

    def keep(self, names: Iterable[str]) -> None:
        """Read tables and keep them in memory."""
        self._kept.update(self.tables(*names))

    def table(self, name: str) -> Table:
        """Return a table as arrays by column, all as long; text as arrays of bytes ("S24")."""
        return self.tables(name)[name]

    def tables(self, *names: str) -> dict[str, Table]:
        """Return several tables, by name; the file is opened once, or not at all for what `load` has kept."""
        for name in names:
            _check_table(name)
        rest = [name for name in names if name not in self._kept]
        found = self._source.read(rest) if rest and self._source else {}
        return {name: self._kept[name] if name in self._kept else found[name] for name in names}

    def part(self, name: str, columns: Sequence[str], rows: slice = slice(None)) -> Table:
        """Return some columns and rows of a table, for one that may be long: no more than that is read."""
        if name in self._kept or self._source is None:
            return {column: self._kept[name][column][rows] for column in columns}
        return self._source.read([name], columns, rows)[name]


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
        return _joined(name, self.ranks.values(), lambda rank: {"rank": rank.rank})


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
        numbers = {id(rank): one.number for one in self.recordings for rank in one.ranks.values()}
        ranks = [rank for one in self.recordings for rank in one.ranks.values()]
        return _joined(name, ranks, lambda rank: {"recording": numbers[id(rank)], "rank": rank.rank})


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
    place, wanted = Path(path), Wanted(tuple(tables), tuple(checked))
    for name in (*wanted.tables, *wanted.checked):
        _check_table(name)
    try:
        if place.is_dir():
            return _folder(place, wanted)
        if not place.exists():
            raise HpctkError(f"{place}: no such file or folder")
    except OSError as error:
        raise HpctkError(f"{place}: cannot be read ({error.strerror or error})") from None
    return _file(place, wanted)


def _folder(folder: Path, wanted: Wanted) -> RunStats:
    names = sorted(one.name for one in folder.iterdir())
    if any(FILE.fullmatch(name) for name in names):
        name = folder.resolve().name
        folders = {int(name) if FOLDER.fullmatch(name) else 0: folder}
    else:
        numbers = sorted(int(name) for name in names if FOLDER.fullmatch(name))
        folders = {number: folder / folder_name(number) for number in numbers}
    recordings, unreadable = [], {}
    for number, one in folders.items():
        try:
            recordings.append(_recording(number, one, wanted))
        except HpctkError as error:
            unreadable[number] = str(error)
    if recordings:
        return RunStats(folder, recordings, unreadable)
    # Of several, what is wrong with the first.
    why = next(iter(unreadable.values()), f"{folder}: no statistics here (no NNN/rank-NNNNN.h5)")
    raise HpctkError(why)


def _recording(number: int, folder: Path, wanted: Wanted) -> RecordingStats:
    try:
        names = [one.name for one in folder.iterdir()]
    except OSError as error:
        raise HpctkError(f"{folder}: cannot be read ({error.strerror or error})") from None
    found, bad = {}, {}
    for rank in sorted({int(match[1]) for name in names if (match := FILE.fullmatch(name))}):
        try:
            found[rank] = read_rank(folder / file_name(rank), wanted, rank)
        except HpctkError as error:
            bad[rank] = str(error)
    if not found:
        why = next(iter(bad.values()), f"{folder}: no statistics here (no rank-NNNNN.h5)")
        raise HpctkError(why)
    # Whatever else was copied into the folder: the run is the one that most files are of.
    run = Counter(_run(rank) for rank in found.values()).most_common(1)[0][0]
    ranks = {rank: one for rank, one in found.items() if _run(one) == run}
    for rank, one in found.items():
        if rank not in ranks:
            bad[rank] = (
                f"{one.path}: is of another run ({_described(_run(one))}, the others {_described(run)})"
            )
    size = run[1]
    missing = {
        rank: bad.get(rank, f"{folder / file_name(rank)}: no such file")
        for rank in range(size)
        if rank not in ranks
    }
    foreign = {file_name(rank): why for rank, why in bad.items() if rank >= size}
    return RecordingStats(number, size, ranks, missing, foreign)


def read_rank(path: Path, wanted: Wanted = Wanted(), expected: int | None = None) -> RankStats:  # noqa: B008 - frozen
    """Read one rank's file: what it says of itself, and some tables. HpctkError where it is not of rank `expected`."""
    # With h5py, which nobody needs who trains without statistics.
    from hpctk.stats import rank_reader

    contents = rank_reader.read(path, wanted.tables, wanted.checked)
    rank, size = int(contents.attributes["rank"]), int(contents.attributes["size"])
    if expected is not None and rank != expected:
        raise HpctkError(f"{path}: is the file of rank {rank}, not of {expected}")
    return RankStats(
        path, rank, size, contents.attributes, contents.environment, contents.progress, contents.tables,
        rank_reader.RankRows(path, contents),
    )  # fmt: skip


def _file(path: Path, wanted: Wanted) -> RunStats:
    """Read one file: a merged one, or a rank's."""
    from hpctk.stats.merged_reader import load_merged
    from hpctk.stats.rank_reader import read_attributes

    attributes = read_attributes(path)
    if attributes.get("schema") == merged_format.NAME:
        return load_merged(path, attributes, wanted)
    rank = read_rank(path, wanted)
    why = f"only {path} was read"
    missing = {other: why for other in range(rank.size) if other != rank.rank}
    number = max(0, int(rank.attributes["recording"]))
    return RunStats(path, [RecordingStats(number, rank.size, {rank.rank: rank}, missing)])


def _run(rank: RankStats) -> tuple[str, int]:
    return str(rank.attributes["run_id"]), rank.size


def _described(run: tuple[str, int]) -> str:
    return f"{run[0][:40]!r} of {run[1]} ranks"


def _check_table(name: str) -> None:
    if name not in schema.TABLES:
        raise HpctkError(f"no table {name!r}; there are {', '.join(schema.TABLES)}")


def _joined(name: str, ranks: Iterable[RankStats], labels: Callable[[RankStats], dict[str, int]]) -> Table:
    """Return the tables of several ranks as one, after columns that say whose a row is."""
    _check_table(name)
    parts = []
    for rank in ranks:
        table = rank.table(name)
        rows = len(next(iter(table.values())))
        parts.append({**{label: np.full(rows, value) for label, value in labels(rank).items()}, **table})
    return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}

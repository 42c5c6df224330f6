"""A run's statistics as Python objects: `hpctk.stats.load(path)`.

    run = hpctk.stats.load("runs/7/stats")
    for recording in run.recordings:                # one for each start of training
        for rank in recording.ranks.values():       # those whose file is there; the others are in recording.missing
            rank.table("calls")["sent_bytes"].sum()

A run folder holds a folder for each recording, 000, 001 and so on, and that a file for each rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats import schema

#: The name of a rank's file.
FILE = re.compile(r"rank-(\d{5,9})\.h5")
#: The name of a recording's folder.
FOLDER = re.compile(r"\d{3,9}")


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.h5"


@dataclass(frozen=True)
class RankStats:
    """What one rank's file says.

    Attributes
    ----------
    path : Path
    rank, size : int
    attributes : dict
        Everything that describes the recording: host, node, state ("running" or "closed"), method and so on.
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

    def table(
        self, name: str, columns: Sequence[str] | None = None, rows: slice = slice(None)
    ) -> dict[str, Any]:
        """Return a table as arrays by column, all as long; text as arrays of bytes ("S24").

        Parameters
        ----------
        name : str
        columns : sequence of str, optional
            Only these.
        rows : slice, optional
            Only these rows.
        """
        filled = {"calls": "calls_rows", "steps": "steps_rows", "summary": "summary_rows"}.get(name)
        wanted = [column.name for column in schema.TABLES[name].columns] if columns is None else columns
        with h5py.File(self.path, "r", locking="best-effort") as file:
            group = file[name]
            length = min(group[column].shape[0] for column in wanted)
            if filled is not None:
                length = min(length, int(self.progress[filled]))
            first, last, _ = rows.indices(length)
            return {column: group[column][first:last] for column in wanted}


@dataclass(frozen=True)
class RecordingStats:
    """One start of training: the ranks that wrote a file, and those that did not.

    Attributes
    ----------
    number : int
    size : int
        The number of ranks that there were.
    ranks : dict of int to RankStats
    missing : dict of int to str
        Ranks without a readable file: why.
    """

    number: int
    size: int
    ranks: dict[int, RankStats]
    missing: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStats:
    """A run folder. `recordings` in the order they were begun."""

    path: Path
    recordings: list[RecordingStats]


def load(path: str | Path) -> RunStats:
    """Read a run folder (or the folder of one recording). HpctkError where there is nothing to read."""
    folder = Path(path)
    if not folder.is_dir():
        raise HpctkError(f"{folder}: no such folder")
    folders = sorted(x for x in folder.iterdir() if x.is_dir() and FOLDER.fullmatch(x.name))
    if any(FILE.fullmatch(x.name) for x in folder.iterdir()):
        folders = [folder]
    recordings = [_recording(number, one) for number, one in enumerate(folders)]
    if not any(recording.ranks for recording in recordings):
        raise HpctkError(f"{folder}: no statistics here (no NNN/rank-NNNNN.h5)")
    return RunStats(folder, recordings)


def _recording(number: int, folder: Path) -> RecordingStats:
    found = sorted(x for x in folder.iterdir() if FILE.fullmatch(x.name))
    ranks = {one.rank: one for one in map(read_rank, found)}
    size = max((one.size for one in ranks.values()), default=0)
    missing = {rank: "no file" for rank in range(size) if rank not in ranks}
    return RecordingStats(number, size, ranks, missing)


def read_rank(path: Path) -> RankStats:
    """Read what a rank's file says of itself; its tables are read when they are asked for."""
    with h5py.File(path, "r", locking="best-effort") as file:
        attributes = {name: _plain(value) for name, value in file.attrs.items()}
        environment = {name: _plain(value) for name, value in file["environment"].attrs.items()}
        progress = {
            column.name: file["progress"][column.name][0].item() for column in schema.PROGRESS.columns
        }
    return RankStats(path, attributes["rank"], attributes["size"], attributes, environment, progress)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value

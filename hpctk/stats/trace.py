"""A run's calls and steps as a trace for Perfetto and chrome://tracing: the JSON "Trace Event Format".

A process for each rank, in it a thread for steps and one for calls, times in microseconds on rank 0's clock. Of
several starts of training the next one begins where the one before ended. Written piece by piece: memory does not
grow with the number of calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats import metrics
from hpctk.stats.read import RankStats, RunStats
from hpctk.telemetry.schema import CALLS, STEPS, Table

#: Rows that are in memory at a time.
ROWS = 50_000
#: The threads of a process: number and table. What stands beside a row when one clicks at it are the other columns
#: than these, unless they are 0 or empty: most are.
_THREADS = ((1, STEPS), (2, CALLS))
_NOT_SHOWN = ("call", "start_s", "end_s", "seconds", "operation")


@dataclass(frozen=True)
class Cut:
    """What a trace is cut to: steps from `first` to before `last`, ranks; None for all."""

    first: int | None = None
    last: int | None = None
    ranks: frozenset[int] | None = None

    def rows(self, table: Table) -> Table:
        """Return the rows of the steps that are wanted."""
        kept = np.ones(len(table["step"]), bool)
        if self.first is not None:
            kept &= table["step"] >= self.first
        if self.last is not None:
            kept &= table["step"] < self.last
        return {name: values[kept] for name, values in table.items()}


def write(run: RunStats, file: IO[str], cut: Cut = Cut()) -> tuple[int, list[str]]:  # noqa: B008 - a frozen value
    """Write the trace; return how many calls and steps are in it, and what could not be read.

    Raise HpctkError where none of the ranks asked for is there.
    """
    known = {rank for recording in run.recordings for rank in recording.ranks}
    wanted = sorted(known if cut.ranks is None else known & cut.ranks)
    if not wanted:
        there = f"there are {len(known)}, the first {min(known)}"
        raise HpctkError(f"none of the ranks asked for has a file here; {there}")
    last_stats = {rank: stats for recording in run.recordings for rank, stats in recording.ranks.items()}
    names = [event for rank in wanted for event in _names(rank, last_stats[rank])]
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, names)))
    written, problems, begins = 0, [], 0.0
    for recording in run.recordings:
        shifts = recording.clock_shifts()
        for rank in (rank for rank in wanted if rank in recording.ranks):
            try:
                for events in _pieces(recording.ranks[rank], begins + shifts[rank], cut):
                    file.writelines(",\n" + json.dumps(event, allow_nan=False) for event in events)
                    written += len(events)
            except (HpctkError, OSError) as error:
                problems.append(f"start {recording.number}, rank {rank}: {error}")
        begins += max((_amount(stats, "flushed_s") for stats in recording.ranks.values()), default=0.0)
    file.write("\n]}\n")
    return written, problems


def _names(rank: int, stats: RankStats) -> Iterator[dict[str, Any]]:
    host = str(stats.attributes.get("host", "?"))[:64]
    for thread, kind, about in (
        (1, "process_name", {"name": f"rank {rank} on {host}"}),
        *((thread, "thread_name", {"name": table.name}) for thread, table in _THREADS),
        (1, "process_sort_index", {"sort_index": rank}),
    ):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": about}


def _amount(stats: RankStats, name: str) -> float:
    return float(metrics.clean(stats.progress.get(name, 0))[0])


def _pieces(stats: RankStats, origin: float, cut: Cut) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of a rank's steps and calls, so many rows at a time."""
    for thread, table in _THREADS:
        columns = [column.name for column in table.columns]
        for first in range(0, int(_amount(stats, f"{table.name}_rows")), ROWS):
            rows = cut.rows(stats.part(table.name, columns, slice(first, first + ROWS)))
            names = [f"step {step}" for step in rows["step"].tolist()]
            ends = rows["start_s"] + rows["seconds"] if table is STEPS else rows["end_s"]
            if table is CALLS:
                names = _plain(rows["operation"])
            details = {name: _plain(rows[name]) for name in columns if name not in _NOT_SHOWN}
            head = {"ph": "X", "pid": stats.rank, "tid": thread}
            yield _events(head, names, rows["start_s"] + origin, ends + origin, details)


def _events(
    head: dict[str, Any], names: list[str], starts_s: Any, ends_s: Any, details: dict[str, list[Any]]
) -> list[dict[str, Any]]:
    """Return an event for each row that has a beginning and an end."""
    with np.errstate(invalid="ignore", over="ignore"):
        starts, lengths = starts_s * 1e6, ends_s * 1e6 - starts_s * 1e6
        sound = (np.abs(starts) <= metrics.LARGEST) & (lengths >= 0) & (lengths <= metrics.LARGEST)
    return [
        {
            **head, "name": names[i] or "?", "ts": round(float(starts[i]), 3), "dur": round(float(lengths[i]), 3),
            "args": {name: values[i] for name, values in details.items() if values[i] or name == "step"},
        }
        for i in np.flatnonzero(sound)
    ]  # fmt: skip


def _plain(values: Any) -> list[Any]:
    """Return a column as JSON knows it."""
    if values.dtype.kind == "S":
        return [text.decode(errors="replace") for text in values.tolist()]
    return [value if math.isfinite(value) else None for value in values.tolist()]

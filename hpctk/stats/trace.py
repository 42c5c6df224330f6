"""A run's calls and steps as a trace for Perfetto and chrome://tracing: the JSON "Trace Event Format".

A process for each rank, in it a thread for steps and one for calls, times in microseconds on rank 0's clock. Of
several starts of training the next one begins where the one before ended. Written piece by piece: memory does not
grow with the number of calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats import metrics
from hpctk.stats.read import RankStats, RunStats
from hpctk.telemetry.schema import CALLS, LABELS, STEPS

#: Rows that are in memory at a time.
ROWS = 50_000
STEPS_THREAD, CALLS_THREAD = 1, 2
#: What stands beside a call and a step when one clicks at it, unless it is 0 or empty: most of it is.
_CALL_DETAILS = tuple(
    c.name for c in CALLS.columns if c.name not in ("call", "start_s", "end_s", "operation")
)
_STEP_DETAILS = tuple(c.name for c in STEPS.columns if c.name not in ("start_s", "seconds"))
_STEP_COLUMNS, _CALL_COLUMNS = ([column.name for column in table.columns] for table in (STEPS, CALLS))
_TEXTS = {column.name for column in LABELS}


@dataclass(frozen=True)
class Cut:
    """What a trace is cut to: steps from `first` to before `last`, ranks; None for all."""

    first: int | None = None
    last: int | None = None
    ranks: frozenset[int] | None = None

    def rows(self, steps: Any) -> Any:
        """Return which rows belong to the steps that are wanted."""
        kept = np.ones(len(steps), bool)
        if self.first is not None:
            kept &= steps >= self.first
        if self.last is not None:
            kept &= steps < self.last
        return kept


def write(run: RunStats, file: IO[str], cut: Cut = Cut()) -> tuple[int, list[str]]:  # noqa: B008 - a frozen value
    """Write the trace; return how many calls and steps are in it, and what could not be read.

    Raises
    ------
    HpctkError
        Where none of the ranks asked for is there.
    """
    written, problems, comma = 0, [], ""
    known = {rank for recording in run.recordings for rank in recording.ranks}
    wanted = sorted(known if cut.ranks is None else known & cut.ranks)
    if not wanted:
        raise HpctkError(
            f"none of the ranks asked for has a file here; there are {len(known)}, the first {min(known)}"
        )
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for rank in wanted:
        last = next(
            recording.ranks[rank] for recording in reversed(run.recordings) if rank in recording.ranks
        )
        for event in _names(rank, last):
            file.write(comma + json.dumps(event))
            comma = ",\n"
    begins = 0.0
    for recording in run.recordings:
        offsets = recording.clock_shifts()
        for rank in (rank for rank in wanted if rank in recording.ranks):
            stats, origin = recording.ranks[rank], begins + offsets[rank]
            try:
                for events in _pieces(stats, origin, cut):
                    file.writelines(comma + json.dumps(event, allow_nan=False) for event in events)
                    written += len(events)
            except (HpctkError, OSError) as error:
                problems.append(f"start {recording.number}, rank {rank}: {error}")
        ends = [float(metrics.clean(one.progress.get("flushed_s", 0))[0]) for one in recording.ranks.values()]
        begins += max(ends, default=0.0)
    file.write("\n]}\n")
    return written, problems


def _names(rank: int, stats: RankStats) -> Iterator[dict[str, Any]]:
    host = str(stats.attributes.get("host", "?"))[:64]
    about: Sequence[tuple[str, int, str]] = (
        ("process_name", STEPS_THREAD, f"rank {rank} on {host}"),
        ("thread_name", STEPS_THREAD, "steps"),
        ("thread_name", CALLS_THREAD, "calls"),
    )
    for kind, thread, name in about:
        yield {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": name}}
    yield {
        "ph": "M",
        "pid": rank,
        "tid": STEPS_THREAD,
        "name": "process_sort_index",
        "args": {"sort_index": rank},
    }


def _pieces(stats: RankStats, origin: float, cut: Cut) -> Iterator[list[dict[str, Any]]]:
    for first in range(0, _length(stats, "steps_rows"), ROWS):
        steps = _kept(stats.part("steps", _STEP_COLUMNS, slice(first, first + ROWS)), cut)
        ends = np.asarray(steps["start_s"]) + np.asarray(steps["seconds"])
        names = [f"step {step}" for step in steps["step"].tolist()]
        yield _events(stats.rank, STEPS_THREAD, names, origin, steps, ends, _STEP_DETAILS)
    for first in range(0, _length(stats, "calls_rows"), ROWS):
        calls = _kept(stats.part("calls", _CALL_COLUMNS, slice(first, first + ROWS)), cut)
        names = [text.decode(errors="replace") for text in calls["operation"].tolist()]
        yield _events(stats.rank, CALLS_THREAD, names, origin, calls, calls["end_s"], _CALL_DETAILS)


def _length(stats: RankStats, name: str) -> int:
    return int(metrics.clean(stats.progress.get(name, 0))[0])


def _kept(table: dict[str, Any], cut: Cut) -> dict[str, Any]:
    rows = cut.rows(table["step"])
    return {name: values[rows] for name, values in table.items()}


def _events(
    rank: int,
    thread: int,
    names: list[str],
    origin: float,
    table: dict[str, Any],
    ends: Any,
    details: Sequence[str],
) -> list[dict[str, Any]]:
    """Return an event for each row that has a beginning and an end."""
    with np.errstate(invalid="ignore", over="ignore"):
        starts = (np.asarray(table["start_s"], np.float64) + origin) * 1e6
        lengths = (np.asarray(ends, np.float64) + origin) * 1e6 - starts
        sound = (np.abs(starts) <= metrics.LARGEST) & (lengths >= 0) & (lengths <= metrics.LARGEST)
    columns = {name: _plain(table[name], name) for name in details}
    return [
        {
            "ph": "X", "pid": rank, "tid": thread, "name": names[i] or "?",
            "ts": round(float(starts[i]), 3), "dur": round(float(lengths[i]), 3),
            "args": {name: values[i] for name, values in columns.items() if values[i] or name == "step"},
        }
        for i in np.flatnonzero(sound)
    ]  # fmt: skip


def _plain(values: Any, name: str) -> list[Any]:
    """Return a column as JSON knows it."""
    if name in _TEXTS:
        return [text.decode(errors="replace") for text in values.tolist()]
    if values.dtype.kind == "f":
        return [one if np.isfinite(one) else None for one in values.tolist()]
    found: list[Any] = values.tolist()
    return found

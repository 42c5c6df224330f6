"""The calls of a few steps on a few ranks, on one clock: what the timeline shows. Reads only those rows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats.read import RankStats, RecordingStats, RunStats

#: Lanes, steps, and calls in a lane.
RANKS, STEPS, CALLS = 12, 4, 150
_COLUMNS = ("start_s", "end_s", "operation", "schedule", "tensor", "waiting_s", "sent_bytes")


@dataclass
class Lane:
    """One rank's steps (number, start, end) and calls (start, end, and the other columns by name), in seconds."""

    rank: int
    host: str
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


def lanes(run: RunStats, first: int | None = None, last: int | None = None, slowest: int | None = None) -> list[Lane]:
    """Return the lanes of the newest recording with steps, from `first` to before `last` or a few in its middle.

    The rank `slowest` is shown in any case.
    """
    for recording in reversed(run.recordings):
        chosen = _ranks(recording, slowest)
        window = _window(recording, chosen, first, last)
        if window is not None:
            shifts = recording.clock_shifts()
            drawn = [_lane(recording.ranks[rank], *window, shifts[rank]) for rank in chosen]
            return [lane for lane in drawn if lane.steps or lane.calls]
    return []


def _ranks(recording: RecordingStats, slowest: int | None) -> list[int]:
    ranks = sorted(recording.ranks)
    chosen = {ranks[i * len(ranks) // RANKS] for i in range(RANKS)} if len(ranks) > RANKS else set(ranks)
    if slowest in recording.ranks and slowest is not None and slowest not in chosen:
        chosen = {*sorted(chosen)[:-1], slowest}
    return sorted(chosen)


def _window(recording: RecordingStats, ranks: list[int], first: int | None, last: int | None) -> tuple[int, int] | None:
    """Return the first step and the one after the last; None where nothing is there."""
    for rank in ranks:
        steps = np.zeros(0)
        with suppress(HpctkError, OSError):
            steps = recording.ranks[rank].part("steps", ("step",))["step"]
        inside = steps[(steps >= (first or 0)) & (steps < (last if last is not None else 2**62))]
        if len(inside):
            if first is not None:
                return int(inside[0]), int(inside[0]) + min(STEPS * 4, int(inside[-1]) - int(inside[0]) + 1)
            begin = int(inside[max(0, (len(inside) - STEPS) // 2)])
            return begin, begin + STEPS
    return None


def _lane(stats: RankStats, first: int, last: int, shift: float) -> Lane:
    lane = Lane(stats.rank, str(stats.attributes.get("host", "?"))[:64])
    # What could be read of this lane is shown; the report says elsewhere which files are damaged.
    with suppress(HpctkError, OSError):
        steps = stats.part("steps", ("step", "start_s", "seconds"))
        for i in _rows(steps["step"], first, last, STEPS * 4):
            begin = float(steps["start_s"][i])
            end = begin + float(steps["seconds"][i])
            if _sound(begin + shift, end + shift):
                lane.steps.append((int(steps["step"][i]), begin + shift, end + shift))
        rows = _rows(stats.part("calls", ("step",))["step"], first, last, CALLS)
        if len(rows):
            calls = stats.part("calls", _COLUMNS, slice(int(rows[0]), int(rows[-1]) + 1))
            for values in zip(*(calls[name].tolist() for name in _COLUMNS), strict=True):
                call = dict(zip(_COLUMNS, values, strict=True))
                call["start_s"], call["end_s"] = call["start_s"] + shift, call["end_s"] + shift
                if _sound(call["start_s"], call["end_s"]):
                    lane.calls.append(call)
    return lane


def _rows(steps: Any, first: int, last: int, most: int) -> Any:
    """Return the rows that belong to steps of the window, all in a row, at most so many."""
    rows = np.flatnonzero((steps >= first) & (steps < last))
    return rows[rows < rows[0] + most] if len(rows) else rows


def _sound(start: float, end: float) -> bool:
    return abs(start) < 1e9 and abs(end) < 1e9 and start <= end

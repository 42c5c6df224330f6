"""A run's statistics, added up over ranks and over starts of training. Reads the files, one after the other.

Calls are not read, only their sums: it works where they were not kept, and at a thousand ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats import metrics
from hpctk.stats.read import RankStats, RecordingStats, RunStats
from hpctk.stats.report import curve
from hpctk.stats.report.calls import SUMS, Calls
from hpctk.stats.report.matrix import Matrix
from hpctk.stats.report.numbers import printable
from hpctk.telemetry import schema
from hpctk.telemetry.names import file_name

#: Amounts of each rank: of its steps, then of its calls.
_STEPS = ("steps", "steps_s", "exposed_s", "flushed_s", "events_dropped", "steps_dropped")
_TENSORS = (
    "tensor_dense_bytes",
    "tensor_payload_bytes",
    "counted_dense_sent_bytes",
    "uncounted_tensor_calls",
)
AMOUNTS = (*_STEPS, *(name if name != "seconds" else "communication_s" for name in SUMS), *_TENSORS)
#: The tables that are read, the last of some ranks only.
TABLES = ("summary", "sizes", "peers", "steps")
#: A job of more ranks than this was not recorded: the number is wrong.
MOST_RANKS = 1_000_000


@dataclass
class RecordingAccount:
    """One start of training. `why` is why ranks are missing; steps and seconds are those of the rank with most."""

    number: int
    size: int
    present: list[int]
    open: list[int]
    why: dict[int, str]
    nodes: int
    told: dict[str, str]
    began_unix_s: float | None
    steps: float = 0.0
    steps_s: float = 0.0
    wall_s: float = 0.0


@dataclass
class Account:
    """A run, added up.

    Attributes
    ----------
    path : str
    recordings : list of RecordingAccount
    ranks : list of int
        Those with a file in any recording; `hosts`, `nodes` and `open` (not closed in the last) belong to them.
    amounts : dict of str to array
        AMOUNTS of those ranks, summed over recordings.
    curve_ranks : set of int
        Those whose steps were read.
    problems : list of str
        What could not be read, and numbers that made no sense.
    """

    path: str
    recordings: list[RecordingAccount]
    ranks: list[int]
    hosts: list[str]
    nodes: list[int]
    open: list[bool]
    amounts: dict[str, Any]
    calls: Calls
    sizes: dict[str, Any]
    matrix: Matrix
    courses: list[curve.Course]
    counts: dict[str, float]
    curve_ranks: set[int]
    problems: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of ranks of the largest recording."""
        return max((one.size for one in self.recordings), default=0)


def account(run: RunStats) -> Account:
    """Read a run's files and add them up."""
    ranks = sorted({rank for recording in run.recordings for rank in recording.ranks})
    size = min(max((one.size for one in run.recordings), default=0), MOST_RANKS)
    n = len(ranks)
    found = Account(
        str(run.path), [], ranks, [""] * n, [0] * n, [False] * n, {name: np.zeros(n) for name in AMOUNTS}, Calls(),
        {name: np.zeros(schema.SIZE_BINS) for name in ("messages", "sent_bytes", "calls")}, Matrix(size), [],
        dict.fromkeys(curve.COUNTS, 0.0), set(),
    )  # fmt: skip
    senseless = sum(_add_recording(found, recording) for recording in run.recordings)
    found.problems += [f"start {number}: {printable(why)}" for number, why in run.unreadable.items()]
    if senseless:
        found.problems.append(f"{senseless} numbers in these files make no sense and count as 0")
    return found


def _add_recording(found: Account, recording: RecordingStats) -> int:
    places = {rank: place for place, rank in enumerate(found.ranks)}
    rows = sum(_number(one.progress.get("steps_rows")) for one in recording.ranks.values())
    stepping = set(curve.chosen(sorted(recording.ranks), int(rows)))
    missing = np.array(sorted(recording.missing), np.int64)
    course, senseless = curve.Course(), 0
    for rank, stats in sorted(recording.ranks.items()):
        try:
            names = TABLES if rank in stepping else TABLES[:-1]
            tables = stats.tables(*names)
            senseless += _add_rank(found, places[rank], stats, tables, missing)
            if rank in stepping:
                counts, bad = course.add(tables["steps"])
                senseless += bad
                for name, value in counts.items():
                    found.counts[name] += value
        except (HpctkError, OSError) as error:
            found.problems.append(f"start {recording.number}, rank {rank}: {printable(error)}")
    found.problems += [f"start {recording.number}: {printable(why)}" for why in recording.foreign.values()]
    found.courses.append(course)
    found.curve_ranks |= stepping
    found.recordings.append(_recording(recording))
    return senseless


def _add_rank(
    found: Account, place: int, stats: RankStats, tables: dict[str, dict[str, Any]], missing: Any
) -> int:
    """Add one rank's file, all but its steps; return how many numbers in it made no sense."""
    about, amounts = stats.attributes, found.amounts
    found.hosts[place] = printable(about.get("host", ""), 64)
    found.nodes[place] = int(_number(about.get("node")))
    found.open[place] = about.get("state") != "closed"
    senseless = 0
    for name in _STEPS:
        value, bad = metrics.clean(stats.progress.get(name, 0))
        amounts[name][place] += value
        senseless += bad
    communicator = str(about.get("communicator", "")).encode(errors="replace")[:32]
    rows, bad = found.calls.add(tables["summary"], communicator, stats.size)
    senseless += bad
    of = {name: rows[:, i] for i, name in enumerate(SUMS)}
    for name in SUMS:
        amounts[name if name != "seconds" else "communication_s"][place] += of[name].sum()
    carries, counted = of["dense_bytes"] > 0, of["uncounted_calls"] == 0
    amounts["tensor_dense_bytes"][place] += of["dense_bytes"][carries].sum()
    amounts["tensor_payload_bytes"][place] += of["payload_bytes"][carries].sum()
    amounts["counted_dense_sent_bytes"][place] += of["dense_sent_bytes"][counted].sum()
    amounts["uncounted_tensor_calls"][place] += of["uncounted_calls"][carries].sum()
    sizes = tables["sizes"]
    for name, total in found.sizes.items():
        values, bad = metrics.clean(sizes[name][: len(total)])
        total[: len(values)] += values
        senseless += bad
    return senseless + found.matrix.add(stats.rank, tables["peers"], missing)


def _recording(recording: RecordingStats) -> RecordingAccount:
    files = recording.ranks
    first = files[min(files)].attributes if files else {}
    told = {
        name: printable(first.get(name, ""), 500)
        for name in ("method", "settings", "library", "communicator", "command", "hpctk", "run_id")
    }
    began = first.get("began_unix_s")
    one = RecordingAccount(
        recording.number, recording.size, sorted(files),
        [rank for rank, stats in sorted(files.items()) if stats.attributes.get("state") != "closed"],
        # Without the file's name, so that ranks with the same trouble are told of together.
        {rank: printable(why.split(f"{file_name(rank)}: ", 1)[-1]) for rank, why in recording.missing.items()},
        int(_number(first.get("nodes"))), told,
        float(began) if isinstance(began, int | float) and 0 <= began < 1e11 else None,
    )  # fmt: skip
    for stats in files.values():
        one.steps = max(one.steps, _number(stats.progress.get("steps")))
        one.steps_s = max(one.steps_s, _number(stats.progress.get("steps_s")))
        one.wall_s = max(one.wall_s, _number(stats.progress.get("flushed_s")))
    return one


def _number(value: Any) -> float:
    """Return an amount from a file, 0 where it is none."""
    return float(metrics.clean(value)[0]) if isinstance(value, int | float | np.number) else 0.0

"""A run's statistics, added up over ranks and over starts of training. Reads the files, one after the other.

Calls are not read, only their sums: it works where they were not kept, and at a thousand ranks.
"""

from __future__ import annotations

import datetime
from collections import Counter
from typing import Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats import metrics
from hpctk.stats.read import RankStats, RecordingStats, RunStats
from hpctk.stats.report.numbers import printable, rank_list
from hpctk.telemetry import schema
from hpctk.telemetry.names import file_name
from hpctk.telemetry.schema import Table

LABELS = tuple(column.name for column in schema.LABELS)
#: Sums that are kept of each kind of call.
SUMS = (
    "calls", "uncounted_calls", "seconds", "dense_bytes", "dense_sent_bytes", "payload_bytes", "sent_bytes",
    "received_bytes", "messages", "waiting_s", "combining_s", "compressing_s", "decompressing_s", "staging_s",
)  # fmt: skip
#: Amounts of each rank: of its steps, then of its calls.
_STEPS = ("steps", "steps_s", "exposed_s", "flushed_s", "events_dropped", "steps_dropped")
_TENSORS = (
    "tensor_dense_bytes", "tensor_payload_bytes", "counted_dense_sent_bytes", "uncounted_tensor_calls",
)  # fmt: skip
AMOUNTS = (*_STEPS, *(name if name != "seconds" else "communication_s" for name in SUMS), *_TENSORS)
#: Attributes that a report shows of a recording.
_ABOUT = ("method", "settings", "library", "communicator", "command", "hpctk", "run_id")
#: The tables that are read, the last of some ranks only.
TABLES = ("summary", "sizes", "peers", "steps")
#: Kinds of calls that are distinguished. A file with more was not written by a training job.
MOST_KINDS = 20_000
_OTHERS = tuple(b"" if name != "operation" else b"(others)" for name in LABELS)
#: Fields along each side of the matrix; with more ranks several share one.
FIELDS = 64
#: Rows of steps that are read in all; where there are more, not every rank's are.
ROWS = 4_000_000
#: What steps count, and columns of steps of which the mean is shown.
COUNTS = ("rounds", "uploads", "skips", "clipped", "skipped", "fallbacks")
MEANS = ("seconds", "sent_bytes", "dense_bytes", "communication_s", "exposed_s")
#: What steps say of lost ranks: all ranks that are left say the same.
LOSSES = tuple(column.name for column in schema.LOSSES)
#: A job of more ranks than this was not recorded: the number is wrong.
MOST_RANKS = 1_000_000


class Calls:
    """The kinds of calls of a run: their labels, and what they add up to, in arrays of kinds.

    `bus_bytes` is 0 where nccl-tests have no such operation.
    """

    def __init__(self) -> None:
        self.labels: list[tuple[bytes, ...]] = []
        self._kinds: dict[tuple[bytes, ...], int] = {}
        self.sums = np.zeros((0, len(SUMS)))
        self.longest_s, self.bus_bytes = np.zeros(0), np.zeros(0)

    def add(self, summary: Table, communicator: bytes, size: int) -> tuple[Any, int]:
        """Add one rank's summary; return it cleaned, rows by SUMS, and how many of its numbers made no sense."""
        columns, bad = zip(*(metrics.clean(summary[name]) for name in SUMS), strict=True)
        rows = np.stack(columns, axis=1)
        labels = list(zip(*(summary[name].tolist() for name in LABELS), strict=True))
        kinds = np.array([self._kind(one) for one in labels], np.intp)
        more = len(self.labels) - len(self.sums)
        self.sums = np.concatenate([self.sums, np.zeros((more, len(SUMS)))])
        self.longest_s = np.concatenate([self.longest_s, np.zeros(more)])
        self.bus_bytes = np.concatenate([self.bus_bytes, np.zeros(more)])
        np.add.at(self.sums, kinds, rows)
        np.maximum.at(self.longest_s, kinds, metrics.clean(summary["longest_s"])[0])
        factors = [
            (metrics.bus_factor(one[0].decode(errors="replace"), size) or 0.0) * (one[3] == communicator)
            for one in labels
        ]
        np.add.at(self.bus_bytes, kinds, rows[:, SUMS.index("dense_bytes")] * np.array(factors))
        return rows, sum(bad)

    def _kind(self, labels: tuple[bytes, ...]) -> int:
        if labels not in self._kinds and len(self.labels) >= MOST_KINDS:
            labels = _OTHERS
        if labels not in self._kinds:
            self._kinds[labels] = len(self.labels)
            self.labels.append(labels)
        return self._kinds[labels]


class Matrix:
    """Bytes from every rank to every other, of all recordings; `size` is the number of ranks of the largest.

    `fields` has the field that each rank belongs to, `sent` the bytes from field to field. A rank whose file is
    missing is there by what others received from it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fields = metrics.bins(size, FIELDS)
        n = int(self.fields[-1]) + 1 if size else 0
        self.sent = np.zeros((n, n))

    def add(self, rank: int, peers: Table, missing: Any) -> int:
        """Add one rank's peers; `missing` ranks wrote nothing themselves. Return how many numbers made no sense."""
        ids = peers["peer"]
        sent, bad_sent = metrics.clean(peers["sent_bytes"])
        received, bad_received = metrics.clean(peers["received_bytes"])
        known = (ids >= 0) & (ids < self.size)
        if 0 <= rank < self.size:
            np.add.at(self.sent[self.fields[rank]], self.fields[ids[known]], sent[known])
            silent = known & np.isin(ids, missing)
            np.add.at(self.sent[:, self.fields[rank]], self.fields[ids[silent]], received[silent])
        return bad_sent + bad_received + int(len(ids) - np.count_nonzero(known))


class Course:
    """One recording's steps, added up row by row over ranks. Steps without a row are not there."""

    def __init__(self) -> None:
        self.step = np.zeros(0, np.int64)
        self._sums = {name: np.zeros(0) for name in (*MEANS, "loss", "ranks", "losses")}

    def add(self, steps: dict[str, Any]) -> tuple[dict[str, float], int]:
        """Add one rank's steps; return what they count, and how many numbers made no sense."""
        rows, bad = len(steps["step"]), 0
        if rows > len(self.step):
            self.step = np.array(steps["step"])
            for name, old in self._sums.items():
                self._sums[name] = np.concatenate([old, np.zeros(rows - len(old))])
        for name in MEANS:
            values, bad_values = metrics.clean(steps[name])
            self._sums[name][:rows] += values
            bad += bad_values
        loss = np.asarray(steps["loss"], np.float64)
        known = np.abs(loss) <= metrics.LARGEST
        self._sums["loss"][:rows] += np.where(known, loss, 0.0)
        self._sums["losses"][:rows] += known
        self._sums["ranks"][:rows] += 1
        counts = {}
        for name in (*COUNTS, *LOSSES):
            values, bad_values = metrics.clean(steps[name])
            counts[name] = float(values.sum())
            bad += bad_values
        return counts, bad

    def mean(self, name: str) -> Any:
        """Return a column, the mean of its ranks, row by row."""
        return self._sums[name] / np.maximum(self._sums["ranks"], 1)

    @property
    def loss(self) -> Any:
        """The mean loss of the ranks that had one, NaN where none did."""
        losses = self._sums["losses"]
        return np.where(losses > 0, self._sums["loss"] / np.maximum(losses, 1), np.nan)

    def sums(self) -> dict[str, float]:
        """Return the sums over all rows of all ranks, and their number as `rows`."""
        sums = {name: float(self._sums[name].sum()) for name in MEANS}
        return {**sums, "rows": float(self._sums["ranks"].sum())}


class Account:
    """A run, added up.

    `recordings` are described as in the document, `spans` when they began and how long they took, where that is known.
    `hosts`, `nodes` and `closed` belong to `ranks`, those with a file in any recording, as do `amounts` (AMOUNTS).
    `curve_ranks` are those whose steps were read. `problems` is what could not be read, and numbers without sense.
    """

    def __init__(self, run: RunStats) -> None:
        self.path = str(run.path)
        self.ranks = sorted({rank for recording in run.recordings for rank in recording.ranks})
        n = len(self.ranks)
        self.hosts, self.nodes, self.closed = [""] * n, [0] * n, [True] * n
        self.amounts = {name: np.zeros(n) for name in AMOUNTS}
        self.calls = Calls()
        self.sizes = {name: np.zeros(schema.SIZE_BINS) for name in ("messages", "sent_bytes", "calls")}
        self.matrix = Matrix(min(max((one.size for one in run.recordings), default=0), MOST_RANKS))
        self.recordings: list[dict[str, Any]] = []
        self.spans: list[tuple[float, float]] = []
        self.courses: list[Course] = []
        self.counts, self.losses = dict.fromkeys(COUNTS, 0.0), dict.fromkeys(LOSSES, 0.0)
        self.curve_ranks: set[int] = set()
        self.problems: list[str] = []


def account(run: RunStats) -> Account:
    """Read a run's files and add them up."""
    total = Account(run)
    bad = sum(_add_recording(total, recording) for recording in run.recordings)
    total.problems += [f"start {number}: {printable(why)}" for number, why in run.unreadable.items()]
    if bad:
        total.problems.append(f"{bad} numbers in these files make no sense and count as 0")
    return total


def _stepping(ranks: list[int], rows: int) -> list[int]:
    """Return the ranks whose steps are read, when all together have so many rows: evenly spread, at least 4."""
    if rows <= ROWS:
        return ranks
    count = max(4, len(ranks) * ROWS // rows)
    return ranks if count >= len(ranks) else [ranks[i * len(ranks) // count] for i in range(count)]


def _add_recording(total: Account, recording: RecordingStats) -> int:
    """Add one start of training; return how many numbers in its files made no sense."""
    indices = {rank: index for index, rank in enumerate(total.ranks)}
    rows = sum(_number(stats.progress.get("steps_rows")) for stats in recording.ranks.values())
    stepping = set(_stepping(sorted(recording.ranks), int(rows)))
    missing = np.array(sorted(recording.missing), np.int64)
    course, bad, losses = Course(), 0, dict.fromkeys(LOSSES, 0.0)
    for rank, stats in sorted(recording.ranks.items()):
        try:
            tables = stats.tables(*(TABLES if rank in stepping else TABLES[:-1]))
            bad += _add_rank(total, indices[rank], stats, tables, missing)
            if rank in stepping:
                counts, bad_steps = course.add(tables["steps"])
                bad += bad_steps
                for name in COUNTS:
                    total.counts[name] += counts[name]
                losses = {name: max(most, counts[name]) for name, most in losses.items()}
        except (HpctkError, OSError) as error:
            total.problems.append(f"start {recording.number}, rank {rank}: {printable(error)}")
    total.problems += [f"start {recording.number}: {printable(why)}" for why in recording.foreign.values()]
    for name, most in losses.items():
        total.losses[name] += most
    total.courses.append(course)
    total.curve_ranks |= stepping
    _describe_recording(total, recording)
    return bad


def _add_rank(total: Account, index: int, stats: RankStats, tables: dict[str, Table], missing: Any) -> int:
    """Add one rank's file, all but its steps; return how many numbers in it made no sense."""
    attributes, amounts = stats.attributes, total.amounts
    total.hosts[index] = printable(attributes.get("host", ""), 64)
    total.nodes[index] = int(_number(attributes.get("node")))
    total.closed[index] = attributes.get("state") == "closed"
    bad = 0
    for name in _STEPS:
        value, bad_values = metrics.clean(stats.progress.get(name, 0))
        amounts[name][index] += value
        bad += bad_values
    communicator = str(attributes.get("communicator", "")).encode(errors="replace")[:32]
    rows, bad_values = total.calls.add(tables["summary"], communicator, stats.size)
    bad += bad_values
    sums = {name: rows[:, i] for i, name in enumerate(SUMS)}
    for name in SUMS:
        amounts[name if name != "seconds" else "communication_s"][index] += sums[name].sum()
    carries, counted = sums["dense_bytes"] > 0, sums["uncounted_calls"] == 0
    amounts["tensor_dense_bytes"][index] += sums["dense_bytes"][carries].sum()
    amounts["tensor_payload_bytes"][index] += sums["payload_bytes"][carries].sum()
    amounts["counted_dense_sent_bytes"][index] += sums["dense_sent_bytes"][counted].sum()
    amounts["uncounted_tensor_calls"][index] += sums["uncounted_calls"][carries].sum()
    for name, messages in total.sizes.items():
        values, bad_values = metrics.clean(tables["sizes"][name])
        messages += values
        bad += bad_values
    return bad + total.matrix.add(stats.rank, tables["peers"], missing)


def _describe_recording(total: Account, recording: RecordingStats) -> None:
    files = recording.ranks
    first = files[min(files)].attributes if files else {}
    not_closed = [rank for rank, stats in files.items() if stats.attributes.get("state") != "closed"]
    # Without the file's name, so that ranks with the same trouble stand together.
    why = {r: printable(text.split(f"{file_name(r)}: ", 1)[-1]) for r, text in recording.missing.items()}
    reasons = [
        {"why": text, "ranks": rank_list((rank for rank in why if why[rank] == text), 100), "count": n}
        for text, n in Counter(why.values()).most_common(20)
    ]
    # Steps and seconds are those of the rank with most.
    steps, steps_s, wall_s = (
        max((_number(stats.progress.get(name)) for stats in files.values()), default=0.0)
        for name in ("steps", "steps_s", "flushed_s")
    )
    began, began_text = first.get("began_unix_s"), None
    if isinstance(began, int | float) and 0 <= began < 1e11:
        total.spans.append((float(began), wall_s))
        began_text = datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds")
    total.recordings.append({
        "number": recording.number, "size": recording.size, "files": len(files),
        "not_closed": rank_list(not_closed, 100), "not_closed_files": len(not_closed), "missing": reasons,
        "nodes": int(_number(first.get("nodes"))), **{name: printable(first.get(name, ""), 500) for name in _ABOUT},
        "began": began_text, "steps": steps, "steps_s": steps_s, "wall_s": wall_s,
    })  # fmt: skip


def _number(value: Any) -> float:
    """Return an amount from a file, 0 where it is none."""
    return float(metrics.clean(value)[0]) if isinstance(value, int | float | np.number) else 0.0

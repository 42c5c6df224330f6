"""A run's statistics, added up over ranks and over starts of training. Reads the files, one after the other.

Calls are not read, only their sums: it works where they were not kept, and at a thousand ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctk.errors import HpctkError
from hpctk.stats import metrics
from hpctk.stats.read import RankStats, RecordingStats, RunStats
from hpctk.stats.report import curve
from hpctk.stats.report.numbers import printable
from hpctk.telemetry import schema
from hpctk.telemetry.names import file_name

LABELS = tuple(column.name for column in schema.LABELS)
#: Sums that are kept of each kind of call.
SUMS = (
    "calls", "uncounted_calls", "seconds", "dense_bytes", "dense_sent_bytes", "payload_bytes", "sent_bytes",
    "received_bytes", "messages", "waiting_s", "combining_s", "compressing_s", "decompressing_s", "staging_s",
)  # fmt: skip
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
#: Kinds of calls that are told apart. A file with more was not written by a training job.
MOST_KINDS = 20_000
_OTHERS = tuple(b"" if name != "operation" else b"(others)" for name in LABELS)
#: Fields along each side of the matrix; with more ranks several share one.
FIELDS = 64
#: A job of more ranks than this was not recorded: the number is wrong.
MOST_RANKS = 1_000_000


class Calls:
    """The kinds of calls of a run, and what they add up to.

    Attributes
    ----------
    labels : list of tuple of bytes
        Operation, schedule, compressor, communicator, tensor.
    sums : array of kinds by SUMS
    longest_s, bus_bytes : array
        Of each kind; bus_bytes is 0 where nccl-tests have no such operation.
    """

    def __init__(self) -> None:
        self.labels: list[tuple[bytes, ...]] = []
        self._kinds: dict[tuple[bytes, ...], int] = {}
        self.sums = np.zeros((0, len(SUMS)))
        self.longest_s, self.bus_bytes = np.zeros(0), np.zeros(0)

    def add(self, summary: dict[str, Any], communicator: bytes, size: int) -> tuple[Any, int]:
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

    Attributes
    ----------
    fields : array
        The field that each rank belongs to.
    sent : array
        Bytes from field to field. A rank whose file is missing is there by what others received from it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fields = metrics.bins(size, FIELDS)
        n = int(self.fields[-1]) + 1 if size else 0
        self.sent = np.zeros((n, n))

    def add(self, rank: int, peers: dict[str, Any], missing: Any) -> int:
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


@dataclass
class RecordingAccount:
    """One start of training.

    Attributes
    ----------
    files : int
    not_closed : list of int
        Ranks whose file is not closed.
    missing : dict of int to str
        Why ranks are missing.
    attributes : dict of str to str
        What the first file says of all.
    steps, steps_s, wall_s : float
        Those of the rank with most.
    """

    number: int
    size: int
    files: int
    not_closed: list[int]
    missing: dict[int, str]
    nodes: int
    attributes: dict[str, str]
    began_unix_s: float | None
    steps: float
    steps_s: float
    wall_s: float


class Account:
    """A run, added up.

    Attributes
    ----------
    ranks : list of int
        Those with a file in any recording; `hosts`, `nodes` and `closed` (in the last) belong to them.
    amounts : dict of str to array
        AMOUNTS of those ranks, summed over recordings.
    curve_ranks : set of int
        Those whose steps were read.
    problems : list of str
        What could not be read, and numbers that made no sense.
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
        self.recordings: list[RecordingAccount] = []
        self.courses: list[curve.Course] = []
        self.counts = dict.fromkeys(curve.COUNTS, 0.0)
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


def _add_recording(total: Account, recording: RecordingStats) -> int:
    """Add one start of training; return how many numbers in its files made no sense."""
    indices = {rank: index for index, rank in enumerate(total.ranks)}
    rows = sum(_number(stats.progress.get("steps_rows")) for stats in recording.ranks.values())
    stepping = set(curve.chosen(sorted(recording.ranks), int(rows)))
    missing = np.array(sorted(recording.missing), np.int64)
    course, bad = curve.Course(), 0
    for rank, stats in sorted(recording.ranks.items()):
        try:
            tables = stats.tables(*(TABLES if rank in stepping else TABLES[:-1]))
            bad += _add_rank(total, indices[rank], stats, tables, missing)
            if rank in stepping:
                counts, bad_steps = course.add(tables["steps"])
                bad += bad_steps
                for name, value in counts.items():
                    total.counts[name] += value
        except (HpctkError, OSError) as error:
            total.problems.append(f"start {recording.number}, rank {rank}: {printable(error)}")
    total.problems += [f"start {recording.number}: {printable(why)}" for why in recording.foreign.values()]
    total.courses.append(course)
    total.curve_ranks |= stepping
    total.recordings.append(_recording(recording))
    return bad


def _add_rank(
    total: Account, index: int, stats: RankStats, tables: dict[str, dict[str, Any]], missing: Any
) -> int:
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


def _recording(recording: RecordingStats) -> RecordingAccount:
    files = recording.ranks
    first = files[min(files)].attributes if files else {}
    began = first.get("began_unix_s")

    def largest(name: str) -> float:
        return max((_number(stats.progress.get(name)) for stats in files.values()), default=0.0)

    return RecordingAccount(
        recording.number, recording.size, len(files),
        [rank for rank, stats in sorted(files.items()) if stats.attributes.get("state") != "closed"],
        # Without the file's name, so that ranks with the same trouble stand together.
        {rank: printable(why.split(f"{file_name(rank)}: ", 1)[-1]) for rank, why in recording.missing.items()},
        int(_number(first.get("nodes"))),
        {
            name: printable(first.get(name, ""), 500)
            for name in ("method", "settings", "library", "communicator", "command", "hpctk", "run_id")
        },
        float(began) if isinstance(began, int | float) and 0 <= began < 1e11 else None,
        largest("steps"), largest("steps_s"), largest("flushed_s"),
    )  # fmt: skip


def _number(value: Any) -> float:
    """Return an amount from a file, 0 where it is none."""
    return float(metrics.clean(value)[0]) if isinstance(value, int | float | np.number) else 0.0

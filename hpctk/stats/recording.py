"""The recorder that writes files: rows are gathered in memory and flushed now and then. Local; never communicates.

A call costs one packed row in memory. Sums, histograms and the file follow when the rows are flushed: every
`flush_steps` steps or `flush_s` seconds, or when the room in memory is used up. Beyond `events` rows no more are
written, but the sums go on, in constant memory. Where the file cannot be written any more, one warning, and nothing
is recorded from then on: training must not stop for its statistics.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctk.errors import SettingError
from hpctk.stats import schema
from hpctk.stats.rank_file import Attributes, RankFile
from hpctk.stats.recorder import Call
from hpctk.stats.schema import CALLS, LABELS, PEERS, PROGRESS, SIZES, STEPS, SUMMARY
from hpctk.stats.traffic import Traffic

#: Rows of calls in memory.
BUFFER_ROWS = 2048
#: Rows that a new file has room for; it grows by GROWTH.
FIRST_ROWS = 1024
GROWTH = 4
#: Kinds of calls that are told apart in the summary; the rest are summed up together.
KINDS = 256
REST = "(other)"
#: Counts of a method that have a column in STEPS: the name of the column.
COUNTS = {
    "rounds": "rounds",
    "uploads": "uploads",
    "skips": "skips",
    "clipped_steps": "clipped",
    "skipped_steps": "skipped",
    "fallbacks": "fallbacks",
}

_WIDTHS = [int(column.kind[1:]) for column in LABELS]
#: The columns before the labels, and those after them: what is summed up.
_BEFORE, _AMOUNTS = CALLS.columns[:4], CALLS.columns[4 + len(LABELS) :]
#: A row of calls, its labels as one string: they come ready-made.
_ROW = struct.Struct(
    "<" + "".join(c.code for c in _BEFORE) + f"{sum(_WIDTHS)}s" + "".join(c.code for c in _AMOUNTS)
)


@dataclass(frozen=True)
class StatsSettings:
    """How statistics are written.

    Attributes
    ----------
    folder : Path
        The run's.
    events : int
        The most rows of calls, and of steps, in a file; 0 for sums alone.
    flush_steps : int
    flush_s : float
        A file is brought up to date after so many steps, or seconds.
    """

    folder: Path
    events: int = 200_000
    flush_steps: int = 1000
    flush_s: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.events, int) or self.events < 0:
            raise SettingError(f"events={self.events!r}: need a number of rows, 0 for none")
        if not isinstance(self.flush_steps, int) or self.flush_steps < 1:
            raise SettingError(f"flush_steps={self.flush_steps!r}: need a number of steps above 0")
        if not 0 <= self.flush_s < float("inf"):
            raise SettingError(f"flush_s={self.flush_s!r}: need a number of seconds, 0 for every call")


class Recording:
    """One rank's recording of one optimizer.

    Parameters
    ----------
    path : Path
        The file to write.
    settings : StatsSettings
    size : int
        Of the communicator.
    communicator : str
    attributes, environment : mapping
        What describes the recording.
    dense_step_bytes : int
        What averaging all gradients uncompressed would send in a step.

    Raises OSError where the file cannot be made.
    """

    flags = True

    def __init__(
        self,
        path: Path,
        settings: StatsSettings,
        size: int,
        communicator: str,
        attributes: Attributes,
        environment: Mapping[str, str],
        dense_step_bytes: int = 0,
    ) -> None:
        self.path = path
        self._settings, self._communicator, self._dense_step_bytes = settings, communicator, dense_step_bytes
        self.traffic: Traffic | None = Traffic(size)
        self.began_s = time.perf_counter()
        described = {**attributes, "began_unix_s": time.time(), "events": settings.events}
        room = min(FIRST_ROWS, settings.events)
        rows = {"calls": room, "steps": room, "summary": KINDS, "peers": size, "sizes": schema.SIZE_BINS}
        self._file: RankFile | None = RankFile(path, described, environment, {**rows, "progress": 1})
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._memory = bytearray(BUFFER_ROWS * _ROW.size)
        self._buffer = np.frombuffer(self._memory, CALLS.dtype)
        self._kinds: dict[tuple[str, str, str, str], tuple[int, bytes]] = {}
        #: The kind of each row in the buffer.
        self._rows: list[int] = []
        self._number = 0
        self._steps: list[tuple[Any, ...]] = []
        self._losses: list[Any] = []
        self._summary = np.zeros(KINDS, SUMMARY.dtype)
        self._summary["entry"] = np.arange(KINDS)
        self._sizes = np.zeros(schema.SIZE_BINS, np.int64)
        self._written = {"calls": 0, "steps": 0}
        self._dropped = {"calls": 0, "steps": 0}
        self._progress = np.zeros(1, PROGRESS.dtype)
        self.step = -1
        self._step_began_s = 0.0
        self._since = _Since()
        self._flushed_s = self.began_s
        _open.add(self)

    @property
    def writing(self) -> bool:
        """Whether anything is recorded any more."""
        return self._file is not None

    def record(self, call: Call) -> None:
        """Note one call."""
        with self._lock:
            if self._file is None:
                return
            key = call.operation, call.schedule, call.compressor, call.tensor
            kind, labels = self._kinds.get(key) or self._new_kind(key)
            began = call.began_s - self.began_s
            end = began + call.seconds
            row, since = len(self._rows), self._since
            sent = -1 if call.sent_bytes is None else call.sent_bytes
            received = -1 if call.received_bytes is None else call.received_bytes
            _ROW.pack_into(
                self._memory, row * _ROW.size, self._number, self.step, began, end, labels,
                call.elements, call.dense_bytes, call.dense_sent_bytes, call.payload_bytes, sent, received,
                call.messages, call.waiting_s, call.combining_s, call.compressing_s, call.decompressing_s,
                call.staging_s,
            )  # fmt: skip
            self._rows.append(kind)
            self._number += 1
            since.calls += 1
            since.seconds += call.seconds
            since.messages += call.messages
            if sent >= 0:
                since.sent_bytes += sent
                since.received_bytes += received
            if row + 1 == BUFFER_ROWS:
                self._drain()
            if end + self.began_s - self._flushed_s > self._settings.flush_s:
                self._flush()

    def end_step(self, step: int, counts: Mapping[str, int], loss: Any, exposed_s: float) -> None:
        """Note that a step is over; `counts` and `exposed_s` are those of this step alone."""
        with self._lock:
            if self._file is None:
                return
            now = time.perf_counter() - self.began_s
            since, self._since = self._since, _Since()
            self._steps.append(
                (
                    step, self._step_began_s, now - self._step_began_s, since.seconds, exposed_s, np.nan,
                    since.calls, self._dense_step_bytes, since.sent_bytes, since.received_bytes, since.messages,
                    *(counts.get(name, 0) for name in COUNTS),
                )
            )  # fmt: skip
            # Turned into a number when it is written: on a device that would wait for all that was started there.
            self._losses.append(loss)
            self.step, self._step_began_s = step + 1, now
            if len(self._steps) >= self._settings.flush_steps or (
                now + self.began_s - self._flushed_s > self._settings.flush_s
            ):
                self._flush()

    def begin_steps(self, step: int) -> None:
        """Say that the next step is number `step`, and begins now: what came before was preparation."""
        with self._lock:
            self.step = step
            self._step_began_s = time.perf_counter() - self.began_s
            self._since = _Since()

    def flush(self) -> None:
        """Bring the file up to date."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Bring the file up to date and close it; nothing is recorded afterwards."""
        # A process that was forked off has its copy of this, but the file is not its own.
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._flush()
            if self._file is not None:
                self._attempt(self._close_file)
                self._file = None
        _open.discard(self)

    def _close_file(self, file: RankFile) -> None:
        file.close({**self._written, "summary": int(self._progress[0]["summary_rows"])})

    def _new_kind(self, key: tuple[str, str, str, str]) -> tuple[int, bytes]:
        number = len(self._kinds)
        if number >= KINDS - 1:
            # Not remembered: names that never come twice must not fill the memory.
            return KINDS - 1, self._labels(key)
        self._kinds[key] = made = number, self._labels(key)
        self._label(number, made[1])
        return made

    def _labels(self, key: tuple[str, str, str, str]) -> bytes:
        texts = *key[:3], self._communicator, key[3]
        return b"".join(
            _cut(text, width).ljust(width, b"\0") for text, width in zip(texts, _WIDTHS, strict=True)
        )

    def _label(self, number: int, labels: bytes) -> None:
        found = np.frombuffer(labels, [(column.name, column.kind) for column in LABELS])
        for column in LABELS:
            self._summary[column.name][number] = found[column.name][0]

    def _drain(self) -> None:
        """Sum up the rows in memory, and write them where there is room."""
        calls = self._buffer[: len(self._rows)]
        kinds = np.array(self._rows, np.intp)
        self._rows.clear()
        if not len(calls):
            return
        if KINDS - 1 in kinds:
            self._label(KINDS - 1, self._labels((REST, "", "", REST)))
        summary, seconds = self._summary, calls["end_s"] - calls["start_s"]
        unknown = (calls["sent_bytes"] < 0) | (calls["received_bytes"] < 0)
        summary["calls"] += np.bincount(kinds, minlength=KINDS)
        summary["uncounted_calls"] += np.bincount(kinds[unknown], minlength=KINDS)
        summary["seconds"] += np.bincount(kinds, seconds, KINDS)
        np.maximum.at(summary["longest_s"], kinds, seconds)
        for name in (column.name for column in _AMOUNTS):
            values = (
                np.where(unknown, 0, calls[name]) if name in ("sent_bytes", "received_bytes") else calls[name]
            )
            summary[name] += np.bincount(kinds, values, KINDS).astype(summary[name].dtype)
        lengths = np.frexp(np.maximum(calls["payload_bytes"], 1).astype(np.float64))[1] - 1
        self._sizes += np.bincount(lengths, minlength=schema.SIZE_BINS)[: schema.SIZE_BINS]
        self._append(CALLS, calls)

    def _drain_steps(self) -> None:
        if not self._steps:
            return
        steps = np.array(self._steps, STEPS.dtype)
        steps["loss"] = [_number(loss) for loss in self._losses]
        self._steps.clear()
        self._losses.clear()
        progress = self._progress[0]
        progress["steps"] += len(steps)
        progress["steps_s"] += steps["seconds"].sum()
        progress["exposed_s"] += steps["exposed_s"].sum()
        self._append(STEPS, steps)

    def _append(self, table: schema.TableFormat, rows: Any) -> None:
        first, name = self._written[table.name], table.name
        taken = rows[: max(0, self._settings.events - first)]
        self._dropped[name] += len(rows) - len(taken)
        if len(taken):
            self._attempt(lambda file: self._write_rows(file, table, first, taken))
            self._written[name] = first + len(taken)

    def _write_rows(self, file: RankFile, table: schema.TableFormat, first: int, rows: Any) -> None:
        needed, room = first + len(rows), file.rows[table.name]
        if needed > room:
            while room < needed:
                room = min(self._settings.events, room * GROWTH)
            file.grow(table, room)
        file.write(table, first, rows)

    def _flush(self) -> None:
        if self._file is None:
            return
        self._drain()
        self._drain_steps()
        self._flushed_s = time.perf_counter()
        progress = self._progress[0]
        progress["calls_rows"], progress["steps_rows"] = self._written["calls"], self._written["steps"]
        progress["summary_rows"] = np.flatnonzero(self._summary["calls"]).max(initial=-1) + 1
        progress["events_dropped"], progress["steps_dropped"] = self._dropped["calls"], self._dropped["steps"]
        progress["flushed_s"] = self._flushed_s - self.began_s
        self._attempt(self._write_small)

    def _write_small(self, file: RankFile) -> None:
        """Write the tables of constant size, and last of all how far the others are."""
        traffic = self.traffic
        assert traffic is not None
        peers = np.zeros(len(traffic.sent_bytes), PEERS.dtype)
        peers["peer"] = np.arange(len(peers))
        peers["sent_bytes"], peers["sent_messages"] = traffic.sent_bytes, traffic.sent_messages
        peers["received_bytes"], peers["received_messages"] = (
            traffic.received_bytes,
            traffic.received_messages,
        )
        sizes = np.zeros(schema.SIZE_BINS, SIZES.dtype)
        sizes["lower_bytes"] = 1 << np.arange(schema.SIZE_BINS)
        sizes["messages"], sizes["sent_bytes"], sizes["calls"] = (
            traffic.sizes,
            traffic.size_bytes,
            self._sizes,
        )
        file.write(SUMMARY, 0, self._summary)
        file.write(PEERS, 0, peers)
        file.write(SIZES, 0, sizes)
        file.write(PROGRESS, 0, self._progress)

    def _attempt(self, work: Any) -> None:
        """Do something to the file; where that fails, warn and leave it as it is for good."""
        file = self._file
        if file is None:
            return
        try:
            work(file)
        except OSError as error:
            self._file = None
            file.abandon()
            warnings.warn(
                f"hpctk: no more statistics on this rank, {file.path} cannot be written: {error}. Training goes on.",
                RuntimeWarning,
                stacklevel=2,
            )


class _Since:
    """Sums over the calls since the last step."""

    __slots__ = ("calls", "messages", "received_bytes", "seconds", "sent_bytes")

    def __init__(self) -> None:
        self.calls = self.messages = self.sent_bytes = self.received_bytes = 0
        self.seconds = 0.0


def _cut(text: str, width: int) -> bytes:
    """Return a text as UTF-8 of at most `width` bytes; a long one without its middle."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= width:
        return data
    half = (width - 2) // 2
    whole = data[:half] + b".." + data[len(data) - (width - 2 - half) :]
    # A letter that was cut in two is left out.
    return whole.decode(errors="ignore").encode()


def _number(loss: Any) -> float:
    if loss is None:
        return float("nan")
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        # A loss of several elements, or not a number at all.
        return float("nan")


#: The recordings of this process that are open.
_open: weakref.WeakSet[Recording] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for recording in list(_open):
        recording.close()

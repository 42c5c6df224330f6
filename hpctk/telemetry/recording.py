"""The recorder that writes files: rows are gathered in memory and flushed now and then. Local; never communicates.

A call costs one packed row in memory. Sums, histograms and the file follow when the rows are flushed: every
`flush_steps` steps or `flush_s` seconds, or when the room in memory is used up. Beyond `events` rows no more are
written, but the sums go on, in constant memory. Where the file cannot be written any more, one warning, and nothing
is recorded from then on: training must not stop for its statistics.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctk.log import log
from hpctk.telemetry import schema
from hpctk.telemetry.rank_file import Attributes, RankFile
from hpctk.telemetry.recorder import Call
from hpctk.telemetry.schema import AMOUNTS, CALLS, LABELS, PEERS, PROGRESS, SIZES, STEPS, SUMMARY
from hpctk.telemetry.settings import StatsSettings
from hpctk.telemetry.summary import KINDS, Summary
from hpctk.telemetry.traffic import Traffic

#: Calls that are turned into rows at once.
PACKED_CALLS = 128
#: Rows of calls in memory.
BUFFER_ROWS = 2048
#: Rows that a new file has room for; it grows by GROWTH. Laying out a file takes 40 ms, so it grows seldom.
FIRST_ROWS = 4096
GROWTH = 8
#: What methods count that are the last columns of STEPS, in their order.
COUNTS = (
    "rounds", "uploads", "skips", "clipped_steps", "skipped_steps", "fallbacks",
    *(column.name for column in schema.LOSSES),
)  # fmt: skip
#: Columns of steps that are sums over calls.
_SUMMED = ("calls", "communication_s", "sent_bytes", "received_bytes", "messages")
#: A row of calls, its labels as one string: they come ready-made.
_LABEL_BYTES = sum(int(column.kind[1:]) for column in LABELS)
_CODES = {"<i8": "q", "<f8": "d"}
_ROW = struct.Struct(f"<qqdd{_LABEL_BYTES}s" + "".join(_CODES[column.kind] for column in AMOUNTS))


class Recording:
    """One rank's recording of one optimizer, into the file `path`. Raise OSError where it cannot be made.

    `size` is that of the communicator, `attributes` and `environment` describe the recording. `dense_step_bytes` is
    what averaging all gradients uncompressed would send in a step, `began_s` when the recording began, by
    time.perf_counter(): now where not given.
    """

    flags = True

    def __init__(
        self, path: Path, settings: StatsSettings, size: int, communicator: str, attributes: Attributes,
        environment: Mapping[str, str], dense_step_bytes: int = 0, began_s: float | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self._settings, self._dense_step_bytes = settings, dense_step_bytes
        self.traffic = Traffic(size)
        self.began_s = time.perf_counter() if began_s is None else began_s
        described = {**attributes, "began_unix_s": time.time(), "events": settings.events}
        room = min(FIRST_ROWS, settings.events)
        rows = {"calls": room, "steps": room, "summary": KINDS, "peers": size, "sizes": schema.SIZE_BINS}
        self._file: RankFile | None = RankFile(path, described, environment, {**rows, "progress": 1})
        self._lock = threading.Lock()
        self._owner = os.getpid()
        #: Calls that are not rows yet, and the steps they belong to.
        self._calls: list[Call] = []
        self._call_steps: list[int] = []
        #: Rows, and the kind of each. Another thread may have added a few calls beyond the limit.
        self._memory = bytearray(2 * BUFFER_ROWS * _ROW.size)
        self._kinds: list[int] = []
        self._number = 0
        self._summary = Summary(communicator)
        self._steps: list[tuple[Any, ...]] = []
        self._losses: list[Any] = []
        self._written = {"calls": 0, "steps": 0}
        self._dropped = {"calls": 0, "steps": 0}
        self._progress = np.zeros(1, PROGRESS.dtype)
        self.step = -1
        self._step_began_s = 0.0
        #: What the calls of steps come to that are not written yet, by column; the first of them.
        self._sums, self._first_step = np.zeros((len(_SUMMED), 0)), 0
        #: When the next flush is due.
        self._flush_due_s = self.began_s + settings.flush_s

    @property
    def writing(self) -> bool:
        """Whether anything is recorded any more."""
        return self._file is not None

    def record(self, call: Call) -> None:
        """Record one call."""
        # Appending needs no lock; everything else is done for many calls at once.
        self._calls.append(call)
        self._call_steps.append(self.step)
        if len(self._calls) >= PACKED_CALLS or call.began_s > self._flush_due_s:
            with self._lock:
                self._pack()
                if call.began_s > self._flush_due_s:
                    self._flush()
                if len(self._kinds) >= BUFFER_ROWS:
                    self._drain()

    def end_step(self, step: int, counts: Mapping[str, float], loss: Any, exposed_s: float) -> None:
        """Record a step that is over; `counts` and `exposed_s` are those of this step alone."""
        with self._lock:
            if self._file is None:
                return
            time_now = time.perf_counter()
            now = time_now - self.began_s
            # What its calls come to is summed up when they are.
            seconds = now - self._step_began_s
            others = 0, self._dense_step_bytes, 0, 0, 0, *(counts.get(name, 0) for name in COUNTS)
            self._steps.append((step, self._step_began_s, seconds, 0.0, exposed_s, np.nan, *others))
            # Turned into a number when it is written: on a device that would wait for all that was started there.
            self._losses.append(loss)
            self.step, self._step_began_s = step + 1, now
            if len(self._steps) >= self._settings.flush_steps or time_now > self._flush_due_s:
                self._flush()

    def begin_steps(self, step: int) -> None:
        """Begin step number `step` now: what came before was preparation."""
        with self._lock:
            self._flush()
            self.step = self._first_step = step
            self._sums = np.zeros((len(_SUMMED), 0))
            self._step_began_s = time.perf_counter() - self.began_s

    def forget(self, kept: Sequence[int]) -> None:
        """Go on without ranks that are lost; `kept` are the numbers that the others had, in their new order."""
        with self._lock:
            self.traffic.forget(kept)

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
            self._attempt(lambda file: file.close({**self._written, "summary": self._summary.rows}))
            self._file = None

    def _drain(self) -> None:
        """Turn the calls in memory into rows, sum them up, and write them where there is room."""
        self._pack()
        rows = np.frombuffer(self._memory, CALLS.dtype, len(self._kinds))
        kinds = np.array(self._kinds, np.intp)
        self._kinds.clear()
        if self._file is not None and len(rows):
            self._summary.add(rows, kinds)
            self._sum_steps(rows)
            self._append(CALLS, rows)
        if max(len(self.traffic.outgoing), len(self.traffic.incoming)) > BUFFER_ROWS:
            self.traffic.fold()

    def _pack(self) -> None:
        """Turn calls into rows. Few at a time, while they are still in the processor's cache."""
        n = len(self._calls)
        calls, steps = self._calls[:n], self._call_steps[:n]
        del self._calls[:n], self._call_steps[:n]
        self._attempt(lambda _: self._pack_rows(calls, steps))

    def _pack_rows(self, calls: list[Call], steps: list[int]) -> None:
        known, new_kind, zero = self._summary.kinds, self._summary.new_kind, self.began_s
        memory, offset, number = self._memory, len(self._kinds) * _ROW.size, self._number
        for call, step in zip(calls, steps, strict=True):
            key = call.operation, call.schedule, call.compressor, call.tensor
            kind, labels = known.get(key) or new_kind(key)
            self._kinds.append(kind)
            began, sent, received = call.began_s - zero, call.sent_bytes, call.received_bytes
            _ROW.pack_into(
                memory, offset, number, step, began, began + call.seconds, labels,
                call.elements, call.dense_bytes, call.dense_sent_bytes, call.payload_bytes,
                schema.UNKNOWN if sent is None else sent, schema.UNKNOWN if received is None else received,
                call.messages, call.waiting_s, call.combining_s, call.compressing_s, call.decompressing_s,
                call.staging_s,
            )  # fmt: skip
            offset += _ROW.size
            number += 1
        self._number = number

    def _sum_steps(self, calls: Any) -> None:
        """Add calls to the sums of the steps that they belong to."""
        calls = calls[calls["step"] >= self._first_step]
        if not len(calls):
            return
        steps = calls["step"] - self._first_step
        more = int(steps.max()) + 1 - self._sums.shape[1]
        if more > 0:
            self._sums = np.hstack([self._sums, np.zeros((len(_SUMMED), more))])
        n = self._sums.shape[1]
        known = calls["sent_bytes"] >= 0
        self._sums[0] += np.bincount(steps, minlength=n)
        self._sums[1] += np.bincount(steps, calls["end_s"] - calls["start_s"], n)
        for row, name in enumerate(_SUMMED[2:], 2):
            self._sums[row] += np.bincount(steps, np.where(known, calls[name], 0), n)

    def _drain_steps(self) -> None:
        if not self._steps:
            return
        steps = np.array(self._steps, STEPS.dtype)
        steps["loss"] = [_number(loss) for loss in self._losses]
        sums = self._sums[:, : len(steps)]
        for row, name in enumerate(_SUMMED):
            steps[name][: sums.shape[1]] = sums[row]
        self._sums, self._first_step = self._sums[:, len(steps) :], self._first_step + len(steps)
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
        now = time.perf_counter()
        self._flush_due_s = now + self._settings.flush_s
        progress = self._progress[0]
        progress["calls_rows"], progress["steps_rows"] = self._written["calls"], self._written["steps"]
        progress["summary_rows"] = self._summary.rows
        progress["events_dropped"], progress["steps_dropped"] = self._dropped["calls"], self._dropped["steps"]
        progress["flushed_s"] = now - self.began_s
        self._attempt(self._write_small)

    def _write_small(self, file: RankFile) -> None:
        """Write the tables of constant size, and last of all how far the others are."""
        self.traffic.fold()
        self.traffic.sizes["calls"] = self._summary.sizes
        file.write(SUMMARY, 0, self._summary.table)
        file.write(PEERS, 0, self.traffic.peers)
        file.write(SIZES, 0, self.traffic.sizes)
        file.write(PROGRESS, 0, self._progress)

    def _attempt(self, work: Callable[[RankFile], object]) -> None:
        """Do something to the file; where that fails, warn and leave it as it is for good."""
        file = self._file
        if file is None:
            return
        try:
            work(file)
        # Whatever it is, training must not stop for its statistics, least of all on one rank alone.
        except Exception as error:
            self._file = None
            file.abandon()
            log.warning(
                "no more statistics on this rank, %s cannot be written: %s. Training goes on.", file.path, error
            )


def _number(loss: Any) -> float:
    """Return a loss as a number, NaN for none, one of several elements, or what is no number at all."""
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        return float("nan")

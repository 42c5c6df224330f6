"""Sums over calls that are alike, of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.stats import metrics
from hpctk.telemetry import schema

LABELS = tuple(column.name for column in schema.LABELS)
#: Sums that are kept of each kind of call; bus_bytes is computed here.
SUMS = (
    "calls", "uncounted_calls", "seconds", "dense_bytes", "dense_sent_bytes", "payload_bytes", "sent_bytes",
    "received_bytes", "messages", "waiting_s", "combining_s", "compressing_s", "decompressing_s", "staging_s",
)  # fmt: skip
#: Kinds of calls that are told apart. A file with more was not written by a training job.
MOST = 20_000
_OTHERS = tuple(b"" if name != "operation" else b"(others)" for name in LABELS)


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
        self._places: dict[tuple[bytes, ...], int] = {}
        self.sums = np.zeros((0, len(SUMS)))
        self.longest_s, self.bus_bytes = np.zeros(0), np.zeros(0)

    def add(self, summary: dict[str, Any], communicator: bytes, size: int) -> tuple[Any, int]:
        """Add one rank's summary; return it cleaned, rows by SUMS, and how many of its numbers made no sense."""
        columns, bad = [], 0
        for name in SUMS:
            values, senseless = metrics.clean(summary[name])
            columns.append(values)
            bad += senseless
        rows = np.stack(columns, axis=1)
        labels = list(zip(*(summary[name].tolist() for name in LABELS), strict=True))
        places = np.array([self._place(one) for one in labels], np.intp)
        self._grow()
        np.add.at(self.sums, places, rows)
        np.maximum.at(self.longest_s, places, metrics.clean(summary["longest_s"])[0])
        factors = [
            (metrics.bus_factor(one[0].decode(errors="replace"), size) or 0.0) * (one[3] == communicator)
            for one in labels
        ]
        np.add.at(self.bus_bytes, places, rows[:, SUMS.index("dense_bytes")] * np.array(factors))
        return rows, bad

    def column(self, name: str) -> Any:
        """Return the sums of one name, by kind."""
        return self.sums[:, SUMS.index(name)]

    def _place(self, labels: tuple[bytes, ...]) -> int:
        if labels not in self._places and len(self.labels) >= MOST:
            labels = _OTHERS
        if labels not in self._places:
            self._places[labels] = len(self.labels)
            self.labels.append(labels)
        return self._places[labels]

    def _grow(self) -> None:
        more = len(self.labels) - len(self.sums)
        if more > 0:
            self.sums = np.concatenate([self.sums, np.zeros((more, len(SUMS)))])
            self.longest_s = np.concatenate([self.longest_s, np.zeros(more)])
            self.bus_bytes = np.concatenate([self.bus_bytes, np.zeros(more)])

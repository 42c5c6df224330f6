"""Sums over calls that are alike, in constant memory: the tables `summary` and the calls of `sizes`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.telemetry.schema import AMOUNTS, LABELS, SIZE_BINS, SUMMARY

#: Kinds of calls that are distinguished; the rest are summed up together.
KINDS = 256
REST = b"(other)"
#: Operation, schedule, compressor, tensor.
Key = tuple[str, str, str, str]

_WIDTHS = [int(column.kind[1:]) for column in LABELS]


class Summary:
    """Sums by kind of call, in `table`; `sizes` are calls by the logarithm of their payload.

    `kinds` are those that are distinguished: their number, and their labels as they stand in a row.
    """

    def __init__(self, communicator: str) -> None:
        self._communicator = communicator
        self.kinds: dict[Key, tuple[int, bytes]] = {}
        self.table = np.zeros(KINDS, SUMMARY.dtype)
        self.table["entry"] = np.arange(KINDS)
        self.table["operation"][-1] = self.table["tensor"][-1] = REST
        self.table["communicator"][-1] = cut(communicator, _WIDTHS[3])
        self.sizes = np.zeros(SIZE_BINS, np.int64)

    @property
    def rows(self) -> int:
        """How many rows of the table are in use."""
        return int(np.flatnonzero(self.table["calls"]).max(initial=-1)) + 1

    def new_kind(self, key: Key) -> tuple[int, bytes]:
        """Return the number of a kind that is not among `kinds`, and its labels as they stand in a row."""
        texts = *key[:3], self._communicator, key[3]
        cells = [cut(text, width) for text, width in zip(texts, _WIDTHS, strict=True)]
        labels = b"".join(cell.ljust(width, b"\0") for cell, width in zip(cells, _WIDTHS, strict=True))
        number = len(self.kinds)
        if number >= KINDS - 1:
            # Not remembered: names that never come twice must not fill the memory.
            return KINDS - 1, labels
        self.kinds[key] = number, labels
        for column, cell in zip(LABELS, cells, strict=True):
            self.table[column.name][number] = cell
        return number, labels

    def add(self, calls: Any, kinds: Any) -> None:
        """Add rows of calls, with the kind of each."""
        table, seconds = self.table, calls["end_s"] - calls["start_s"]
        unknown = (calls["sent_bytes"] < 0) | (calls["received_bytes"] < 0)
        table["calls"] += np.bincount(kinds, minlength=KINDS)
        table["uncounted_calls"] += np.bincount(kinds[unknown], minlength=KINDS)
        table["seconds"] += np.bincount(kinds, seconds, KINDS)
        np.maximum.at(table["longest_s"], kinds, seconds)
        for name in (column.name for column in AMOUNTS):
            values = calls[name]
            if name in ("sent_bytes", "received_bytes"):
                values = np.where(unknown, 0, values)
            table[name] += np.bincount(kinds, values, KINDS).astype(table[name].dtype)
        lengths = np.frexp(np.maximum(calls["payload_bytes"], 1).astype(np.float64))[1] - 1
        self.sizes += np.bincount(lengths, minlength=SIZE_BINS)[:SIZE_BINS]


def cut(text: str, width: int) -> bytes:
    """Return a text as UTF-8 of at most `width` bytes; a long one without its middle."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= width:
        return data
    half = (width - 2) // 2
    # A letter that was cut in two is left out.
    return (data[:half] + b".." + data[len(data) - (width - 2 - half) :]).decode(errors="ignore").encode()

"""The course of a run, step by step: the mean of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctk.stats import metrics

#: Points of a course.
POINTS = 300
#: Rows of steps that are read in all; where there are more, not every rank's are.
ROWS = 4_000_000
#: What steps count.
COUNTS = ("rounds", "uploads", "skips", "clipped", "skipped", "fallbacks")
_MEANS = ("seconds", "sent_bytes", "dense_bytes", "exposed_s")


def chosen(ranks: list[int], rows: int) -> list[int]:
    """Return the ranks whose steps are read, when all together have so many rows: evenly spread, at least 4."""
    if rows <= ROWS:
        return ranks
    count = max(4, len(ranks) * ROWS // rows)
    return ranks if count >= len(ranks) else [ranks[i * len(ranks) // count] for i in range(count)]


class Course:
    """One recording's steps, added up row by row over ranks. Steps without a row are not there."""

    def __init__(self) -> None:
        self.step = np.zeros(0, np.int64)
        self._sums = {name: np.zeros(0) for name in (*_MEANS, "loss", "ranks", "told")}

    def add(self, steps: dict[str, Any]) -> tuple[dict[str, float], int]:
        """Add one rank's steps; return what they count, and how many numbers made no sense."""
        rows, bad = len(steps["step"]), 0
        if rows > len(self.step):
            self.step = np.array(steps["step"])
            for name, old in self._sums.items():
                self._sums[name] = np.concatenate([old, np.zeros(rows - len(old))])
        for name in _MEANS:
            values, senseless = metrics.clean(steps[name])
            self._sums[name][:rows] += values
            bad += senseless
        loss = np.asarray(steps["loss"], np.float64)
        told = np.abs(loss) <= metrics.LARGEST
        self._sums["loss"][:rows] += np.where(told, loss, 0.0)
        self._sums["told"][:rows] += told
        self._sums["ranks"][:rows] += 1
        counts = {}
        for name in COUNTS:
            values, senseless = metrics.clean(steps[name])
            counts[name] = float(values.sum())
            bad += senseless
        return counts, bad

    def mean(self, name: str) -> Any:
        """Return a column, the mean of its ranks, row by row."""
        return self._sums[name] / np.maximum(self._sums["ranks"], 1)

    @property
    def loss(self) -> Any:
        """The mean loss of the ranks that told one, NaN where none did."""
        told = self._sums["told"]
        return np.where(told > 0, self._sums["loss"] / np.maximum(told, 1), np.nan)

    def sums(self) -> dict[str, float]:
        """Return the sums over all rows of all ranks, and their number as `rows`."""
        return {name: float(self._sums[name].sum()) for name in _MEANS} | {
            "rows": float(self._sums["ranks"].sum())
        }


@dataclass
class Curve:
    """A run's course in at most about POINTS points: bytes and seconds have been added up since its first step."""

    step: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    dense_bytes: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_sent_bytes: list[float] = field(default_factory=list)
    step_dense_bytes: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)


def curve(courses: list[Course], points: int = POINTS) -> Curve:
    """Return the course of a run from those of its recordings, one after the other."""
    found = Curve()
    total = sum(len(one.step) for one in courses)
    if total == 0:
        return found
    step = np.concatenate([one.step for one in courses])
    loss = np.concatenate([one.loss for one in courses])
    each = {name: np.concatenate([one.mean(name) for one in courses]) for name in _MEANS}
    places = metrics.bins(total, points)
    # Where a point's last step is: what had been sent, and how long it had taken, by then.
    last = np.flatnonzero(np.diff(places, append=places[-1] + 1))
    found.step = [int(one) for one in step[last]]
    found.seconds = np.cumsum(each["seconds"])[last].tolist()
    found.sent_bytes = np.cumsum(each["sent_bytes"])[last].tolist()
    found.dense_bytes = np.cumsum(each["dense_bytes"])[last].tolist()
    found.step_s = metrics.bin_means(each["seconds"], places).tolist()
    found.step_sent_bytes = metrics.bin_means(each["sent_bytes"], places).tolist()
    found.step_dense_bytes = metrics.bin_means(each["dense_bytes"], places).tolist()
    found.loss = metrics.bin_means(loss, places).tolist()
    return found

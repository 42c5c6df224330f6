"""The course of a run, step by step: the mean of its ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.stats import metrics

#: Points of a course.
POINTS = 300
#: Rows of steps that are read in all; where there are more, not every rank's are.
ROWS = 4_000_000
#: What steps count.
COUNTS = ("rounds", "uploads", "skips", "clipped", "skipped", "fallbacks")
#: Columns of which the mean is shown.
MEANS = ("seconds", "sent_bytes", "dense_bytes", "exposed_s")


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
        for name in COUNTS:
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


def curve(courses: list[Course], points: int = POINTS) -> dict[str, list[Any]]:
    """Return a run's course, from those of its recordings one after the other, in at most `points` points.

    `seconds`, `sent_bytes` and `dense_bytes` are sums since its first step, `step_...` means over a point's steps.
    """
    keys = ("seconds", "sent_bytes", "dense_bytes")
    total = sum(len(course.step) for course in courses)
    bins = metrics.bins(total, points)
    # The last step of every point.
    last = np.flatnonzero(np.diff(bins, append=points))
    columns = {key: np.concatenate([np.zeros(0), *(course.mean(key) for course in courses)]) for key in keys}
    columns["loss"] = np.concatenate([np.zeros(0), *(course.loss for course in courses)])
    means = {key: metrics.bin_means(values, bins).tolist() for key, values in columns.items()}
    steps = np.concatenate([np.zeros(0, np.int64), *(course.step for course in courses)])
    return {
        "step": steps[last].tolist(),
        **{key: np.cumsum(columns[key])[last].tolist() for key in keys},
        "step_s": means["seconds"],
        "step_sent_bytes": means["sent_bytes"],
        "step_dense_bytes": means["dense_bytes"],
        "loss": means["loss"],
    }

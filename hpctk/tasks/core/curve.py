"""The course of a training job: mean losses with the seconds and bytes that they took, as many as a picture shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: How many points a curve has, about.
POINTS = 150


@dataclass
class Curve:
    """Points of one rank. Each loss is the mean of the `every` steps that end at `steps`.

    Attributes
    ----------
    every : int
        Steps between points.
    steps, seconds, sent_bytes, losses : list
        One entry for each point; seconds and bytes since the start of the job.
    pending : list of float
        Losses since the last point.
    """

    every: int
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)

    def add(self, step: int, seconds: float, sent_bytes: int, loss: float) -> None:
        """Take in the loss of one step, 1 being the first."""
        self.pending.append(loss)
        if step % self.every == 0:
            self.steps.append(step)
            self.seconds.append(seconds)
            self.sent_bytes.append(sent_bytes)
            self.losses.append(sum(self.pending) / len(self.pending))
            self.pending.clear()

    @property
    def last_loss(self) -> float | None:
        """The mean loss of the newest point, or of the steps so far where there is none."""
        if self.losses:
            return self.losses[-1]
        return sum(self.pending) / len(self.pending) if self.pending else None


def mean_curve(curves: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the course of the whole job from all ranks' curves.

    Losses are means over the ranks, seconds and bytes are those of the rank that had most. Where ranks did
    different numbers of steps, the points are those that all have; where they share none, rank 0's.
    """
    columns = ("steps", "seconds", "sent_bytes", "losses")
    rows = [
        dict(zip(one["steps"], zip(*(one[c] for c in columns), strict=True), strict=True)) for one in curves
    ]
    shared = [step for step in rows[0] if all(step in row for row in rows)]
    if not shared:
        return {name: list(curves[0][name]) for name in columns}
    points = [[row[step] for row in rows] for step in shared]
    return {
        "steps": shared,
        "seconds": [max(rank[1] for rank in point) for point in points],
        "sent_bytes": [max(rank[2] for rank in point) for point in points],
        "losses": [sum(rank[3] for rank in point) / len(point) for point in points],
    }

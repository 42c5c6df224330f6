"""How a job went, as result.json holds it: the curve of each rank, and all ranks put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: How many points a curve has, about.
POINTS = 150
_COLUMNS = ("steps", "seconds", "sent_bytes", "losses")
#: What each rank has of its own.
_OWN = ("steps", "rounds", "sent_bytes", "seconds", "counts")


@dataclass
class Curve:
    """Points of one rank, `every` steps apart; seconds and bytes since the start of the job.

    Each loss is the mean of the `every` steps that end at `steps`; `pending` are the losses since the last point.
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
    rows = [{point[0]: point for point in zip(*(curve[name] for name in _COLUMNS), strict=True)} for curve in curves]
    shared = [step for step in rows[0] if all(step in row for row in rows)]
    if not shared:
        return {name: list(curves[0][name]) for name in _COLUMNS}
    points = [[row[step] for row in rows] for step in shared]
    return {
        "steps": shared,
        "seconds": [max(rank[1] for rank in point) for point in points],
        "sent_bytes": [max(rank[2] for rank in point) for point in points],
        "losses": [sum(rank[3] for rank in point) / len(point) for point in points],
    }


def entry(method_settings: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how one method did from the results of all ranks, in rank order."""
    first = ranks[0]
    losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
    return {
        "settings": dict(method_settings),
        "metrics": first["metrics"],
        "loss": sum(losses) / len(losses) if losses else None,
        "complete": first["complete"],
        "params": first.get("params"),
        "parameters_sha256": first["parameters_sha256"],
        "curve": mean_curve([rank["curve"] for rank in ranks]),
        "ranks": [{name: rank[name] for name in _OWN} for rank in ranks],
    }


def document(
    task: str, size: int, settings: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the whole of result.json."""
    return {"task": task, "ranks": size, "settings": dict(settings), "methods": dict(entries)}

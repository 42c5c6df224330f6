"""How a job went on all ranks, as result.json holds it: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctk.tasks.core.curve import mean_curve

#: What each rank has of its own.
_OWN = ("steps", "rounds", "sent_bytes", "seconds", "counts")


def entry(method_settings: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how one method did from the results of all ranks, in rank order."""
    first = ranks[0]
    losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
    return {
        "settings": dict(method_settings),
        "metrics": first["metrics"],
        "loss": sum(losses) / len(losses) if losses else None,
        "complete": first["complete"],
        "parameters_sha256": first["parameters_sha256"],
        "curve": mean_curve([rank["curve"] for rank in ranks]),
        "ranks": [{name: rank[name] for name in _OWN} for rank in ranks],
    }


def document(
    task: str, size: int, settings: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the whole of result.json."""
    return {"task": task, "ranks": size, "settings": dict(settings), "methods": dict(entries)}

"""What a step of a job that ran on this machine would take on a network: the `predicted` column of `hpctk train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctk.advise.local_work import ORDINARY
from hpctk.advise.predict import fastest, predict
from hpctk.advise.question import Question, at_rate
from hpctk.collectives.tuning.calibration import Calibration
from hpctk.schedules.cost.machine import Machine

#: The network that is asked about: so many ranks, one on a node, and the bits per second of their links.
RANKS, RATE = 16, 1e9
WHERE = f"{RATE / 1e9:g} Gbit/s on {RANKS} ranks, one to a node"


def predicted(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the seconds of a step of each method of a result.json on that network; None where nothing is known."""
    alone = step_alone(entries)
    return {name: _step(entry, alone) for name, entry in entries.items()}


def step_alone(entries: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return what a step takes without communication: the shortest there was, by any method, between two points."""
    found = []
    for entry in entries.values():
        steps, seconds = entry["curve"]["steps"], entry["curve"]["seconds"]
        # The first point has the work that is done once.
        found += [(seconds[i + 1] - seconds[i]) / (steps[i + 1] - steps[i]) for i in range(1, len(steps) - 1)]
    return min((one for one in found if one > 0), default=None)


def _step(entry: Mapping[str, Any], alone: float | None) -> float | None:
    settings = entry["settings"]
    way, params = _way(settings), entry.get("params")
    if way is None or params is None or alone is None:
        return None
    compressor = settings.get("compressor") or {}
    question = Question(
        params, alone, RANKS, periods=(settings.get("period", 1),),
        densities=(settings.get("density", compressor.get("density", 1.0)),),
    )  # fmt: skip
    network = Calibration(machine=at_rate(Machine(), RATE, per_node=1))
    found = {one.name: one.seconds for one in fastest(predict(question, network, ORDINARY))}
    return found.get(way)


def _way(settings: Mapping[str, Any]) -> str | None:
    """Return the name that the advice has for a method with these settings, None where it prices none such."""
    method, compressor = settings.get("method"), settings.get("compressor")
    period = settings.get("period")
    if compressor is not None:
        if "density" not in compressor or settings.get("server") is not None or period not in (None, 1):
            return None
        return f"{method}({compressor['compressor']}({compressor['density']:g}))"
    if method == "SASG":
        return f"SASG(density={settings['density']:g})"
    if method in ("CELGC", "EPISODE"):
        return f"{method}(clip=1.0, period={period})"
    return f"{method}()" if period is None else f"{method}(period={period})"

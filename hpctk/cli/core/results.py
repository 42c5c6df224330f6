"""The table at the end of `hpctk train`: what each method reached, and what it cost.

What it reached is the verdict on held-out data, of the model that the method wants evaluated. The loss of the last
training steps is in result.json: of the models that the ranks had then, each on its own few samples, so that it says
little about the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctk.cli.core.table import bytes_text, table


def results_table(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each method; bytes and seconds are those of the rank that had most, rounds a mean."""
    metrics = list(next(iter(entries.values()))["metrics"])
    head = ["method", *metrics, "steps", "rounds", "sent per rank", "seconds"]
    rows = [_row(name, entry, metrics) for name, entry in entries.items()]
    lines = [table(head, rows)]
    early = [name for name, entry in entries.items() if not entry["complete"]]
    if early:
        lines.append(f"\nended by the time budget: {', '.join(early)}")
    return "\n".join(lines)


def _row(name: str, entry: Mapping[str, Any], metrics: list[str]) -> list[str]:
    ranks = entry["ranks"]
    sent = [rank["sent_bytes"] for rank in ranks]
    return [
        name,
        *(_verdict(metric, entry["metrics"].get(metric)) for metric in metrics),
        str(max(rank["steps"] for rank in ranks)),
        f"{sum(rank['rounds'] for rank in ranks) / len(ranks):.0f}",
        "MPI does not tell" if None in sent else bytes_text(max(sent)),
        f"{max(rank['seconds'] for rank in ranks):.1f}",
    ]


def _verdict(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.4g}"

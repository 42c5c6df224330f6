"""The table at the end of `hpctk train`: what each method reached, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctk.cli.core.table import bytes_text, table


def results_table(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each method; bytes and seconds are those of the rank that had most, rounds a mean."""
    metric = next(iter(next(iter(entries.values()))["metrics"]))
    head = ["method", metric, "loss", "steps", "rounds", "sent per rank", "seconds"]
    rows = [_row(name, entry, metric) for name, entry in entries.items()]
    lines = [table(head, rows)]
    early = [name for name, entry in entries.items() if not entry["complete"]]
    if early:
        lines.append(f"\nended by the time budget: {', '.join(early)}")
    return "\n".join(lines)


def _row(name: str, entry: Mapping[str, Any], metric: str) -> list[str]:
    ranks, value = entry["ranks"], entry["metrics"][metric]
    sent = [rank["sent_bytes"] for rank in ranks]
    return [
        name,
        "-" if value is None else f"{value:.1%}" if metric == "accuracy" else f"{value:.4g}",
        "-" if entry["loss"] is None else f"{entry['loss']:.3g}",
        str(max(rank["steps"] for rank in ranks)),
        f"{sum(rank['rounds'] for rank in ranks) / len(ranks):.0f}",
        "MPI does not tell" if None in sent else bytes_text(max(sent)),
        f"{max(rank['seconds'] for rank in ranks):.1f}",
    ]

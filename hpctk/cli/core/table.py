"""Tables for a terminal, and the numbers in them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hpctk.stats.report.numbers import bytes_text as bytes_text
from hpctk.stats.report.numbers import seconds_text as seconds_text

#: As wide as a terminal is at least.
WIDTH = 80


def wrapped(text: str, indent: str = "") -> str:
    """Return a text of one line in lines of at most 80 columns; `indent` before all but the first."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a head, the first column to the left and the others to the right."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells = [head, ["-" * width for width in widths], *rows]
    lines = []
    for first, *others in cells:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines)


def results_table(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table at the end of `hpctk train`: a line for each method, with what it reached and what it cost.

    What it reached is the verdict on held-out data, of the model that the method wants evaluated. The loss of the last
    training steps is in result.json: of the models that the ranks had then, each on its own few samples, so that it
    says little about the method. Bytes and seconds are those of the rank that had most, rounds a mean; `predicted` is a
    step on a network, which the seconds of one machine say nothing of.
    """
    # Not above: other tables need no prices.
    from hpctk.advise.elsewhere import WHERE, predicted

    metrics = list(next(iter(entries.values()))["metrics"])
    elsewhere, rows = predicted(entries), []
    for name, entry in entries.items():
        ranks = entry["ranks"]
        sent = [rank["sent_bytes"] for rank in ranks]
        rows.append(
            [
                name,
                *(_verdict(metric, entry["metrics"].get(metric)) for metric in metrics),
                str(max(rank["steps"] for rank in ranks)),
                f"{sum(rank['rounds'] for rank in ranks) / len(ranks):.0f}",
                "MPI does not tell" if None in sent else bytes_text(max(sent)),
                f"{max(rank['seconds'] for rank in ranks):.1f}",
                "-" if elsewhere[name] is None else seconds_text(elsewhere[name]),
            ]
        )
    text = table(["method", *metrics, "steps", "rounds", "sent per rank", "seconds", "predicted"], rows)
    if any(seconds is not None for seconds in elsewhere.values()):
        text += f"\npredicted: a step at {WHERE}"
    early = [name for name, entry in entries.items() if not entry["complete"]]
    return text + (f"\n\nended by the time budget: {', '.join(early)}" if early else "")


def _verdict(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.4g}"

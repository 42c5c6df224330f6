"""Tables for a terminal, and the numbers in them."""

from __future__ import annotations

from collections.abc import Sequence

from hpctk.stats.report.numbers import bytes_text as bytes_text
from hpctk.stats.report.numbers import seconds_text as seconds_text


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

"""Text in 80 columns: tables, bars, sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hpctk.stats.report.numbers import shortened

WIDTH = 80
#: A column is not made narrower than this.
NARROWEST = 4


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, shrink: Sequence[int] = ()
) -> str:
    """Return rows under a head, at most WIDTH wide.

    Parameters
    ----------
    head, rows
        Cells.
    left : int
        So many columns are flush left, the others flush right.
    shrink : sequence of int
        The columns whose texts are shortened where all is too wide, the first one first.
    """
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    excess = sum(widths) + gap * (len(widths) - 1) - WIDTH
    for column in shrink:
        taken = max(0, min(excess, widths[column] - NARROWEST))
        widths[column] -= taken
        excess -= taken
    lines = []
    for row in cells:
        fitted = [shortened(text, width) for text, width in zip(row, widths, strict=True)]
        lines.append(
            (" " * gap).join(
                text.ljust(width) if i < left else text.rjust(width)
                for i, (text, width) in enumerate(zip(fitted, widths, strict=True))
            )
        )
    lines.insert(1, (" " * gap).join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def sentences(texts: Sequence[str], mark: str = "") -> str:
    """Return sentences, each on lines of its own, wrapped; `mark` before each."""
    return "\n".join(
        textwrap.fill(
            text, WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False
        )
        for text in texts
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return names and values, one below the other; long values are wrapped under themselves."""
    width = max(len(name) for name, _ in pairs) + 2
    return "\n".join(
        textwrap.fill(
            value,
            WIDTH,
            initial_indent=name.ljust(width),
            subsequent_indent=" " * width,
            break_on_hyphens=False,
        )
        for name, value in pairs
        if value
    )


def bar(share: float, width: int) -> str:
    """Return a bar of at most `width` characters; what is not nothing has at least one."""
    length = round(max(0.0, min(1.0, share)) * width)
    return "#" * max(length, 1 if share > 0 else 0)

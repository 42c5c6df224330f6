"""Figure: one number of several runs, as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpctk.stats.report.numbers import shortened
from hpctk.stats.report.svg import LETTER, Svg

_WIDTH, _LEFT, _PITCH = 440.0, 130.0, 30.0
#: Runs that have colours of their own; those after them share these.
COLOURS = 8


def run_bars(runs: Sequence[dict[str, Any]], key: str, show: Callable[[float | None], str]) -> str:
    """Return a bar for each run, "" where none has a number above 0."""
    most = max((one[key] or 0.0 for one in runs), default=0.0)
    if most <= 0:
        return ""
    svg = Svg(_WIDTH, _PITCH * len(runs) + 8, f"{key} of every run")
    for i, one in enumerate(runs):
        y, length = 4 + _PITCH * i, (one[key] or 0.0) / most * (_WIDTH - _LEFT - 80)
        svg.text(_LEFT - 8, y + _PITCH / 2 + 4, shortened(one["name"], int((_LEFT - 12) / LETTER)), "end")
        svg.rect(_LEFT, y + 4, length, _PITCH - 8, f"run{i % COLOURS}", one["name"])
        svg.text(_LEFT + length + 6, y + _PITCH / 2 + 4, show(one[key]), kind="t name")
    return svg.drawn()

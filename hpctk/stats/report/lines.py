"""A chart of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctk.stats.report.numbers import digits
from hpctk.stats.report.svg import Axis, Svg, frame

WIDTH, HEIGHT = 440.0, 240.0
#: A range wider than this is shown by logarithms.
WIDE = 20.0
#: Points over which a noisy line is smoothed.
SMOOTH = 11


@dataclass(frozen=True)
class Line:
    """Points with a name; `kind` is a class of the page's style."""

    name: str
    kind: str
    x: Sequence[float | None]
    y: Sequence[float | None]

    def points(self) -> list[tuple[float, float]]:
        """Return the points that can be shown."""
        return [
            (a, b)
            for a, b in zip(self.x, self.y, strict=True)
            if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
        ]


def smoothed(values: Sequence[float | None], width: int = SMOOTH) -> list[float | None]:
    """Return running means, of fewer values at both ends; of logarithms where all are above 0. Not in place."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    log = bool(known) and min(known) > 0
    found: list[float | None] = []
    for i in range(len(values)):
        part = [
            v
            for v in values[max(0, i - width // 2) : i + width // 2 + 1]
            if v is not None and math.isfinite(v)
        ]
        if not part:
            found.append(None)
        elif log:
            found.append(math.exp(sum(math.log(v) for v in part) / len(part)))
        else:
            found.append(sum(part) / len(part))
    return found


def chart(
    lines: Sequence[Line], label: str, x_name: str, x_text: Callable[[float], str],
    y_text: Callable[[float], str] = digits, *, from_zero: bool = False, log_x: bool = False,
) -> str:  # fmt: skip
    """Return a drawing, "" where no line has a point."""
    found = [(line, line.points()) for line in lines]
    every = [point for _, points in found for point in points]
    if not every:
        return ""
    xs, ys = [x for x, _ in every], [y for _, y in every]
    log_x = log_x and min(xs) > 0 and max(xs) > WIDE * min(xs)
    log_y = min(ys) > 0 and max(ys) > WIDE * min(ys)
    low, high = _range(ys, log=log_y, from_zero=from_zero)
    svg = Svg(WIDTH, HEIGHT, label)
    across = Axis(*_span(xs), 62, WIDTH - 16, log=log_x)
    up = Axis(low, high, HEIGHT - 46, 14, log=log_y)
    frame(svg, across, up, x_text, y_text)
    svg.text((across.start + across.end) / 2, HEIGHT - 8, x_name, "middle", "t name")
    for line, points in found:
        places = [(across.at(x), up.at(y)) for x, y in points]
        if len(places) > 1:
            svg.path(places, f"line {line.kind}")
        if places:
            svg.dot(*places[-1], f"dot {line.kind}", f"{line.name}: {y_text(points[-1][1])}")
    return svg.drawn()


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - abs(low) / 2 - 0.5, high + abs(high) / 2 + 0.5)


def _range(values: Sequence[float], *, log: bool, from_zero: bool) -> tuple[float, float]:
    """Return what the upward axis covers."""
    low, high = min(values), max(values)
    if log:
        return low / 1.2, high * 1.2
    if from_zero and low >= 0:
        return 0.0, high * 1.08 or 1.0
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin

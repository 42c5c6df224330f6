"""Drawing in SVG, inline in a page: everything that is written is escaped, colours are the page's."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpctk.stats.report.numbers import digits

#: The width of a letter at the size that drawings have, in the widest font that a browser may take.
LETTER = 7.6
#: The size of a chart.
WIDTH, HEIGHT = 440.0, 240.0
#: A range wider than this is shown by logarithms.
WIDE = 20.0
#: Points over which a noisy line is smoothed.
SMOOTH = 11


def escaped(text: object) -> str:
    """Return a text that is only text in HTML, in attributes too."""
    return html.escape(str(text), quote=True)


def _n(value: float) -> str:
    """Return a coordinate, short."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class Svg:
    """A drawing; `label` says what it shows to those who cannot see it.

    `kind` is always a class of the page's style, `tip` a text that shows where the pointer rests.
    """

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, tip: str = "", opacity: float = 1.0
    ) -> None:
        """Draw a rectangle."""
        faint = "" if opacity >= 1 else f' fill-opacity="{opacity:.2f}"'
        size = f'width="{_n(width)}" height="{_n(height)}"'
        start = f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" {size}{faint}'
        self.parts.append(f"{start}><title>{escaped(tip)}</title></rect>" if tip else f"{start}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a line."""
        self.parts.append(f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "t", turn: bool = False) -> None:
        """Write; `turn` writes upwards."""
        turned = f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turn else ""
        start = f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{turned}>'
        self.parts.append(f"{start}{escaped(text)}</text>")

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        coordinates = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{coordinates}"/>')

    def dot(self, x: float, y: float, kind: str, tip: str) -> None:
        """Draw a dot."""
        start = f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="3">'
        self.parts.append(f"{start}<title>{escaped(tip)}</title></circle>")

    def drawn(self) -> str:
        """Return the drawing."""
        size = f"{_n(self.width)} {_n(self.height)}"
        inside = "".join(self.parts)
        return f'<svg viewBox="0 0 {size}" role="img" aria-label="{escaped(self.label)}">{inside}</svg>'


@dataclass(frozen=True)
class Axis:
    """From the values `low` to `high` to the coordinates `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high, x = (math.log10(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((x - low) / (high - low) if high > low else 0.5)

    def ticks(self, most: int) -> list[float]:
        """Return round values to write at the axis, at most about so many."""
        return log_ticks(self.low, self.high, most) if self.log else ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten within a range."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, first + most + 2) if i * step <= high * (1 + 1e-9)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten within a range, with 2 and 5 between them where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)

    def inside(*factors: int) -> list[float]:
        values = [f * 10.0**p for p in powers for f in factors]
        return [x for x in values if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]

    if len(inside(1, 2, 5)) <= most:
        return inside(1, 2, 5)
    tens = inside(1)
    return tens[:: max(1, -(-len(tens) // most))]


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
    known = [value if value is not None and math.isfinite(value) else None for value in values]
    log = all(value is None or value > 0 for value in known)
    means: list[float | None] = []
    for i in range(len(known)):
        part = [v for v in known[max(0, i - width // 2) : i + width // 2 + 1] if v is not None]
        if not part:
            means.append(None)
        elif log:
            means.append(math.exp(sum(math.log(v) for v in part) / len(part)))
        else:
            means.append(sum(part) / len(part))
    return means


def chart(
    lines: Sequence[Line], label: str, x_name: str, x_text: Callable[[float], str],
    y_text: Callable[[float], str] = digits, *, from_zero: bool = False, log_x: bool = False,
) -> str:  # fmt: skip
    """Return a chart of lines, "" where no line has a point."""
    drawable = [(line, line.points()) for line in lines]
    xs = [x for _, points in drawable for x, _ in points]
    ys = [y for _, points in drawable for _, y in points]
    if not xs:
        return ""
    log_x = log_x and min(xs) > 0 and max(xs) > WIDE * min(xs)
    log_y = min(ys) > 0 and max(ys) > WIDE * min(ys)
    left, right = min(xs), max(xs)
    if right <= left:
        left, right = left - abs(left) / 2 - 0.5, right + abs(right) / 2 + 0.5
    svg = Svg(WIDTH, HEIGHT, label)
    x_axis = Axis(left, right, 62, WIDTH - 16, log=log_x)
    y_axis = Axis(*_y_range(min(ys), max(ys), log=log_y, from_zero=from_zero), HEIGHT - 46, 14, log=log_y)
    _frame(svg, x_axis, y_axis, x_text, y_text)
    svg.text((x_axis.start + x_axis.end) / 2, HEIGHT - 8, x_name, "middle", "t name")
    for line, points in drawable:
        coordinates = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
        if len(points) > 1:
            svg.path(coordinates, f"line {line.kind}")
        if points:
            svg.dot(*coordinates[-1], f"dot {line.kind}", f"{line.name}: {y_text(points[-1][1])}")
    return svg.drawn()


def _y_range(low: float, high: float, *, log: bool, from_zero: bool) -> tuple[float, float]:
    if log:
        return low / 1.2, high * 1.2
    if from_zero and low >= 0:
        return 0.0, high * 1.08 or 1.0
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _frame(svg: Svg, x: Axis, y: Axis, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> None:
    """Draw a grid with numbers along the left and the lower side."""
    for value in y.ticks(8 if y.log else 5):
        svg.line(x.start, y.at(value), x.end, y.at(value), "grid")
        svg.text(x.start - 6, y.at(value) + 4, y_text(value), "end")
    drawn_to = -math.inf
    for value in x.ticks(5):
        label, at = x_text(value), x.at(value)
        reach = LETTER / 2 * len(label)
        # A number that would touch the one before is left out.
        if at - reach > drawn_to:
            svg.line(at, y.start, at, y.start + 4, "axis")
            # Nor may the last one leave the drawing.
            svg.text(min(at, svg.width - reach), y.start + 17, label, "middle")
            drawn_to = at + reach
    svg.line(x.start, y.start, x.end, y.start, "axis")

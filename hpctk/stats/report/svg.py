"""Drawing in SVG, inline in a page: everything that is written is escaped, colours are the page's."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: The width of a letter at the size that drawings have, in the widest font that a browser may take.
LETTER = 7.6


def escaped(text: object) -> str:
    """Return a text that is only text in HTML, in attributes too."""
    return html.escape(str(text), quote=True)


def _n(value: float) -> str:
    """Return a coordinate, short."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class Svg:
    """A drawing.

    Attributes
    ----------
    width, height : float
    label : str
        What it shows, for those who cannot see it.
    """

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, tip: str = "", opacity: float = 1.0
    ) -> None:
        """Draw a rectangle; `kind` is a class of the page's style, `tip` shows where the pointer rests."""
        faint = "" if opacity >= 1 else f' fill-opacity="{opacity:.2f}"'
        start = (
            f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"{faint}'
        )
        self.parts.append(f"{start}><title>{escaped(tip)}</title></rect>" if tip else f"{start}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a line."""
        self.parts.append(f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>')

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", kind: str = "t", turn: bool = False
    ) -> None:
        """Write; `turn` writes upwards."""
        turned = f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turn else ""
        self.parts.append(
            f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{turned}>{escaped(text)}</text>'
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        if points:
            self.parts.append(
                f'<polyline class="{kind}" points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}"/>'
            )

    def dot(self, x: float, y: float, kind: str, tip: str = "") -> None:
        """Draw a dot."""
        self.parts.append(
            f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="3"><title>{escaped(tip)}</title></circle>'
        )

    def drawn(self) -> str:
        """Return the drawing."""
        size = f"{_n(self.width)} {_n(self.height)}"
        inside = "".join(self.parts)
        return f'<svg viewBox="0 0 {size}" role="img" aria-label="{escaped(self.label)}">{inside}</svg>'


@dataclass(frozen=True)
class Axis:
    """From values to places on a line; logarithmic where told."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return where a value is."""
        low, high, here = (self._of(x) for x in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((here - low) / (high - low) if high > low else 0.5)

    def ticks(self, most: int) -> list[float]:
        """Return round values to write at the axis, at most about so many."""
        return log_ticks(self.low, self.high, most) if self.log else ticks(self.low, self.high, most)

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


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
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1,)):
        found = [f * 10.0**p for p in range(first, last + 1) for f in factors]
        inside = [x for x in found if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]
        if len(inside) <= most or factors == (1,):
            every = -(-len(inside) // most) if inside else 1
            return inside[::every]
    raise AssertionError("unreachable")


def frame(svg: Svg, x: Axis, y: Axis, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> None:
    """Draw a grid with numbers along the left and the lower side."""
    for value in y.ticks(8 if y.log else 5):
        svg.line(x.start, y.at(value), x.end, y.at(value), "grid")
        svg.text(x.start - 6, y.at(value) + 4, y_text(value), "end")
    drawn = -math.inf
    for value in x.ticks(5):
        label, place = x_text(value), x.at(value)
        reach = LETTER / 2 * len(label)
        # A number that would touch the one before is left out.
        if place - reach > drawn:
            svg.line(place, y.start, place, y.start + 4, "axis")
            # Nor may the last one leave the drawing.
            svg.text(min(place, svg.width - reach), y.start + 17, label, "middle")
            drawn = place + reach
    svg.line(x.start, y.start, x.end, y.start, "axis")

"""Figure: how long messages are."""

from __future__ import annotations

from typing import Any

from hpctk.stats.report.numbers import bytes_text, count, digits
from hpctk.stats.report.svg import Axis, Svg

_WIDTH, _HEIGHT = 440.0, 240.0


def sizes(document: dict[str, Any]) -> str:
    """Return the drawing, "" where no message was counted."""
    bins = document["message_sizes"]
    used = [i for i, one in enumerate(bins) if one["messages"] > 0]
    if not used:
        return ""
    # A few empty places at both sides: one bar alone says little.
    first, last = max(0, used[0] - 2), min(len(bins) - 1, used[-1] + 2)
    svg = Svg(_WIDTH, _HEIGHT, "messages sent by their length")
    up = Axis(0.0, max(one["messages"] for one in bins) * 1.05, _HEIGHT - 46, 14)
    left, right = 62.0, _WIDTH - 16
    pitch = (right - left) / (last - first + 1)
    for value in up.ticks(5):
        svg.line(left, up.at(value), right, up.at(value), "grid")
        svg.text(left - 6, up.at(value) + 4, _short(value), "end")
    every = -(-(last - first + 1) // 6)
    for i in range(first, last + 1):
        one, x = bins[i], left + pitch * (i - first)
        if one["messages"] > 0:
            tip = (
                f"{bytes_text(2**i if i else 0)} to {bytes_text(2 ** (i + 1))}: {count(one['messages'])} messages, "
                f"{bytes_text(one['sent_bytes'])}"
            )
            svg.rect(
                x + 1, up.at(one["messages"]), pitch - 2, up.start - up.at(one["messages"]), "part0", tip
            )
        if (i - first) % every == 0:
            svg.line(x, up.start, x, up.start + 4, "axis")
            svg.text(x, up.start + 17, bytes_text(2**i if i else 0), "middle")
    svg.line(left, up.start, right, up.start, "axis")
    svg.text((left + right) / 2, _HEIGHT - 8, "bytes in a message", "middle", "t name")
    return svg.drawn()


def _short(value: float) -> str:
    for unit, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if value < 1000 * factor:
            return digits(value / factor) + unit
    return digits(value)

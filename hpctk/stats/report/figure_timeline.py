"""Figure: a few steps, a lane for each rank, on one clock."""

from __future__ import annotations

from typing import Any

from hpctk.stats.report.numbers import bytes_text, printable, seconds_text, shortened
from hpctk.stats.report.svg import LETTER, Axis, Svg
from hpctk.stats.report.timeline import Lane

_WIDTH, _LEFT, _TOP, _LANE = 900.0, 110.0, 22.0, 30.0
#: A call is at least so wide, or nobody would see it.
_THINNEST = 0.8


def timeline(lanes: list[Lane]) -> str:
    """Return the drawing, "" where there is nothing to show."""
    times = [t for lane in lanes for _, *both in lane.steps for t in both]
    times += [t for lane in lanes for call in lane.calls for t in (call["start_s"], call["end_s"])]
    if not times or max(times) <= min(times):
        return ""
    origin = min(times)
    axis = Axis(0.0, max(times) - origin, _LEFT, _WIDTH - 20)
    bottom = _TOP + _LANE * len(lanes)
    svg = Svg(_WIDTH, bottom + 30, "calls of a few steps, a lane for each rank")
    for value in axis.ticks(7):
        svg.line(axis.at(value), _TOP, axis.at(value), bottom, "grid")
        svg.text(axis.at(value), bottom + 17, seconds_text(value), "middle")
    for i, lane in enumerate(lanes):
        y = _TOP + _LANE * i
        svg.text(
            _LEFT - 8,
            y + _LANE / 2 + 4,
            shortened(f"{lane.rank}  {printable(lane.host)}", int((_LEFT - 12) / LETTER)),
            "end",
        )
        for number, start, end in lane.steps:
            x, width = axis.at(start - origin), axis.at(end - origin) - axis.at(start - origin)
            svg.rect(
                x,
                y + 4,
                width,
                _LANE - 8,
                "step",
                f"rank {lane.rank}, step {number}: {seconds_text(end - start)}",
            )
            svg.line(x, y + 2, x, y + _LANE - 2, "mark")
            if i == 0 and width > 44:
                svg.text(x + 2, _TOP - 6, f"step {number}")
        for call in lane.calls:
            _call(svg, axis, y, call, origin)
    return svg.drawn()


def _call(svg: Svg, axis: Axis, y: float, call: dict[str, Any], origin: float) -> None:
    """Draw a call: what it waited is its first part in the colour of waiting, whenever it was."""
    start, end = call["start_s"] - origin, call["end_s"] - origin
    x, width = axis.at(start), max(_THINNEST, axis.at(end) - axis.at(start))
    words = [printable(call[name], 40) for name in ("operation", "schedule", "tensor")]
    waited = call["waiting_s"] if 0 <= call["waiting_s"] <= end - start else 0.0
    sent = bytes_text(call["sent_bytes"]) if call["sent_bytes"] >= 0 else "bytes unknown"
    tip = f"{' '.join(w for w in words if w)}: {seconds_text(end - start)}, waiting {seconds_text(waited)}, sent {sent}"
    svg.rect(x, y + 8, width, _LANE - 16, "call", tip)
    if waited > 0:
        svg.rect(x, y + 8, max(0.0, axis.at(start + waited) - x), _LANE - 16, "part1", tip)

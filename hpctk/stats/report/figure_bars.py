"""Figure: what each rank's seconds went into, as stacked bars."""

from __future__ import annotations

from typing import Any

from hpctk.stats import metrics
from hpctk.stats.report.numbers import seconds_text, shortened
from hpctk.stats.report.svg import LETTER, Axis, Svg

#: Key of a rank's entry in the document: its name. The classes of the page's style are part0, part1 and so on.
PARTS = {
    "computing_s": "computing",
    "waiting_s": "waiting",
    "combining_s": "combining",
    "compressing_s": "compressing",
    "decompressing_s": "decompressing",
    "staging_s": "staging",
    "other_s": "other communication",
}
#: Bars; with more ranks, neighbours share one: their mean.
MOST = 40
_TOP = 10.0


def bars(document: dict[str, Any]) -> str:
    """Return the drawing for wide screens and the one for narrow ones, "" where no rank spent any time."""
    rows = grouped(document["ranks"])
    broad = _bars(rows, 900.0, 150.0)
    return (
        f'<div class="broad">{broad}</div><div class="narrow">{_bars(rows, 420.0, 96.0)}</div>'
        if broad
        else ""
    )


def _bars(rows: list[dict[str, Any]], width: float, left: float) -> str:
    longest = max((max(sum(row[key] for key in PARTS), row["steps_s"]) for row in rows), default=0.0)
    if longest <= 0:
        return ""
    pitch = 30.0 if len(rows) <= 8 else 18.0
    svg = Svg(width, _TOP + pitch * len(rows) + 28, "seconds of each rank by what they went into")
    axis = Axis(0.0, longest, left, width - 24)
    bottom = _TOP + pitch * len(rows)
    for value in axis.ticks(6 if width > 600 else 3):
        svg.line(axis.at(value), _TOP, axis.at(value), bottom, "grid")
        svg.text(axis.at(value), bottom + 17, seconds_text(value), "middle")
    for i, row in enumerate(rows):
        y, at = _TOP + pitch * i, 0.0
        svg.text(left - 8, y + pitch / 2 + 4, shortened(row["name"], int((left - 12) / LETTER)), "end")
        for place, (key, name) in enumerate(PARTS.items()):
            if row[key] > 0:
                start, end = axis.at(at), axis.at(at + row[key])
                svg.rect(start, y + 2, end - start, pitch - 4, f"part{place}", f"{row['name']}: {name} "
                         f"{seconds_text(row[key])}")  # fmt: skip
                at += row[key]
        if row["steps_s"] > 0:
            svg.line(axis.at(row["steps_s"]), y, axis.at(row["steps_s"]), y + pitch, "mark")
    return svg.drawn()


def grouped(ranks: list[dict[str, Any]], most: int = MOST) -> list[dict[str, Any]]:
    """Return at most `most` rows with a name and mean seconds: neighbouring ranks together."""
    places = metrics.bins(len(ranks), most).tolist()
    groups: dict[int, list[dict[str, Any]]] = {}
    for place, one in zip(places, ranks, strict=True):
        groups.setdefault(place, []).append(one)
    rows = []
    for members in groups.values():
        first, last = members[0], members[-1]
        name = f"ranks {first['rank']}-{last['rank']}"
        if len(members) == 1:
            name = f"{first['rank']}  {shortened(first['host'], 18)}"
        means = {key: sum(one[key] for one in members) / len(members) for key in (*PARTS, "steps_s")}
        rows.append({"name": name, **means})
    return rows

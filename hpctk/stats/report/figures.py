"""The figures of a report's page, in their order. A new one is a function and an entry in FIGURES.

A function that draws returns SVG, "" where there is nothing to draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctk.stats import metrics
from hpctk.stats.report.account import FIELDS, Account
from hpctk.stats.report.numbers import bytes_text, count, digits, printable, seconds_text, shortened
from hpctk.stats.report.svg import HEIGHT, LETTER, WIDTH, Axis, Line, Svg, chart, smoothed
from hpctk.stats.report.timeline import Lane

#: Kind of mark in a legend, and its name.
Mark = tuple[str, str]
#: What a rank's seconds went into: key of its entry in the document, and name. The classes of the page's style are
#: part0, part1 and so on.
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
MOST_BARS = 40
#: Runs that have colours of their own; those after them share these.
COLOURS = 8
#: The matrix: its left upper corner and its side, the most fields with tips, the most boundaries that are drawn.
_LEFT, _TOP, _SIDE = 52.0, 34.0, 340.0
_TIPS, _BOUNDARIES = 32, 64
#: The timeline: the width of all and of names, where lanes begin and how high one is. A call is at least so wide.
_TIME_WIDTH, _NAMES, _LANES, _LANE = 900.0, 110.0, 22.0, 30.0
_THINNEST = 0.8


@dataclass(frozen=True)
class Material:
    """What figures are drawn from."""

    document: dict[str, Any]
    account: Account
    lanes: list[Lane]


@dataclass(frozen=True)
class Figure:
    """A figure in the page; `empty` stands there where there is nothing to draw.

    `shape` is "wide" for the full width of the page, "tall" for two rows of it; `legend` has kinds of marks and names.
    """

    title: str
    caption: str
    empty: str
    draw: Callable[[Material], str]
    shape: str = ""
    legend: tuple[Mark, ...] = ()


def bars(ranks: list[dict[str, Any]]) -> str:
    """Draw what each rank's seconds went into as stacked bars: once for wide screens, once for narrow ones."""
    rows = grouped(ranks)
    if max((max(sum(row[key] for key in PARTS), row["steps_s"]) for row in rows), default=0.0) <= 0:
        return ""
    broad, narrow = _bars(rows, 900.0, 150.0), _bars(rows, 420.0, 96.0)
    return f'<div class="broad">{broad}</div><div class="narrow">{narrow}</div>'


def _bars(rows: list[dict[str, Any]], width: float, left: float) -> str:
    longest = max(max(sum(row[key] for key in PARTS), row["steps_s"]) for row in rows)
    pitch, top = 30.0 if len(rows) <= 8 else 18.0, 10.0
    bottom = top + pitch * len(rows)
    svg = Svg(width, bottom + 28, "seconds of each rank by what they went into")
    axis = Axis(0.0, longest, left, width - 24)
    _time_grid(svg, axis, top, bottom, 6 if width > 600 else 3)
    for i, row in enumerate(rows):
        y, end_s = top + pitch * i, 0.0
        _row_name(svg, left, y + pitch / 2, row["name"])
        for part, (key, name) in enumerate(PARTS.items()):
            if row[key] > 0:
                start, end_s = axis.at(end_s), end_s + row[key]
                tip = f"{row['name']}: {name} {seconds_text(row[key])}"
                svg.rect(start, y + 2, axis.at(end_s) - start, pitch - 4, f"part{part}", tip)
        if row["steps_s"] > 0:
            svg.line(axis.at(row["steps_s"]), y, axis.at(row["steps_s"]), y + pitch, "mark")
    return svg.drawn()


def _time_grid(svg: Svg, axis: Axis, top: float, bottom: float, most: int) -> None:
    for value in axis.ticks(most):
        svg.line(axis.at(value), top, axis.at(value), bottom, "grid")
        svg.text(axis.at(value), bottom + 17, seconds_text(value), "middle")


def _row_name(svg: Svg, right: float, middle: float, name: str) -> None:
    """Write the name of a row to the left of `right`."""
    svg.text(right - 8, middle + 4, shortened(name, int((right - 12) / LETTER)), "end")


def grouped(ranks: list[dict[str, Any]], most: int = MOST_BARS) -> list[dict[str, Any]]:
    """Return at most `most` rows with a name and mean seconds: neighbouring ranks together."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for group, rank in zip(metrics.bins(len(ranks), most).tolist(), ranks, strict=True):
        groups.setdefault(group, []).append(rank)
    rows = []
    for members in groups.values():
        first, last = members[0], members[-1]
        name = f"ranks {first['rank']}-{last['rank']}"
        if len(members) == 1:
            name = f"{first['rank']}  {shortened(first['host'], 18)}"
        means = {key: sum(rank[key] for rank in members) / len(members) for key in (*PARTS, "steps_s")}
        rows.append({"name": name, **means})
    return rows


def matrix(account: Account) -> str:
    """Draw who sends how much to whom, with the boundaries of nodes."""
    sent, size = account.matrix.sent, account.matrix.size
    most = float(sent.max()) if sent.size else 0.0
    if most <= 0:
        return ""
    svg = Svg(_LEFT + _SIDE + 16, _TOP + _SIDE + 40, "bytes from every rank to every other")
    svg.rect(_LEFT, _TOP, _SIDE, _SIDE, "empty")
    smallest = float(sent[sent > 0].min())
    least = math.log(max(1.0, smallest))
    span = math.log(max(1.0, most)) - least
    fields = account.matrix.fields.tolist()
    edges = [rank for rank in range(size) if rank == 0 or fields[rank] != fields[rank - 1]] + [size]
    at = [_SIDE * edge / size for edge in edges]
    for i, j in itertools.product(range(len(sent)), repeat=2):
        amount = float(sent[i, j])
        if amount > 0:
            share = (math.log(max(1.0, amount)) - least) / span if span > 0 else 1.0
            tip = f"{_ranks(edges, i)} to {_ranks(edges, j)}: {bytes_text(amount)}"
            x, y, width, height = _LEFT + at[j], _TOP + at[i], at[j + 1] - at[j], at[i + 1] - at[i]
            svg.rect(x, y, width, height, "field", tip if len(sent) <= _TIPS else "", 0.15 + 0.85 * share)
    nodes = _node_boundaries(account)
    for rank in nodes:
        offset, kind = _SIDE * rank / size, "node" if len(nodes) <= 8 else "node many"
        svg.line(_LEFT + offset, _TOP, _LEFT + offset, _TOP + _SIDE, kind)
        svg.line(_LEFT, _TOP + offset, _LEFT + _SIDE, _TOP + offset, kind)
    for rank in range(0, size, max(1, -(-size // 8))):
        offset = _SIDE * (rank + 0.5) / size
        svg.text(_LEFT - 6, _TOP + offset + 4, str(rank), "end")
        svg.text(_LEFT + offset, _TOP - 6, str(rank), "middle")
    svg.text(_LEFT + _SIDE / 2, 12, "to rank", "middle", "t name")
    svg.text(14, _TOP + _SIDE / 2, "from rank", "middle", "t name", turn=True)
    _shades(svg, smallest, most, "; lines part nodes" if nodes else "")
    return svg.drawn()


def _node_boundaries(account: Account) -> list[int]:
    """Return the ranks at which another node begins; none where they are too many to draw."""
    nodes = list(zip(account.ranks, account.nodes, strict=True))
    first = [rank for (_, before), (rank, node) in itertools.pairwise(nodes) if before != node]
    return first if len(first) <= _BOUNDARIES else []


def _ranks(edges: list[int], field: int) -> str:
    first, last = edges[field], edges[field + 1] - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _shades(svg: Svg, least: float, most: float, remark: str) -> None:
    """Draw the scale of shades below the matrix."""
    y = _TOP + _SIDE + 14
    steps = 1 if least >= most * 0.99 else 6
    for i in range(steps):
        svg.rect(_LEFT + 16 * i, y, 16, 10, "field", "", 1.0 if steps == 1 else 0.15 + 0.85 * i / (steps - 1))
    text = bytes_text(most) if steps == 1 else f"{bytes_text(least)} to {bytes_text(most)}"
    svg.text(_LEFT + 16 * steps + 8, y + 9, text + remark)


def sizes(bins: list[dict[str, Any]]) -> str:
    """Draw how many messages were how long."""
    used = [i for i, row in enumerate(bins) if row["messages"] > 0]
    if not used:
        return ""
    # A few empty bins at both sides: one bar alone says little.
    first, last = max(0, used[0] - 2), min(len(bins) - 1, used[-1] + 2)
    svg = Svg(WIDTH, HEIGHT, "messages sent by their length")
    axis = Axis(0.0, max(row["messages"] for row in bins) * 1.05, HEIGHT - 46, 14)
    left, right = 62.0, WIDTH - 16
    pitch = (right - left) / (last - first + 1)
    for value in axis.ticks(5):
        svg.line(left, axis.at(value), right, axis.at(value), "grid")
        svg.text(left - 6, axis.at(value) + 4, _short_count(value), "end")
    labelled = -(-(last - first + 1) // 6)
    for i in range(first, last + 1):
        row, x, lower = bins[i], left + pitch * (i - first), bytes_text(2**i if i else 0)
        if row["messages"] > 0:
            amounts = f"{count(row['messages'])} messages, {bytes_text(row['sent_bytes'])}"
            tip, top = f"{lower} to {bytes_text(2 ** (i + 1))}: {amounts}", axis.at(row["messages"])
            svg.rect(x + 1, top, pitch - 2, axis.start - top, "part0", tip)
        if (i - first) % labelled == 0:
            svg.line(x, axis.start, x, axis.start + 4, "axis")
            svg.text(x, axis.start + 17, lower, "middle")
    svg.line(left, axis.start, right, axis.start, "axis")
    svg.text((left + right) / 2, HEIGHT - 8, "bytes in a message", "middle", "t name")
    return svg.drawn()


def _short_count(value: float) -> str:
    for unit, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if value < 1000 * factor:
            return digits(value / factor) + unit
    return digits(value)


def _volume(curve: dict[str, Any]) -> str:
    if not any(curve["step_dense_bytes"]) and not any(curve["step_sent_bytes"]):
        return ""
    lines = [
        Line("plain averaging", "second", curve["step"], curve["step_dense_bytes"]),
        Line("sent", "first", curve["step"], curve["step_sent_bytes"]),
    ]
    return chart(lines, "bytes per step", "step", count, bytes_text, from_zero=True)


def _loss(curve: dict[str, Any], against: str, name: str, show: Callable[[float], str]) -> str:
    # A rank that sent nothing has all its losses at one x.
    if max((x or 0.0 for x in curve[against]), default=0) <= 0:
        return ""
    lines = [
        Line("loss", "faint first", curve[against], curve["loss"]),
        Line("loss, smoothed", "first", curve[against], smoothed(curve["loss"])),
    ]
    return chart(lines, f"loss against {name}", name, show)


def timeline(lanes: list[Lane]) -> str:
    """Draw a few steps, a lane for each rank, on one clock."""
    times = [t for lane in lanes for _, *both in lane.steps for t in both]
    times += [t for lane in lanes for call in lane.calls for t in (call["start_s"], call["end_s"])]
    if not times or max(times) <= min(times):
        return ""
    origin = min(times)
    axis = Axis(0.0, max(times) - origin, _NAMES, _TIME_WIDTH - 20)
    bottom = _LANES + _LANE * len(lanes)
    svg = Svg(_TIME_WIDTH, bottom + 30, "calls of a few steps, a lane for each rank")
    _time_grid(svg, axis, _LANES, bottom, 7)
    for i, lane in enumerate(lanes):
        y = _LANES + _LANE * i
        _row_name(svg, _NAMES, y + _LANE / 2, f"{lane.rank}  {printable(lane.host)}")
        for number, start, end in lane.steps:
            x, width = axis.at(start - origin), axis.at(end - origin) - axis.at(start - origin)
            tip = f"rank {lane.rank}, step {number}: {seconds_text(end - start)}"
            svg.rect(x, y + 4, width, _LANE - 8, "step", tip)
            svg.line(x, y + 2, x, y + _LANE - 2, "mark")
            if i == 0 and width > 44:
                svg.text(x + 2, _LANES - 6, f"step {number}")
        for call in lane.calls:
            _call(svg, axis, y, call, origin)
    return svg.drawn()


def _call(svg: Svg, axis: Axis, y: float, call: dict[str, Any], origin: float) -> None:
    """Draw a call: what it waited is its first part in the colour of waiting, whenever it was."""
    start, end = call["start_s"] - origin, call["end_s"] - origin
    x, width = axis.at(start), max(_THINNEST, axis.at(end) - axis.at(start))
    labels = (printable(call[name], 40) for name in ("operation", "schedule", "tensor"))
    words = " ".join(label for label in labels if label)
    waited = call["waiting_s"] if 0 <= call["waiting_s"] <= end - start else 0.0
    sent = bytes_text(call["sent_bytes"]) if call["sent_bytes"] >= 0 else "bytes unknown"
    tip = f"{words}: {seconds_text(end - start)}, waiting {seconds_text(waited)}, sent {sent}"
    svg.rect(x, y + 8, width, _LANE - 16, "call", tip)
    if waited > 0:
        svg.rect(x, y + 8, max(0.0, axis.at(start + waited) - x), _LANE - 16, "part1", tip)


def run_bars(runs: Sequence[dict[str, Any]], key: str, show: Callable[[float | None], str]) -> str:
    """Draw one number of several runs as bars."""
    most = max((run[key] or 0.0 for run in runs), default=0.0)
    if most <= 0:
        return ""
    left, pitch = 130.0, 30.0
    svg = Svg(WIDTH, pitch * len(runs) + 8, f"{key} of every run")
    for i, run in enumerate(runs):
        y, length = 4 + pitch * i, (run[key] or 0.0) / most * (WIDTH - left - 80)
        _row_name(svg, left, y + pitch / 2, run["name"])
        svg.rect(left, y + 4, length, pitch - 8, f"run{i % COLOURS}", run["name"])
        svg.text(left + length + 6, y + pitch / 2 + 4, show(run[key]), kind="t name")
    return svg.drawn()


FIGURES = (
    Figure(
        "Where the seconds went",
        "The mark is the time of all steps; what stands beyond it was hidden behind computing, or was before the "
        f"first step. Of more than {MOST_BARS} ranks, neighbours share a bar: their mean.",
        "No steps and no calls yet.",
        lambda material: bars(material.document["ranks"]),
        shape="wide",
        legend=tuple((f"part{i}", name) for i, name in enumerate(PARTS.values())),
    ),
    Figure(
        "Who sends to whom",
        f"Shades are logarithmic; of more than {FIELDS} ranks, neighbours share a field. Bytes that only the library "
        "knows are not in it.",
        "Nothing that is counted went from rank to rank.",
        lambda material: matrix(material.account),
        shape="tall",
    ),
    Figure(
        "Message sizes",
        "Messages sent by all ranks; those of a bar are up to twice as long as those of the one before.",
        "No message was counted.",
        lambda material: sizes(material.document["message_sizes"]),
    ),
    Figure(
        "Bytes per step",
        "Sent by a rank, on average, against plain averaging of all gradients.",
        "Nothing was counted, and averaging would send nothing.",
        lambda material: _volume(material.document["curve"]),
        legend=(("first", "sent"), ("second", "plain averaging")),
    ),
    Figure(
        "Loss against bytes",
        "The mean loss of all ranks, and smoothed, against the bytes that a rank had sent.",
        "No loss was given to the optimizer, or no bytes were counted.",
        lambda material: _loss(material.document["curve"], "sent_bytes", "bytes sent by a rank", bytes_text),
    ),
    Figure(
        "Loss against seconds",
        "The mean loss of all ranks, and smoothed, against the seconds of their steps.",
        "No loss was given to the optimizer.",
        lambda material: _loss(material.document["curve"], "seconds", "seconds", seconds_text),
    ),
    Figure(
        "A few steps",
        "On the clock of rank 0; a mark where a step begins. Waiting is drawn at the start of a call, wherever in it "
        "it was.",
        "No calls have rows of their own: hpctk kept only their sums.",
        lambda material: timeline(material.lanes),
        shape="wide",
        legend=(("step", "step"), ("call", "call"), ("part1", "waiting in it")),
    ),
)

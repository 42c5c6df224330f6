"""The figures of a report, in their order. A new one is one entry in FIGURES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpctk.stats.report.account import Account
from hpctk.stats.report.figure_bars import MOST, PARTS, bars
from hpctk.stats.report.figure_matrix import matrix
from hpctk.stats.report.figure_sizes import sizes
from hpctk.stats.report.figure_timeline import timeline
from hpctk.stats.report.lines import Line, chart, smoothed
from hpctk.stats.report.matrix import MOST as FIELDS
from hpctk.stats.report.numbers import bytes_text, count, seconds_text
from hpctk.stats.report.timeline import Lane

#: Kind of mark and name, as a legend shows them.
Key = tuple[str, str]


@dataclass(frozen=True)
class Material:
    """What figures are drawn from."""

    document: dict[str, Any]
    account: Account
    lanes: list[Lane]


@dataclass(frozen=True)
class Figure:
    """A figure in the page.

    Attributes
    ----------
    title, caption, empty : str
        `empty` is said where there is nothing to draw.
    draw
        From the material to SVG, "" where there is nothing to draw.
    shape : str
        "wide" for the whole width of the page, "tall" for two rows of it.
    legend : tuple of Key
    """

    title: str
    caption: str
    empty: str
    draw: Callable[[Material], str]
    shape: str = ""
    legend: tuple[Key, ...] = ()


def _volume(material: Material) -> str:
    curve = material.document["curve"]
    if not any(curve["step_dense_bytes"]) and not any(curve["step_sent_bytes"]):
        return ""
    lines = [
        Line("plain averaging", "second", curve["step"], curve["step_dense_bytes"]),
        Line("sent", "first", curve["step"], curve["step_sent_bytes"]),
    ]
    return chart(lines, "bytes per step", "step", count, bytes_text, from_zero=True)


def _loss(material: Material, against: str, name: str, show: Callable[[float], str]) -> str:
    curve = material.document["curve"]
    # A rank that sent nothing has its whole course at one place.
    if max((x or 0.0 for x in curve[against]), default=0) <= 0:
        return ""
    lines = [
        Line("loss", "faint first", curve[against], curve["loss"]),
        Line("loss, smoothed", "first", curve[against], smoothed(curve["loss"])),
    ]
    return chart(lines, f"loss against {name}", name, show)


FIGURES = (
    Figure(
        "Where the seconds went",
        "The mark is the time of all steps; what stands beyond it was hidden behind computing, or was before the "
        f"first step. Of more than {MOST} ranks, neighbours share a bar: their mean.",
        "No steps and no calls yet.",
        lambda material: bars(material.document),
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
        lambda material: sizes(material.document),
    ),
    Figure(
        "Bytes per step",
        "Sent by a rank, on average, against plain averaging of all gradients.",
        "Nothing was counted, and averaging would send nothing.",
        _volume,
        legend=(("first", "sent"), ("second", "plain averaging")),
    ),
    Figure(
        "Loss against bytes",
        "The mean loss of all ranks, and smoothed, against the bytes that a rank had sent.",
        "No loss was given to the optimizer, or no bytes were counted.",
        lambda material: _loss(material, "sent_bytes", "bytes sent by a rank", bytes_text),
    ),
    Figure(
        "Loss against seconds",
        "The mean loss of all ranks, and smoothed, against the seconds of their steps.",
        "No loss was given to the optimizer.",
        lambda material: _loss(material, "seconds", "seconds", seconds_text),
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

"""A picture of a comparison: loss against bytes sent and against seconds, a line for each method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from hpctk.checkpoint.rank_file import beside

#: Of lines, in the order of the methods; the first is for the baseline. Told apart by those who do not see all colours.
COLOURS = (
    "#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#a6761d", "#66a61e",
)  # fmt: skip
#: Points over which a line is smoothed.
SMOOTH = 11
#: Axes whose ends are farther apart than this factor show powers of ten only.
DETAILED = 1e5


@dataclass(frozen=True)
class Line:
    """One method's course; bytes and losses that a logarithmic axis cannot show are left out."""

    method: str
    megabytes: list[float]
    seconds: list[float]
    losses: list[float]


def lines(document: Mapping[str, Any]) -> list[Line]:
    """Return what is drawn of a result.json: pure."""
    found = []
    for method, entry in document["methods"].items():
        curve = entry["curve"]
        columns = (curve["sent_bytes"], curve["seconds"], curve["losses"])
        kept = [
            (sent / 1e6, seconds, loss)
            for sent, seconds, loss in zip(*columns, strict=True)
            if loss is not None and loss > 0
        ]
        losses = smoothed([loss for _, _, loss in kept])
        found.append(Line(method, [sent for sent, _, _ in kept], [s for _, s, _ in kept], losses))
    return found


def smoothed(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """Return running geometric means, of fewer values at both ends; as long as `values`."""
    reach = width // 2
    means = []
    for i in range(len(values)):
        part = values[max(0, i - reach) : i + reach + 1]
        means.append(math.prod(value ** (1 / len(part)) for value in part))
    return means


def draw(document: Mapping[str, Any], target: Path) -> None:
    """Write the picture as PNG, whole or not at all; ImportError where matplotlib is missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: nothing global, and no display is looked for.
    figure = Figure(figsize=(11, 5.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    drawn = lines(document)
    for line, colour in zip(drawn, cycle(COLOURS), strict=False):
        sent = [(mb, loss) for mb, loss in zip(line.megabytes, line.losses, strict=True) if mb > 0]
        _plot(left, line.method, colour, sent)
        _plot(right, line.method, colour, list(zip(line.seconds, line.losses, strict=True)))
    for axes, name in ((left, "megabytes sent per rank"), (right, "seconds")):
        axes.set_xlabel(name)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        # One rank alone sends nothing; without a point there is no range to take the logarithm of.
        if any(len(one.get_xdata()) for one in axes.get_lines()):
            _logarithmic(axes)
    left.set_ylabel("training loss")
    figure.suptitle(f"{document['task']} on {document['ranks']} ranks", fontweight="bold")
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    with beside(target) as unfinished:
        figure.savefig(unfinished, format="png")


def _plot(axes: Any, method: str, colour: str, points: Sequence[tuple[float, float]]) -> None:
    """Draw a line, with a dot where it ends."""
    across, up = [point[0] for point in points], [point[1] for point in points]
    axes.plot(across, up, color=colour, linewidth=2.2 if method == "mean" else 1.7, label=method)
    axes.plot(across[-1:], up[-1:], "o", color=colour, markersize=5)


def _logarithmic(axes: Any) -> None:
    """Use logarithmic axes with 0.1, 0.2, 0.5, 1 written at them: powers of ten are for larger ranges."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, (least, most) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        wide = most > DETAILED * least
        axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())

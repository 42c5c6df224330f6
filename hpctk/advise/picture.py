"""A picture of how ways scale: seconds of a step against the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctk.advise.predict import Prediction

#: Lines that one can still tell apart.
LINES = 8


def lines(scales: Mapping[int, Sequence[Prediction]], count: int = LINES) -> dict[str, list[float]]:
    """Return the seconds of the ways to draw: both kinds of DDP, then the fastest at the largest scale. Pure."""
    last = scales[max(scales)]
    dense = [entry.name for entry in last if entry.name.startswith("DDP")]
    others = sorted((e for e in last if e.name not in dense and not e.caveat), key=lambda entry: entry.seconds)
    chosen = [*dense, *(entry.name for entry in others)][:count]
    by_name = {ranks: {entry.name: entry.seconds for entry in entries} for ranks, entries in scales.items()}
    return {name: [by_name[ranks][name] for ranks in scales] for name in chosen}


def draw(scales: Mapping[int, Sequence[Prediction]], title: str, target: Path) -> None:
    """Write the picture as PNG; ImportError where matplotlib is missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (name, seconds) in enumerate(lines(scales).items()):
        axes.plot(
            list(scales), seconds, marker="o", linestyle="--" if name.startswith("DDP") else "-", color=f"C{place}"
        )
        axes.annotate(
            name, (max(scales), seconds[-1]), xytext=(6, 0), textcoords="offset points", fontsize=8, va="center"
        )
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a step (predicted)", title=title)
    axes.set_xticks(list(scales), [str(ranks) for ranks in scales], minor=False)
    axes.minorticks_off()
    axes.margins(x=0.25)
    axes.grid(True, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)

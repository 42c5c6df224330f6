"""All set-ups on one sheet: how many times sooner than 16-bit DDP each method reached the target. Table and picture."""

from __future__ import annotations

import math

from .page import markdown

#: The baseline to beat.
BASE = "ddp-fp16"
#: No contenders: `alone` shares nothing, so that it reaches another target or none.
ASIDE = ("alone", BASE)
TASKS = ("mlp", "cnn", "lstm", "transformer")


def in_order(documents):
    """Return the set-ups that have the baseline, by task, the slowest links first."""
    known = [one for one in documents if to_target(one).get(BASE)]
    return sorted(
        known, key=lambda one: (TASKS.index(one["settings"]["task"]), one["settings"]["bits_per_second"] or 1e12)
    )


def to_target(document):
    return {row["name"]: row["to_target_s"] for row in document["summary"]}


def title(document):
    """Return a set-up in a few words."""
    settings = document["settings"]
    links = (
        "no limit"
        if settings["rate"] == "none"
        else settings["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    )
    return f"{settings['task']}, {document['params'] / 1e6:.1f} M, {links}"


def gains(document):
    """Return by method how many times sooner than the baseline it was at the target; None where it never was."""
    times = to_target(document)
    return {name: times[BASE] / own if own else None for name, own in times.items() if name not in ASIDE}


def table(documents, *, limited=False):
    """Return a line for each set-up, or for those with limited links: who was first, by how much, and who lost."""
    rows = []
    for document in in_order(documents):
        if limited and document["settings"]["rate"] == "none":
            continue
        times, found = to_target(document), gains(document)
        ahead = sorted(((gain, name) for name, gain in found.items() if gain), reverse=True)
        (best, name), slower = ahead[0], [other for gain, other in ahead if gain < 1]
        missed = [other for other, gain in found.items() if gain is None]
        behind = [*reversed(slower), *(f"{other} (missed)" for other in missed)]
        dense = times.get("ddp")
        rows.append(
            [
                title(document),
                f"{dense:.1f} s" if dense else "-",
                f"{times[BASE]:.1f} s",
                f"{name}, {times[name]:.1f} s",
                f"{best:.1f}",
                ", ".join(other for other in behind if other != "ddp") or "none",
            ]
        )
    head = ["task, parameters, links", "DDP, 32 bit", "DDP, 16 bit", "first", "times sooner", "later than 16-bit DDP"]
    return markdown(head, rows)


def draw(documents, target):
    """Draw the map: a row for each method, a column for each set-up."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    columns = in_order(documents)
    found = [gains(document) for document in columns]
    names = list(dict.fromkeys(name for one in found for name in one))
    middle = {name: [math.log2(one[name]) for one in found if one.get(name)] for name in names}
    names.sort(key=lambda name: -sum(middle[name]) / len(middle[name]) if middle[name] else math.inf)
    values = [[math.log2(one[name]) if one.get(name) else math.nan for one in found] for name in names]
    figure = Figure(figsize=(2.6 + 0.95 * len(columns), 1.9 + 0.34 * len(names)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(values, cmap="RdYlGn", norm=TwoSlopeNorm(0, -3.5, 3.5), aspect="auto")
    for y, name in enumerate(names):
        for x, one in enumerate(found):
            gain = one.get(name)
            text = (
                "" if name not in one else "missed" if gain is None else f"{gain:.1f}" if gain < 10 else f"{gain:.0f}"
            )
            axes.text(x, y, text, ha="center", va="center", fontsize=9, color="#1b1f24" if gain else "#8a3030")
    axes.set_xticks(range(len(columns)), [title(one).replace(", ", "\n") for one in columns], fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title("Time to target: how many times sooner than 16-bit DDP", fontsize=11)
    figure.savefig(target)

"""Make benchmarks/RESULTS.md and its pictures from the files in benchmarks/results. Starts no MPI.

Start it with `./launch/bench report`. It also writes the map into README.md and docs/when-it-pays.md, where they have a
place for it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import _rig
from _training import forecast
from _training import map as sheet
from _training.page import page
from _training.results import FOLDER, PAPERS

from hpctk.advise.evidence import load


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch/bench report", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results are [benchmarks/results]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each method of each result to FILE")
    options = parser.parse_args()
    documents = {document["name"]: document for document in load(options.folder)}
    for name, document in documents.items():
        forecast.foretell(document)
        document["curves"] = drawn(document, options.folder / f"{name}.png")
    target = options.folder.parent / "RESULTS.md"
    target.write_text(page(documents, published(options.folder / PAPERS.name)))
    if options.folder == FOLDER and documents:
        write_map(list(documents.values()))
    rows = [
        {**row, "name": f"{name}: {row['name']}", "method": row["name"]}
        for name, document in documents.items()
        for row in document["summary"]
    ]
    _rig.write(options.json, rows)
    print(f"{target}: {len(documents)} set-ups, {len(rows)} rows")


def published(folder):
    """Return the experiments of the papers that came to their end, by name."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: one for name, one in found.items() if "table" in one}


#: Where a page has room for the table of the map.
PLACE = re.compile(
    r"(?<=<!-- the map: ./launch/bench report writes it -->\n)\n?.*?(?=<!-- end of the map -->)", re.DOTALL
)
ROOT = Path(__file__).parents[1]


def write_map(documents):
    """Write table and picture of all set-ups to where users read them."""
    for page_of in (ROOT / "README.md", ROOT / "docs" / "when-it-pays.md"):
        text = page_of.read_text(encoding="utf-8")
        made = with_map(text, documents, limited=page_of.name == "README.md")
        if made != text:
            page_of.write_text(made, encoding="utf-8")
    try:
        sheet.draw(documents, ROOT / "docs" / "map.png")
    except ImportError:
        print("report: no map drawn: it needs matplotlib (pip install 'hpctk[plot]')", file=sys.stderr)


def with_map(text, documents, *, limited):
    """Return the text of a page with the table in its place."""
    return PLACE.sub(lambda _: f"\n{sheet.table(documents, limited=limited)}\n\n", text)


def drawn(document, target):
    """Draw the held-out metric of each method's first seed against seconds; return whether it could."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("report: no pictures: they need matplotlib (pip install 'hpctk[plot]')", file=sys.stderr)
        return False
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    column = 3 if document["settings"]["metric"] == "accuracy" else 2
    runs = [run for run in document["runs"] if run["curve"] and run["seed"] == 0]
    for place, run in enumerate(runs):
        seconds, values = [point[1] for point in run["curve"]], [point[column] for point in run["curve"]]
        style = "--" if run["method"].startswith("ddp") else "-"
        axes.plot(seconds, values, style, marker=".", label=run["method"], color=f"C{place % 10}")
    axes.axhline(document["settings"]["target"], color="#999999", linewidth=0.8)
    settings = document["settings"]
    title = f"{settings['task']}, {settings['hosts']} ranks, links: {settings['rate']}"
    axes.set(xscale="log", xlabel="seconds of training", ylabel=f"held-out {settings['metric']}", title=title)
    axes.grid(True, color="#dddddd")
    if runs:
        axes.legend(fontsize=8)
        figure.savefig(target)
    return bool(runs)


if __name__ == "__main__":
    main()
